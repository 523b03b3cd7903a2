"""The study's numbers and ours, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.report.load import finite
from studies.outcome import Outcomes, StepOutcome

IMAGES, BATCH, EPOCHS = 60_000, 128, 5
RECIPES = {
    "study": "study's recipe here",
    "paceline": "Paceline",
    "stock": "stock PyTorch",
}
SAME = 1e-4
"""Losses that differ by less, relatively, come from the same mathematics in another order."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One line of the study's table."""

    nodes: int
    processes: int
    """On each node."""
    published: Mapping[str, float]
    outcomes: Outcomes

    @property
    def name(self) -> str:
        return f"{self.nodes} x {self.processes}"

    @property
    def all(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.processes

    @property
    def cores(self) -> float | None:
        """Quotas of its hosts together; nothing where --quick leaves the row out."""
        found = self.outcomes.where(what="time", nodes=self.nodes, processes=self.processes)
        return found[0].step.cores if found else None

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(IMAGES / (BATCH * self.all))

    def timed(self, recipe: str) -> StepOutcome | None:
        """The step that measured this row's time, where it is done."""
        found = self.outcomes.one(
            what="time", recipe=recipe, nodes=self.nodes, processes=self.processes
        )
        return found if found is not None and found.done else None

    def last_epoch(self, recipe: str) -> Mapping[str, Any]:
        """What was measured in the second of the two short epochs."""
        return epoch(self.timed(recipe), -1)

    def read(self, recipe: str) -> float | None:
        outcome = self.timed(recipe)
        return outcome.number("read_seconds") if outcome is not None else None

    def update(self, recipe: str) -> float | None:
        """Seconds per update."""
        return finite(self.last_epoch(recipe).get("update_seconds_mean"))

    def epoch(self, recipe: str) -> float | None:
        """Seconds of a whole epoch at the measured seconds per update."""
        update = self.update(recipe)
        return None if update is None else update * self.updates_per_epoch

    def total(self, recipe: str) -> float | None:
        read, seconds = self.read(recipe), self.epoch(recipe)
        return None if read is None or seconds is None else read + EPOCHS * seconds

    def trained(self, recipe: str) -> StepOutcome | None:
        """The whole training with as many processes, where it is done."""
        found = self.outcomes.one(what="accuracy", recipe=recipe, all=self.all)
        return found if found is not None and found.done else None

    def score(self, recipe: str, key: str) -> float | None:
        outcome = self.trained(recipe)
        return outcome.number(key) if outcome is not None else None

    def first_loss(self, recipe: str) -> float | None:
        """Mean loss over the first short epoch: it shows whether rows do the same."""
        return finite(epoch(self.timed(recipe), 0).get("train_loss"))

    def sent(self, recipe: str) -> float | None:
        """MB that the busiest host sent per update, from the kernel; start-up included."""
        outcome = self.timed(recipe)
        if outcome is None or self.nodes == 1:
            return None
        sent = [finite(host.get("bytes_sent")) or 0.0 for host in outcome.counters.values()]
        count = sum(updates(outcome))
        return max(sent) / count / 1e6 if sent and count else None


def rows(outcomes: Outcomes) -> tuple[StudyRow, ...]:
    """All rows, by the number of processes, then of nodes."""
    columns = outcomes.published["columns"]
    found = []
    for line in outcomes.published["rows"]:
        published = dict(zip(columns, line, strict=True))
        found.append(
            StudyRow(
                nodes=published["nodes"],
                processes=published["processes"],
                published=published,
                outcomes=outcomes,
            )
        )
    return tuple(sorted(found, key=lambda row: (row.all, row.nodes)))


def epoch(outcome: StepOutcome | None, number: int) -> Mapping[str, Any]:
    """What an outcome says of one of its epochs, be it a run or a peer."""
    if outcome is None:
        return {}
    lines = outcome.run.metrics if outcome.run is not None else outcome.result.get("epochs", ())
    return lines[number] if lines else {}


def updates(outcome: StepOutcome) -> list[int]:
    """Updates of each epoch."""
    if outcome.run is not None:
        asked = outcome.number("updates") or 0
        return [int(asked)]
    return [int(line["updates"]) for line in outcome.result.get("epochs", ())]
