"""Ctrl-C, SIGTERM and SIGHUP: finish the update, save, leave with 130, 143 or 129."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from paceline.text import leave_terminal


class StopSignals:
    """Remembers the first signal and calls `on_stop`; a second one interrupts at once."""

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
        if number == signal.SIGHUP:
            leave_terminal()
        self._on_stop()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """While inside, signals stop the training in an orderly way."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # Python lets only the main thread handle signals
            return
        before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            # Under nohup a training outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
