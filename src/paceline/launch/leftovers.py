"""What MPI leaves behind: shared memory of ranks that were killed, daemons of a host cut off."""

from __future__ import annotations

import contextlib
import os
import signal
from fnmatch import fnmatch
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERNS = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "vader_segment.*", "*_ompi_*")
_DAEMONS = ("prted", "hydra_pmi_proxy")
"""What mpiexec starts on every other host, of Open MPI and of MPICH."""


class SharedFiles:
    """What appears in shared memory while an agent lives, and is MPI's by its name."""

    def __init__(self) -> None:
        self._before = set(_names())

    def remove(self) -> list[str]:
        """Remove what is new, is ours, and is mapped by no one any more."""
        fresh = [name for name in _names() if name not in self._before]
        if not fresh:
            return []
        held = _mapped()
        removed = []
        for name in fresh:
            path = _FOLDER / name
            with contextlib.suppress(OSError):
                if str(path) not in held and path.lstat().st_uid == os.getuid():
                    path.unlink()
                    removed.append(name)
        return removed


def _names() -> list[str]:
    try:
        found = [path.name for path in _FOLDER.iterdir()]
    except OSError:
        return []
    return [name for name in found if any(fnmatch(name, pattern) for pattern in _PATTERNS)]


def _mapped() -> set[str]:
    """Files of shared memory that a living process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                if "/dev/shm/" in line:
                    found.add("/dev/shm/" + line.partition("/dev/shm/")[2].split(" ")[0])
    return found


def end_daemon() -> None:
    """End the daemon of MPI that started us, if one did: a cut link leaves it waiting for ever."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            os.kill(parent, signal.SIGTERM)
