"""Where the time of a parameter server goes: moving bytes, applying updates, standing by."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from paceline.exchange.network import Traffic


class Listener(Protocol):
    """What is told of it: a recorder of events."""

    def add(self, name: Any, started: float, seconds: float, *, update: int | None = None) -> None:
        """A span: its name, when (perf_counter) and how long."""

    def exchanged(self, update: int | None, traffic: Traffic) -> None:
        """What was moved for an update."""


class Duty:
    """One server's threads tell it what they do; it tells a listener what the server does.

    Bytes move while at least one worker is sent to or received from. While nobody is, the server
    waits, for no one in particular: standing by is what it is for.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._movers = 0
        self._since = time.perf_counter()
        """Until when everything was told."""
        self._moved = 0.0
        self._counted = Traffic()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Around what is sent to or received from one worker."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, movers: int) -> None:
        now = time.perf_counter()
        with self._lock:
            before, self._movers = self._movers, self._movers + movers
            if not (before and self._movers):
                self._end(before, now)
                self._since = now

    def _end(self, movers: int, now: float) -> None:
        """What went on since the last change is over."""
        seconds = now - self._since
        if movers:
            self._moved += seconds
        self._tell("exchange" if movers else "wait", self._since, seconds)

    def applied(self, update: int, started: float, traffic: Sequence[Traffic]) -> None:
        """An update was applied since `started`; `traffic` is all that was ever counted."""
        if self._listener is None:
            return
        whole = Traffic()
        for each in traffic:
            whole.add(each)
        with self._lock:
            if self._since < started:
                self._end(self._movers, started)
                self._since = started
            now = time.perf_counter()
            self._tell("optimizer", self._since, now - self._since, update)
            self._since = now
            whole.seconds = whole.waited = whole.told = 0.0
            new, self._counted = whole.less(self._counted), whole
            new.seconds = new.waited = new.told = self._moved  # a server hides nothing
            self._moved = 0.0
        self._listener.exchanged(update, new)

    def close(self) -> None:
        """The last worker has left."""
        with self._lock:
            self._end(self._movers, time.perf_counter())

    def _tell(self, name: str, started: float, seconds: float, update: int | None = None) -> None:
        if self._listener is not None:
            self._listener.add(name, started, seconds, update=update)
