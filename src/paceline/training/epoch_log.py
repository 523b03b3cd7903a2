"""Where the line of every epoch goes: the view, metrics.jsonl and TensorBoard's files."""

from __future__ import annotations

from typing import Any

from paceline.observe.metrics import MetricsFile
from paceline.observe.tensorboard import TensorBoardFile
from paceline.training.assemble import Task


class EpochLog:
    """The first rank shows and writes; the others only remember."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._writes = task.context.is_first
        self._metrics = MetricsFile(task.run.metrics)
        self._tensorboard: TensorBoardFile | None = None
        if task.config.observe.tensorboard and self._writes:
            self._tensorboard = TensorBoardFile(task.run.path / "tensorboard", say=task.view.say)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of every epoch so far."""
        return self._metrics.lines

    def restore(self, epochs: int) -> None:
        """Keep what a resumed run had written about its first `epochs` epochs."""
        self._metrics.restore(epochs)
        lost = set(range(1, epochs + 1)) - {line["epoch"] for line in self.lines}
        if lost:
            self._task.view.say(
                f"warning: {self._task.run.metrics} has lost its lines on"
                f" {len(lost)} of {epochs} epochs: what they said is missing from the summary"
            )

    def add(self, line: dict[str, Any]) -> None:
        """One more; what a full disk refuses is said and written with the next one."""
        if not self._writes:
            self.lines.append(line)
            return
        task = self._task
        task.view.end_epoch(line, task.config.train.epochs)
        if self._tensorboard is not None:
            self._tensorboard.add_epoch(line)
        try:
            self._metrics.append(line)
        except OSError as error:
            task.view.say(f"warning: {task.run.metrics} cannot be written: {error.strerror}")
