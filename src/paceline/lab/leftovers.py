"""Finds and removes what labs left that died together with their supervisor.

Only what belongs to the user who cleans: the directories lie where anyone can make some, and
their notes say what is killed. Root, too, leaves alone what others own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import tempfile
import time
from pathlib import Path

from paceline.lab import supervisor
from paceline.lab.construction import PREFIX

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-\d+")
# A lab makes its directory a moment before it locks it.
YOUNG_SECONDS = 10.0


def clean() -> list[str]:
    """Remove the leftovers of dead labs; returns one line for each thing removed."""
    removed: list[str] = []
    living: set[str] = set()
    for state in find_states():
        match = _NAME.match(state.name)
        if match is None:
            continue
        if _is_alive(state):
            living.add(match.group())
            continue
        removed += [f"process {pid} of {state.name}" for pid in _kill_processes(state)]
        left = supervisor.clear(str(state))
        removed += [] if left else [f"directory {state}"]
    for group in find_groups():
        name = _NAME.match(group.name)
        if name is None or name.group() in living or Path(f"/proc/{name.group(1)}").exists():
            continue
        children = [str(child) for child in group.iterdir() if child.is_dir()]
        if not supervisor.remove_groups([str(group), *children]):
            removed.append(f"control group {group}")
    return removed


def _is_alive(state: Path) -> bool:
    try:
        if time.time() - state.stat().st_mtime < YOUNG_SECONDS and _owner_runs(state):
            return True
        lock = os.open(state / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _owner_runs(state)
    except OSError:
        return True  # a link, or not to be opened: not ours to judge
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _owner_runs(state: Path) -> bool:
    match = _NAME.match(state.name)
    return match is not None and Path(f"/proc/{match.group(1)}").exists()


def _kill_processes(state: Path) -> list[int]:
    """Kill processes whose environment says that they belong to a dead lab."""
    mark = f"PACELINE_LAB={state}".encode()
    killed: list[int] = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                ours = path.stat().st_uid == os.geteuid()
                if ours and mark in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)
                    killed.append(int(path.name))
    return killed


def find_states() -> list[Path]:
    """Directories of this user's labs, dead or alive."""
    folders = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return [folder for folder in folders if supervisor.is_ours(str(folder))]


def find_groups() -> list[Path]:
    """Control groups of this user's labs, wherever they lie."""
    found: list[Path] = []
    for folder, names, _ in os.walk(supervisor.GROUPS):
        for name in list(names):
            if name.startswith(PREFIX):
                found.append(Path(folder) / name)
                names.remove(name)
    return [group for group in found if supervisor.is_ours(str(group))]
