"""How commands end that hold something which must be given back."""

from __future__ import annotations

import signal
from types import FrameType


def leave_tidily() -> None:
    """From now on SIGTERM and SIGHUP unwind what is open, as Ctrl-C does, before they end us."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
