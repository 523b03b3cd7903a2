"""Ctrl-C, SIGTERM and SIGHUP of launchers, agents, trainings and commands that hold something."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from paceline.text import leave_terminal


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have them handled like this for a while; not at all outside the main thread.

    SIGHUP only where it is not ignored, as it is under nohup.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        handler(number, frame)

    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []))
    try:
        before = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:  # not in the main thread: Python allows no handlers
        yield
        return
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@dataclass
class Received:
    """Ctrl-C, SIGTERM and SIGHUP while hosts are at work."""

    numbers: list[int] = field(default_factory=list)
    passed_on: int = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of all."""
        self.numbers.append(number)

    def fresh(self) -> int | None:
        """The first signal since the last call, if there was one."""
        new = self.numbers[self.passed_on :]
        self.passed_on = len(self.numbers)
        return new[0] if new else None


class StopSignals:
    """Of a training: finish the update, save, leave with 130, 143 or 129.

    Remembers the first signal and calls `on_stop`; a second one interrupts at once.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self.received: int | None = None
        self._on_stop = on_stop

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that ended by this signal."""
        return 128 + (self.received or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        self._on_stop()

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """While inside, signals stop the training in an orderly way."""
        return handled(self._handle)


def leave_tidily() -> None:
    """From now on SIGTERM and SIGHUP unwind what is open, as Ctrl-C does, before they end us."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def leave(number: int, frame: FrameType | None) -> None:
    """A handler that unwinds what is open."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
