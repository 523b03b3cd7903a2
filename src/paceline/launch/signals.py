"""Ctrl-C and SIGTERM of a launcher."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have both signals handled like this for a while; not at all outside the main thread."""
    try:
        before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: Python allows no handlers
        yield
        return
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
