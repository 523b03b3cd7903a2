"""Everything that the ranks of a script have started, found by their sessions.

A rank is the leader of a session, and what it starts belongs to that session. `python family.py`
is the guard of one supervisor: it reads the ranks' numbers from its standard input, and when that
closes without a farewell (the supervisor was killed), it ends what is left of them. The standard
library alone: it starts in a few hundredths of a second and needs a few megabytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

FAREWELL = b"farewell\n"
"""The supervisor ends in order, and has seen to its ranks itself."""
_ROUNDS = 50
"""Looks for what is left: a process that is being started escapes one look, not many."""


def members(sessions: Collection[int]) -> dict[int, list[int]]:
    """The processes of each session."""
    found: dict[int, list[int]] = {session: [] for session in sessions}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone, twenty times faster
        if name.isdecimal():
            with contextlib.suppress(OSError):
                session = os.getsid(int(name))
                if session in found and not _has_ended(int(name)):
                    found[session].append(int(name))
    return found


def sweep(sessions: Collection[int]) -> None:
    """Kill whatever is left of the sessions."""
    for _ in range(_ROUNDS):
        left = [pid for pids in members(sessions).values() for pid in pids]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)


def cpu_seconds(sessions: Collection[int]) -> dict[int, float]:
    """CPU time of each session's processes so far, with that of children that have ended."""
    tick = os.sysconf("SC_CLK_TCK")
    return {
        session: sum(sum(map(int, words[11:15])) / tick for words in map(_stat, pids) if words)
        for session, pids in members(sessions).items()
    }


def state_of(pid: int) -> str:
    """What the kernel says of a process, in its one letter: R, S, D, T, Z; empty: it has gone."""
    words = _stat(pid)
    return words[0] if words else ""


def _has_ended(pid: int) -> bool:
    return state_of(pid) in ("Z", "X", "")


def _stat(pid: int) -> list[str]:
    """What follows a process's name in its stat: the state first."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []


class Guard:
    """The supervisor's side: a process that outlives it by the time it takes to clear up."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, session: int) -> None:
        """Another rank to clear up after."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed the guard alone
            self._process.stdin.write(b"%d\n" % session)
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Everything is in order."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as told:
            told.write(FAREWELL)
        self._process.wait()


def main() -> int:
    """Wait for the farewell, or for the supervisor's death."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions = []
    for line in sys.stdin.buffer:
        if line == FAREWELL:
            return 0
        sessions.append(int(line))
    sweep(sessions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
