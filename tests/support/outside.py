"""When processes began, seen from outside: from /proc, without asking them anything."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TICK = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.05


@dataclass
class Life:
    """One process; `began` in seconds since the machine started."""

    began: float
    rank: int | None = None

    @property
    def began_at(self) -> float:
        """When it began, as `time.time` counts."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + self.began


class Lives:
    """Looks for processes whose command line holds a program's name and a folder's.

    Their rank is that of their environment: the `variable` that launchers set.
    """

    def __init__(self, program: str, folder: Path, variable: str) -> None:
        self._words = (program.encode(), str(folder).encode())
        self._variable = variable.encode()
        self.found: dict[int, Life] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lives", daemon=True)

    @property
    def by_rank(self) -> dict[int, Life]:
        return {life.rank: life for life in self.found.values() if life.rank is not None}

    def __enter__(self) -> Lives:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        known: set[str] = set()
        while not self._over.wait(LOOK_SECONDS):
            for name in (entry.name for entry in Path("/proc").iterdir()):
                if name.isdigit() and name not in known and self._look(int(name)):
                    known.add(name)

    def _look(self, pid: int) -> bool:
        """True when nothing more is to be learned of a process."""
        with contextlib.suppress(OSError, ValueError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            # Between fork and exec a process still has the command line of its parent.
            words = line.split(b"\0")
            if not all(word in words for word in self._words):
                return False
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            life = Life(began=int(fields[19]) / TICK)
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == self._variable:
                    life.rank = int(value)
            self.found[pid] = life
            return True
        return False
