"""How many ranks of a script a machine gets, and which cores and threads each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.environment import visible_devices
from paceline.errors import ConfigError, shown
from paceline.local.cores import divide_cores, physical_cores, usable_cores, visible_cores

CORES_TOGETHER = 4
"""Cores of a rank from which on another rank is worth more than another thread of it: what
torch's own launcher for processors gives an instance (torch.backends.xeon.run_cpu)."""
RANK_MB = 1000
"""Memory without which no further rank is started: torch alone takes a third of it."""
_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a machine has for ranks."""

    cores: int
    """Physical ones that this process may use."""
    devices: int = 0
    """CUDA devices."""
    memory_mb: int = 2**40


def this_machine() -> Resources:
    """What there is here."""
    import psutil

    return Resources(
        cores=min(len(physical_cores(visible_cores())), usable_cores()),
        devices=cuda_devices(),
        memory_mb=round(psutil.virtual_memory().total / 1e6),
    )


def cuda_devices(driver: Path = _DRIVER, environment: Mapping[str, str] | None = None) -> int:
    """CUDA devices that a rank would see, without importing torch, which takes more than a second.

    As CUDA does: CUDA_VISIBLE_DEVICES counts up to the first name that is none.
    """
    named = visible_devices() if environment is None else visible_devices(environment)
    there = len(list(driver.iterdir())) if driver.is_dir() else 0
    if named is None or there == 0:
        return there
    found = 0
    for name in named:
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= there):
            break
        found += 1
    return found


def auto_ranks(machine: Resources) -> int:
    """The rule of `--nproc auto`: a rank per CUDA device; else by physical cores.

    Up to four cores: a rank each. Beyond: four ranks, and one per four cores once that is more;
    never more than memory has room for.

    >>> [auto_ranks(Resources(cores=c)) for c in (1, 2, 4, 6, 8, 16, 32, 64)]
    [1, 2, 4, 4, 4, 4, 8, 16]
    >>> auto_ranks(Resources(cores=64, devices=2)), auto_ranks(Resources(cores=4, memory_mb=2500))
    (2, 2)
    """
    if machine.devices:
        return machine.devices
    ranks = machine.cores
    if ranks > CORES_TOGETHER:
        ranks = max(CORES_TOGETHER, machine.cores // CORES_TOGETHER)
    return max(1, min(ranks, machine.memory_mb // RANK_MB))


def asked_ranks(text: str) -> int | None:
    """What `--nproc TEXT` says; None: auto."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ConfigError(f"--nproc {shown(text)} must be `auto` or a number of ranks from 1")
    return int(text)


def rank_cores(ranks: int, rank: int) -> tuple[tuple[int, ...], int]:
    """The cores that a rank of this machine is pinned to, and how many threads make sense there.

    Hardware threads of one physical core stay together, and count once.
    """
    groups = physical_cores(visible_cores())
    mine = divide_cores(tuple(range(len(groups))), ranks, rank)
    allowed = max(1, usable_cores() // ranks)
    return tuple(core for group in mine for core in groups[group]), min(len(mine), allowed)
