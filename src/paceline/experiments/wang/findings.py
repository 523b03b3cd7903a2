"""Tables, figures and verdicts of the MNIST study."""

from __future__ import annotations

from paceline.experiments.outcome import Findings, Outcomes


def findings(outcomes: Outcomes) -> Findings:
    """Everything on the page."""
    return Findings()
