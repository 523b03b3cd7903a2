"""What a test may not leave behind, and how it is found.

    watch = Watch()
    ... the test ...
    watch.leaks()   # a sentence for each thing that was not there before

Things that end a moment later (a process that was just killed, a thread that is
joining) get a short time for it. What is found is also put right, so that one
careless test does not fail the next ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

GRACE_SECONDS = 20.0
"""What just ended may take this long to be gone on a busy machine; nobody waits where it is."""
ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest changes it between the phases of a test",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it for itself when it first builds an optimizer",
}
_SHARED_MEMORY = Path("/dev/shm")
BACKING = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI keeps the memory that its ranks share."""
MPI_SEGMENT = "sm_segment."
"""What Open MPI's files of shared memory begin with."""
SESSION = "pl-"
"""What the tests of one process share begins with this: other processes run tests of their own."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x20000
_MS_PRIVATE = 0x4000 | 0x40000
"""Of this mount and all below it."""
_LISTENING = "0A"


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_shared_memory() -> bool:
    """Have a /dev/shm that no other program sees; False where the kernel does not allow it.

    What others leave in the common one when they are killed looks like a leak of ours.
    """
    if sys.platform != "linux" or os.geteuid():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", bytes(_SHARED_MEMORY), b"tmpfs", 0, b"mode=1777") == 0


class Watch:
    """A picture of what there is, to compare with later."""

    def __init__(self) -> None:
        self._children = set(_children())
        self._threads = set(threading.enumerate())
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._sockets = _socket_inodes()
        self._shared = _shared_files()
        self._temporary = _names(Path(tempfile.gettempdir()))
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def leaks(self, grace: float = GRACE_SECONDS) -> list[str]:
        """One sentence for each thing that is there now and was not before."""
        return [
            *self._left_processes(grace),
            *self._left_threads(grace),
            *self._changed_variables(),
            *self._changed_place(),
            *self._listening_sockets(),
            *self._left_files(grace),
        ]

    def _left_processes(self, grace: float) -> list[str]:
        def alive() -> list[int]:
            return [pid for pid in _children() if pid not in self._children and not _reaped(pid)]

        _wait(lambda: not alive(), grace)
        found = []
        for pid in alive():
            words = _command(pid)
            if "resource_tracker" in words:  # multiprocessing's own, one per interpreter
                continue
            found.append(f"process {pid} is still running: {words}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return found

    def _left_threads(self, grace: float) -> list[str]:
        def left() -> list[threading.Thread]:
            return [
                thread
                for thread in threading.enumerate()
                if thread not in self._threads
                and (not thread.daemon or thread.name.startswith("paceline-"))
            ]

        if left():
            gc.collect()  # a reader that nothing refers to any more ends its thread
            _wait(lambda: not left(), grace)
        return [f"thread {thread.name} is still running" for thread in left()]

    def _changed_variables(self) -> list[str]:
        found = []
        for name in sorted(self._environment.keys() | os.environ.keys()):
            before, now = self._environment.get(name), os.environ.get(name)
            if before == now or name in ALLOWED_VARIABLES:
                continue
            found.append(f"environment variable {name} changed from {before!r} to {now!r}")
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        return found

    def _changed_place(self) -> list[str]:
        found = []
        now = Path.cwd()
        if now != self._folder:
            found.append(f"working directory changed from {self._folder} to {now}")
            os.chdir(self._folder)
        if self._affinity is not None and os.sched_getaffinity(0) != self._affinity:
            found.append(f"cores changed from {self._affinity} to {os.sched_getaffinity(0)}")
            os.sched_setaffinity(0, self._affinity)
        return found

    def _listening_sockets(self) -> list[str]:
        fresh = _socket_inodes() - self._sockets
        if not fresh:
            return []
        return [
            f"socket is still listening on {address}"
            for address, inode in _listeners()
            if inode in fresh
        ]

    def _left_files(self, grace: float) -> list[str]:
        def left() -> list[Path]:
            shared = [Path(name) for name in _shared_files() - self._shared]
            folder = Path(tempfile.gettempdir())
            temporary = [
                folder / name
                for name in _names(folder) - self._temporary
                if name.startswith("paceline-")
            ]
            return [*(path for path in shared if not _held_by_strangers(path)), *temporary]

        if left():
            _wait(lambda: not left(), grace)
        return [f"{path} was left behind" for path in left()]


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _children() -> list[int]:
    """Processes whose parent is this one, by whatever thread they were started."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def _reaped(pid: int) -> bool:
    """True when a child had ended and is now waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    if state == "Z":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return True
    return False


def _command(pid: int) -> str:
    """Its command line, which the kernel shows empty for a moment while a program is starting."""
    words = ""

    def known() -> bool:
        nonlocal words
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        words = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return bool(words)

    with contextlib.suppress(OSError):
        _wait(known, GRACE_SECONDS)
    return words or "?"


def _socket_inodes() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(link)  # noqa: PTH115 - the target is no path
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _listeners() -> list[tuple[str, str]]:
    """(address, inode) of every listening TCP socket of this network namespace."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING:
                    found.append((f"port {int(words[1].rpartition(':')[2], 16)}", words[9]))
    return found


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _shared_files() -> set[str]:
    """Files of shared memory; MPI of ours has a folder of its own, those beside it are others'."""
    own = os.environ.get(BACKING, "")
    others = (SESSION, MPI_SEGMENT) if own else (SESSION,)
    names = {name for name in _names(_SHARED_MEMORY) if not name.startswith(others)}
    found = {str(_SHARED_MEMORY / name) for name in names}
    return found | ({str(Path(own) / name) for name in _names(Path(own))} if own else set())


def _held_by_strangers(path: Path) -> bool:
    """True when a process that is not ours has the file mapped: other programs run here too."""
    family = {os.getpid(), *_children()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in family:
            continue
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False
