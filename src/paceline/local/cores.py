"""Cores: how many this process may really use, and which rank gets which."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def visible_cores() -> tuple[int, ...]:
    """The cores that the scheduler lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(cores: tuple[int, ...], root: Path = _TOPOLOGY) -> tuple[tuple[int, ...], ...]:
    """The cores by physical core: hardware threads together, one socket after the other."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for core in cores:
        place = root / f"cpu{core}" / "topology"
        try:
            package = int((place / "physical_package_id").read_text())
            siblings = _listed((place / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            package, siblings = 0, (core,)
        found.setdefault((package, siblings), []).append(core)
    return tuple(tuple(found[key]) for key in sorted(found))


def _listed(text: str) -> tuple[int, ...]:
    """Numbers as the kernel lists them: "0-1,8"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def quota_cores(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that the cgroup allows, the strictest level counting; None if all."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _walk(root, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in (root / "cpu", root / "cpu,cpuacct"):
                if mount.is_dir():
                    limits += _walk(mount, path, _quota_v1)
                    break
    return min(limits, default=None)


def usable_cores() -> int:
    """How many cores' worth of threads make sense here: affinity and quota together.

    A quota of half a core over two visible cores still counts as two: which of
    the two is used best is what a race finds out.
    """
    quota = quota_cores()
    cores = len(visible_cores())
    return cores if quota is None or quota < 1 else max(1, min(cores, math.ceil(quota)))


def divide_cores(cores: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """The disjoint cores of one rank; ranks beyond the cores share them in turn.

    >>> divide_cores((0, 1, 2, 3), 2, 1)
    (2, 3)
    >>> divide_cores((0, 1), 4, 3)
    (1,)
    """
    if ranks >= len(cores):
        return (cores[rank % len(cores)],)
    start = rank * len(cores) // ranks
    return cores[start : (rank + 1) * len(cores) // ranks]


def pin(cores: tuple[int, ...]) -> None:
    """Keep every thread of this process on these cores (no effect where the system cannot)."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread ended between the listing and the call


def set_threads(count: int) -> None:
    """Intra-op threads of the calling thread, explicitly."""
    import torch

    torch.set_num_threads(count)
    # The first get in a thread overwrites its own number with the newest number set
    # anywhere; asking here makes ours stick.
    torch.get_num_threads()


def _walk(mount: Path, path: str, read: object) -> list[float]:
    assert callable(read)
    folder, limits = mount / path.lstrip("/"), []
    while True:
        limit = read(folder)
        if limit is not None:
            limits.append(limit)
        if folder == mount or mount not in folder.parents:
            return limits
        folder = folder.parent


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
