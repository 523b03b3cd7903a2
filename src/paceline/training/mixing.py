"""Trainings with `hogwild`: every node at its own pace, the first one evaluates and writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import DeadlineError
from paceline.exchange.losses import Losses
from paceline.schema import write_json
from paceline.training.team import Team

if TYPE_CHECKING:
    from torch import nn

    from paceline.exchange.gossip.peers import Neighbours
    from paceline.training.assemble import Task

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Between two looks for nodes that the launcher has lost."""


def wait_for_others(look: Callable[[], tuple[int, int]], deadline: float, what: str) -> float:
    """Seconds until no other trains; `look`: how many do, and what grows while they do."""
    started = moved = time.perf_counter()
    before = -1
    while True:
        training, progress = look()
        now = time.perf_counter()
        if not training:
            return now - started
        if progress != before:
            before, moved = progress, now
        if now - moved > 2 * deadline:
            raise DeadlineError(
                f"the first {what} waited {now - moved:.0f} s for {training} others that make no"
                " progress: one hangs, or raise train.deadline"
            )
        time.sleep(POLL_SECONDS)


class MixedTeam(Team):
    """Nodes that wait for nobody; the first knows what the others have told it."""

    is_steady = adds_up = False

    def __init__(self, task: Task, neighbours: Neighbours) -> None:
        super().__init__(task.context, task.board, neighbours)
        self.neighbours, self.run = neighbours, task.run
        self._losses = Losses(task.run.path, task.context.node)
        self._looked = 0.0
        self._news = 0

    def sum(self, values: Sequence[float], name: str) -> list[float]:
        if name != "epoch" or not self.is_first:
            return list(values)
        told = self.neighbours.roll.take_told()
        return [a + b for a, b in zip(values, told, strict=True)]

    def share_buffers(self, model: nn.Module) -> None:
        """Running statistics stay each node's own."""

    def request_stop(self) -> None:
        self._requested = True
        self.neighbours.wishes_stop = True

    def should_stop(self, updates_done: int) -> bool:
        return self._requested or self.neighbours.stops

    @property
    def evaluates(self) -> bool:
        return self.is_first

    def evaluation_shares(self, shares: list[float]) -> list[float]:
        return [float(rank == self.context.rank) for rank in range(len(shares))]

    def note(self, loss_sum: float, correct: float, samples: int) -> None:
        if not self.is_first:
            self.neighbours.note(loss_sum, correct, float(samples))

    def _look_for_losses(self) -> None:
        """What the launcher knows before a connection's deadline."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            for node in self._losses.fresh():
                self.neighbours.lose(node)

    def news(self) -> list[str]:
        if not self.is_first:
            return []
        self._look_for_losses()
        lines = self.neighbours.roll.news
        fresh, self._news = lines[self._news :], len(lines)
        return fresh

    def wait_for_all(self) -> float:
        if not self.is_first:
            return 0.0
        roll = self.neighbours.roll

        def look() -> tuple[int, int]:
            self._look_for_losses()
            return roll.training, roll.progress

        return wait_for_others(look, self.neighbours.deadline, "node")

    def epoch_line(self) -> dict[str, Any]:
        """Staleness of the mixes of all nodes, on the first."""
        if not self.is_first:
            return {}
        roll = self.neighbours.roll
        staleness = roll.staleness(self.neighbours.staleness)
        found = {
            "mean": staleness.mean,
            "largest": staleness.largest,
            "mixes": staleness.updates,
            "histogram": staleness.encoded(),
            "updates": roll.clocks,
            "nodes": list(roll.news),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.path / "staleness.json", found)
        return {
            "staleness_mean": staleness.mean,
            "staleness_largest": staleness.largest,
            "mixes": staleness.updates,
        }

    def close(self) -> None:
        self.neighbours.leave()
        self.wait_for_all()
