"""Memory that an update gives back and the next one takes again, kept in the process.

By default glibc returns large blocks to the system as soon as they are freed and
takes zeroed pages at the next update: on the models here that is thousands of page
faults per update and 5 to 20% of its time. The numbers do not change.

Threads beside the first have arenas of their own, which cannot hold large blocks: all threads
use the first one's, or `replicas` would take most of its memory anew in every update.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil

MEMORY_PART = 0.9
"""Part of the free memory that a plan may be expected to take."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST = 2**31 - 1
_LARGE_BLOCK = 2**20
"""Bytes: weights are larger, the body of a request mostly smaller."""
_KEPT = 16 * 2**20
"""Bytes that stay with the process although they are free: the next requests need them again, and
to take them anew costs a page fault for every 4 KB."""


def keep_freed_memory() -> bool:
    """Tell the allocator to keep what is freed; False where it cannot be told.

    To be called before the process starts a thread: an arena that exists stays in use.
    """
    return _tell_allocator(
        (_M_MMAP_THRESHOLD, _LARGEST),
        (_M_TRIM_THRESHOLD, _LARGEST),
        (_M_TOP_PAD, 64 * 2**20),
        (_M_ARENA_MAX, 1),
    )


def return_large_blocks() -> bool:
    """Tell the allocator to return large blocks as soon as they are freed, also in the long run.

    By default glibc takes the first large block that is freed for the size of those it keeps from
    then on: a process that loads and drops models by the hour then grows by parts of each.
    """
    return _tell_allocator((_M_MMAP_THRESHOLD, _LARGE_BLOCK), (_M_TRIM_THRESHOLD, _KEPT))


def _tell_allocator(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    return all(mallopt(name, value) == 1 for name, value in settings)


def give_back_memory() -> None:
    """Return what is kept and free to the system."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def reset_peak_memory() -> None:
    """Let the kernel forget the largest resident size so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then includes what was before: an upper bound


def resident_mb() -> tuple[float, float]:
    """Peak of private memory (approximately) and shared memory now, in MB."""
    values = {}
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in ("VmHWM", "RssShmem"):
                values[key] = int(rest.split()[0]) / 1000
    except OSError:
        return 0.0, 0.0
    shared = values.get("RssShmem", 0.0)
    return values.get("VmHWM", 0.0) - shared, shared


def shortage(needed_mb: float) -> str:
    """Why so many more MB cannot be had; empty where they can."""
    free = MEMORY_PART * available_mb()
    return "" if needed_mb <= free else f"needs about {needed_mb:,.0f} MB more, of {free:,.0f} free"


def memory_is_short() -> bool:
    """Whether so little is free that nothing should be held that is not in use."""
    total = float(psutil.virtual_memory().total) / 1e6
    return available_mb() < (1 - MEMORY_PART) * total


def available_mb() -> float:
    """Memory that new processes can take: the machine's, or what its cgroup leaves."""
    free = float(psutil.virtual_memory().available) / 1e6
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text != "max":
                free = min(free, (int(text) - int(Path(used).read_text())) / 1e6)
        except (OSError, ValueError):
            continue
    return max(0.0, free)
