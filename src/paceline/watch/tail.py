"""Reads what is added to a file, and only that."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 8 << 20
"""Read in one look; a long past is caught up with in several."""


class Tail:
    """The whole lines that a file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._file = 0, -1
        self.is_behind = False
        """The last look left something for the next one."""

    def lines(self) -> list[str]:
        """New lines; all of them once more where the file was replaced or cut."""
        self.is_behind = False
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file or about.st_size < self._at:
                    self._at, self._file = 0, about.st_ino
                if about.st_size == self._at:
                    return []
                file.seek(self._at)
                data = file.read(MOST_BYTES)
                self.is_behind = len(data) == MOST_BYTES
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == MOST_BYTES:  # damaged: no line is that long
            whole = len(data)
        self._at += whole
        return data[:whole].decode("utf-8", "replace").splitlines()
