"""How `paceline bench predict` shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.lab.predict import CaseOutcome, Summary, Verdict


def print_outcomes(outcomes: Sequence[CaseOutcome]) -> None:
    """Every configuration with its error; for the last column see `exchange_errors`."""
    from rich import box
    from rich.table import Table

    from benchmarks.lab.predict import exchange_errors
    from paceline.report.tables import wide_console

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "cores of hosts", "link", "option"):
        made.add_column(name, no_wrap=True)
    names = ("predicted s", "computing", "network", "measured s", "spread", "error", "of exchange")
    for name in names:
        made.add_column(name, justify="right", no_wrap=True)
    apart = exchange_errors(outcomes)
    before = None
    for outcome in outcomes:
        same = outcome.case == before
        before = outcome.case
        error = apart.get((outcome.case, outcome.option))
        made.add_row(
            "" if same else outcome.model,
            "" if same else ", ".join(f"{cores:g}" for cores in outcome.cores),
            "" if same else outcome.rate,
            outcome.option,
            f"{outcome.predicted:.3f}",
            f"{outcome.terms.get('compute', 0.0) + outcome.terms.get('waiting', 0.0):.3f}",
            f"{outcome.terms.get('exposed', 0.0):.3f}",
            f"{outcome.measured:.3f}",
            f"{(outcome.high - outcome.low) / outcome.measured:.0%}",
            f"{outcome.error:+.0%}",
            f"{error:+.0%}" if error is not None else "",
        )
    wide_console().print(made)


def print_summary(summary: Summary, skipped: Sequence[str]) -> None:
    """Errors against their bars, wrong choices, what was left out."""
    from benchmarks.lab.predict import MEAN_BAR, NEAR, RIGHT_BAR, WORST_BAR
    from paceline.report.tables import wide_console

    console = wide_console()
    right = sum(choice.right for choice in summary.choices)
    lines = [
        f"{summary.configurations} configurations: mean error {summary.mean:.1%} (bar"
        f" {MEAN_BAR:.0%}), worst {summary.worst:.1%} (bar {WORST_BAR:.0%})",
        f"the option predicted fastest was the fastest, or within {NEAR:.0%} of it, in {right} of"
        f" {len(summary.choices)} cases ({summary.right:.0%}, bar {RIGHT_BAR:.0%})",
    ]
    lines += [
        f"not so: {' '.join(choice.case)}: predicted {choice.predicted}, fastest"
        f" {choice.measured} ({choice.behind:.0%} faster)"
        for choice in summary.choices
        if not choice.right
    ]
    lines += [f"not timed: {text}" for text in skipped]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """One line each: what was predicted of more hosts, and what came."""
    from paceline.report.tables import wide_console

    for verdict in verdicts:
        model, hosts, rate = verdict.case
        word = "help" if verdict.predicted > 1 else "hurt"
        came = "right" if verdict.right else "wrong"
        wide_console().print(
            f"{model}, {hosts} hosts at {rate}: predicted that they {word}"
            f" ({verdict.predicted:.2f}x one alone, {verdict.option}), measured"
            f" {verdict.measured:.2f}x: {came}",
            highlight=False,
            soft_wrap=True,
        )
