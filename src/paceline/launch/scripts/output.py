"""What one rank prints: all of it into its log, and whole lines for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOG = "output.log"
"""File in a rank's folder."""
LONGEST_LINE = 2**16
"""Bytes after which a line without an end is shown in parts."""
PROGRESS_SECONDS = 10.0
"""A progress bar, which writes one line over and over, is shown once in this time."""


class Lines:
    """The lines of one stream.

    >>> lines = Lines()
    >>> lines.feed(b"epoch 1\\n 10%\\r 20%\\r 30%"), lines.feed(b"\\r100%\\nend")
    (['epoch 1'], ['100%'])
    >>> lines.close()
    ['end']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown = time.monotonic()

    def feed(self, data: bytes) -> list[str]:
        """Lines that have come to their end."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if b"\r" in self._rest:  # a bar: only its newest state can matter
            self._rest = b"\r" + _newest(self._rest)
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return [_newest(line).decode(errors="replace") for line in whole]

    def look(self, now: float) -> list[str]:
        """What a progress bar says, now and then; never a line that is only half written."""
        if not self._rest.startswith(b"\r"):
            self._shown = now
            return []
        if now - self._shown < PROGRESS_SECONDS:
            return []
        self._shown = now
        return [_newest(self._rest).decode(errors="replace")]

    def close(self) -> list[str]:
        """Last words that had no end of line."""
        rest, self._rest = _newest(self._rest), b""
        return [rest.decode(errors="replace")] if rest else []


def _newest(line: bytes) -> bytes:
    """What is left of a line that was written over."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1] if parts else b""


class RankOutput:
    """Both streams of a rank."""

    def __init__(self, folder: Path, hear: Callable[[str, bool], None]) -> None:
        """`hear`: told each line, and whether it came by standard error."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / LOG).open("wb", buffering=0)
        self._hear = hear
        self._lines = {False: Lines(), True: Lines()}
        self.heard = time.monotonic()
        """When it last printed something."""

    def take(self, data: bytes, *, is_error: bool) -> None:
        """Some bytes of one stream."""
        self.heard = time.monotonic()
        self._log.write(data)
        for line in self._lines[is_error].feed(data):
            self._hear(line, is_error)

    def note(self, text: str) -> None:
        """Words of ours, among the rank's own."""
        self._log.write(f"paceline: {text}\n".encode())
        self._hear(f"paceline: {text}", True)

    def look(self) -> None:
        """Show how far progress bars are."""
        for is_error, lines in self._lines.items():
            for line in lines.look(time.monotonic()):
                self._hear(line, is_error)

    def close(self) -> None:
        for is_error, lines in self._lines.items():
            for line in lines.close():
                self._hear(line, is_error)
        self._log.close()
