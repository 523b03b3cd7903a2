"""What a person sees while a model trains: a live bar, or plain lines when piped."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from paceline.text import clock, rate, terminal

LINE_SECONDS = 10.0
"""Plain output says something at least this often in a long epoch."""


class View(Protocol):
    """Where the loop reports to."""

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None: ...
    def advance(self, *, images: int, loss: float | None, slowest: str = "") -> None: ...
    def end_epoch(self, line: dict[str, Any], epochs: int) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class SilentView:
    """For ranks that do not talk, and for `--json`."""

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        pass

    def advance(self, *, images: int, loss: float | None, slowest: str = "") -> None:
        pass

    def end_epoch(self, line: dict[str, Any], epochs: int) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Speed:
    """Images per second, a smoothed loss and the time left, since the epoch began."""

    def __init__(self, updates_left: int = 0, unit: str = "images") -> None:
        self.unit = unit
        self.start = time.monotonic()
        self.images = 0
        self.updates = 0
        self.updates_left = updates_left
        """Of the whole training."""
        self.slowest = ""
        """The host that the others wait for, where there are several."""
        self.loss: float | None = None

    def add(self, images: int, loss: float | None, slowest: str = "") -> None:
        self.slowest = slowest
        self.images += images
        self.updates += 1
        if loss is not None:
            self.loss = loss if self.loss is None else 0.9 * self.loss + 0.1 * loss

    @property
    def text(self) -> str:
        seconds = max(1e-9, time.monotonic() - self.start)
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        seconds_left = (self.updates_left - self.updates) * seconds / max(1, self.updates)
        left = clock(max(0.0, seconds_left))
        slow = f"  slowest {self.slowest}" if self.slowest else ""
        return f"{rate(self.images / seconds)} {self.unit}/s{loss}  {left} left{slow}"


class PlainView:
    """One line per epoch, and one every few seconds in long epochs."""

    def __init__(self, unit: str = "images") -> None:
        self._unit = unit
        self._speed = _Speed()
        self._steps = self._done = self._epoch = self._epochs = 0
        self._said = time.monotonic()

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._speed = _Speed((epochs - epoch + 1) * steps - done, self._unit)
        self._epoch, self._epochs, self._steps, self._done = epoch, epochs, steps, done
        self._said = time.monotonic()

    def advance(self, *, images: int, loss: float | None, slowest: str = "") -> None:
        self._speed.add(images, loss, slowest)
        self._done += 1
        if time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            done = f"{self._done}/{self._steps}"
            self.say(f"epoch {self._epoch}/{self._epochs}  {done}  {self._speed.text}")

    def end_epoch(self, line: dict[str, Any], epochs: int) -> None:
        self.say(epoch_text(line, epochs))

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A bar that shows the epoch, images per second, loss and time left."""

    def __init__(self, console: Console, unit: str = "images") -> None:
        self._console, self._unit = console, unit
        self._speed = _Speed()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task("starting", total=None, speed="")
        self._progress.start()
        self._shown = 0.0

    def start_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._speed = _Speed((epochs - epoch + 1) * steps - done, self._unit)
        self._progress.reset(
            self._task, description=f"epoch {epoch}/{epochs}", total=steps, completed=done, speed=""
        )

    def advance(self, *, images: int, loss: float | None, slowest: str = "") -> None:
        self._speed.add(images, loss, slowest)
        now = time.monotonic()
        if now - self._shown > 0.2:
            self._shown = now
            self._progress.update(self._task, speed=self._speed.text)
        self._progress.advance(self._task)

    def end_epoch(self, line: dict[str, Any], epochs: int) -> None:
        self.say(epoch_text(line, epochs))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def make_view(*, silent: bool = False, unit: str = "images") -> View:
    """The view that fits where the output goes; `unit`: what rates count."""
    if silent:
        return SilentView()
    console = terminal()
    return LiveView(console, unit) if console.is_terminal else PlainView(unit)


def epoch_text(line: dict[str, Any], epochs: int) -> str:
    """One line about one epoch."""
    parts = [f"epoch {line['epoch']}/{epochs}"]
    if line.get("train_loss") is not None:
        parts.append(f"train loss {line['train_loss']:.4f}")
    # What does not exist is not shown: accuracy without classes, a test without evaluation.
    if line.get("train_accuracy") is not None:
        parts.append(f"train accuracy {line['train_accuracy']:.2%}")
    if line.get("test_loss") is not None:
        parts.append(f"test loss {line['test_loss']:.4f}")
    if line.get("test_accuracy") is not None:
        parts.append(f"test accuracy {line['test_accuracy']:.2%}")
    known = ("test_loss", "test_accuracy", "test_top5")
    for key, value in line.items():
        if key.startswith("test_") and key not in known and value is not None:
            parts.append(f"{key.replace('_', ' ', 1)} {value:.4g}")
    if "unit" in line:
        parts.append(f"{rate(line['units_per_second'])} {line['unit']}/s")
    else:
        parts.append(f"{rate(line['images_per_second'])} images/s")
    parts.append(f"{line['seconds']:.1f} s")
    return "  ".join(parts)


def summary_table(summary: dict[str, Any]) -> Table:
    """The small table at the end of a run."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("time to read the data", f"{summary['read_seconds']:.2f} s"),
        ("time per update (median)", f"{summary['update_seconds_median'] * 1000:.1f} ms"),
        ("time per epoch (median)", f"{summary['epoch_seconds_median']:.2f} s"),
    ]
    if summary.get("test_loss") is not None:
        rows.append(("test loss", f"{summary['test_loss']:.4f}"))
    if summary.get("test_accuracy") is not None:
        rows.append(("test accuracy", f"{summary['test_accuracy']:.2%}"))
    if summary.get("best_value") is not None:
        name, _, way = str(summary["monitor"]).partition(":")
        rows.append((f"best test {name} ({way})", f"{summary['best_value']:.4g}"))
    if (finding := summary.get("finding_seconds") or 0.0) >= 0.05:
        saved = summary.get("saved_seconds") or 0.0
        gain = f" (saved at least {saved:.1f} s)" if saved >= 0.05 else ""
        rows.append(("finding the fastest way", f"{finding:.1f} s{gain}"))
    rows.append(("total time", f"{summary['total_seconds']:.1f} s"))
    for name, value in rows:
        table.add_row(name, value)
    return table
