"""What the steps of an experiment left, and what is made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.observe.ledger import make_ledger
from paceline.report.figure import Section
from paceline.report.load import RunData, finite, is_run, load_run
from paceline.schema.events import read_run
from paceline.schema.plain import read_json_file
from studies.spec import Experiment, StudyStep

NOT_RUN = "not run"

Verdict = Literal["holds", "does not hold", "cannot be tested here"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one step left."""

    step: StudyStep
    path: Path
    """Its folder."""
    run: RunData | None = None
    """Of a training: everything its run directory has, ledger included."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """run.json of a training, result.json of a peer, what a command printed."""
    seconds: float = 0.0
    """From the start of its command to the end."""
    counters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each lab host, from the kernel: bytes_sent, packets_received, cpu_seconds and so on."""
    failed: str = NOT_RUN
    """One sentence; "" when it ended as expected, "not run" when it has not been run."""
    when: str = ""
    """When it ended: "2026-11-16 04:31"."""
    machine: str = ""
    """What it ran on, in words."""

    @property
    def done(self) -> bool:
        return not self.failed

    @property
    def absent(self) -> bool:
        """A peer that is not installed here: nothing that went wrong."""
        return self.step.kind == "peer" and self.failed.startswith("not installed")

    def number(self, key: str) -> float | None:
        """A finite number of the result, or of the run; None when it is not there."""
        if (value := finite(self.result.get(key))) is not None:
            return value
        return self.run.number(key) if self.run is not None else None


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What all steps left."""

    experiment: Experiment
    all: tuple[StepOutcome, ...]

    @property
    def published(self) -> Mapping[str, Any]:
        """The study's own numbers."""
        return self.experiment.published

    def where(self, **facts: Any) -> tuple[StepOutcome, ...]:
        """Those whose steps have all these facts, in the order of the steps."""
        return tuple(
            each
            for each in self.all
            if all(each.step.facts.get(key) == value for key, value in facts.items())
        )

    def one(self, **facts: Any) -> StepOutcome | None:
        """The only one with these facts; None when there is none."""
        found = self.where(**facts)
        assert len(found) < 2, f"{len(found)} steps have the facts {facts}"
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something the study says, and whether it is so here."""

    claim: str
    """The study's sentence."""
    verdict: Verdict
    because: str
    """With figures."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `findings(outcomes)` of an experiment gives: everything that its page shows."""

    sections: tuple[Section, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know to read the figures: one sentence each."""


def load_outcomes(experiment: Experiment, out: Path) -> Outcomes:
    """What is there of an experiment, be it all of it or nothing."""
    return Outcomes(
        experiment=experiment,
        all=tuple(load_outcome(step, out / "steps" / step.name) for step in experiment.steps),
    )


def load_outcome(step: StudyStep, path: Path) -> StepOutcome:
    """What one step left; a step that was changed since counts as not run."""
    record = read_object(path / "step.json")
    if record.get("fingerprint") != step.fingerprint:
        return StepOutcome(step=step, path=path)
    run = _run(path / "run") if step.kind == "train" else None
    result = run.summary if run is not None else read_object(path / "result.json")
    return StepOutcome(
        step=step,
        path=path,
        run=run,
        result=result,
        seconds=finite(record.get("seconds")) or 0.0,
        counters=record.get("hosts") or {},
        failed=str(record.get("failed", "")),
        when=str(record.get("when", "")),
        machine=str(record.get("machine", "")),
    )


def _run(path: Path) -> RunData | None:
    if not path.is_dir() or not is_run(path):
        return None
    run, past = load_run(path), read_run(path)
    return dataclasses.replace(run, ledger=make_ledger(past)) if past else run


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none, or only half of one."""
    try:
        found = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
