"""A process that an agent has started, and what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from typing import IO

STACK_SIGNAL = signal.SIGUSR1
"""At which a rank prints where all of its threads stand."""
_RANK = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)
"""How the local engine marks what ranks other than the first print."""


class Child:
    """Runs in a session of its own, so that it can be ended with everything it has started."""

    def __init__(
        self, process: subprocess.Popen[bytes], purpose: str, *, collect: bool = False
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self.purpose = process, purpose
        self.streams: list[IO[bytes]] = [process.stdout, process.stderr]
        self._collected: bytearray | None = bytearray() if collect else None
        self._rest = {id(stream): b"" for stream in self.streams}
        self._last = ""
        for stream in self.streams:
            os.set_blocking(stream.fileno(), False)

    def read(self, stream: IO[bytes]) -> tuple[list[tuple[int | None, str]], bool]:
        """Lines with the rank that printed them (None: the first), and whether more may come."""
        try:
            data = os.read(stream.fileno(), 1 << 20)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        if self._collected is not None and stream is self.streams[0]:
            self._collected += data
            return [], bool(data)
        whole = self._rest[id(stream)] + data
        *lines, rest = whole.split(b"\n")
        if not data and rest:  # the last words had no end of line
            lines, rest = [*lines, rest], b""
        self._rest[id(stream)] = rest
        found: list[tuple[int | None, str]] = []
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            match = _RANK.fullmatch(text)
            found.append((int(match[1]), match[2]) if match else (None, text))
            self._last = text or self._last
        return found, bool(data)

    def output(self) -> str:
        """All that was printed, where it is collected."""
        return bytes(self._collected or b"").decode(errors="replace")

    def last_words(self) -> str:
        """The last line that was not collected: what went wrong."""
        return self._last

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """End it and everything it has started in its session."""
        # What it has started in sessions of their own dies with it: see `die_with_parent`.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        for stream in self.streams:
            stream.close()


class UpdateTimer:
    """How long the updates of a training take, seen from outside: by looking at their number."""

    def __init__(self) -> None:
        self.update_seconds = 0.0
        """What the newest ones took; 0 until two were seen to begin."""
        self._update, self._since = 0, 0.0

    def look(self, update: int, now: float | None = None) -> None:
        """Note the update that the training is in.

        >>> timer = UpdateTimer()
        >>> for update, now in ((1, 0.0), (2, 3.0), (2, 4.0), (4, 7.0)):
        ...     timer.look(update, now)
        >>> timer.update_seconds
        2.0
        """
        now = time.monotonic() if now is None else now
        if update > self._update:
            if self._update:
                self.update_seconds = (now - self._since) / (update - self._update)
            self._update, self._since = update, now
