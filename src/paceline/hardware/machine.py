"""What this machine is: cores, memory, versions. Quick to ask, no trial runs."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from paceline.config.environment import cache_root, data_root
from paceline.local.cores import quota_cores, usable_cores, visible_cores
from paceline.local.memory import available_mb
from paceline.schema.machines import BUSY


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node, as found."""

    host: str
    processor: str
    cores: int
    """Cores that this process may run on."""
    quota: float | None
    """Cores' worth of time that the cgroup allows; None: no limit."""
    usable: int
    busy: float
    """Part of the cores that other programs use right now."""
    memory_mb: float
    free_mb: float
    accelerators: tuple[str, ...]
    versions: dict[str, str]
    mpi: str | None
    """Where mpiexec is, if there is one."""
    compiler: str | None
    data_root: str | None
    cache_root: str
    cache_free_mb: float


def look_at_machine() -> Machine:
    import torch

    versions = {"python": platform.python_version()}
    for package in ("paceline", "torch", "numpy", "mpi4py"):
        if importlib.util.find_spec(package):
            versions[package] = metadata.version(package)
    root = data_root()
    return Machine(
        host=platform.node(),
        processor=processor_name(),
        cores=len(visible_cores()),
        quota=quota_cores(),
        usable=usable_cores(),
        busy=busy_cores(),
        memory_mb=psutil.virtual_memory().total / 1e6,
        free_mb=available_mb(),
        accelerators=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        versions=versions,
        mpi=_mpiexec(),
        compiler=shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"),
        data_root=str(root) if root else None,
        cache_root=str(cache_root()),
        cache_free_mb=_free_disk_mb(cache_root()),
    )


def problems(machine: Machine) -> list[str]:
    """What is wrong, one sentence each, with what to do about it."""
    found = []
    if machine.busy > BUSY:
        found.append(
            f"other programs use {machine.busy:.0%} of the cores: races and timings are doubtful"
        )
    if machine.quota is not None and machine.quota < machine.cores:
        found.append(
            f"the cgroup allows {machine.quota:g} of {machine.cores} cores: more threads only wait"
        )
    if machine.free_mb < 1500:
        found.append(
            f"only {machine.free_mb:,.0f} MB of memory are free: large models will not fit"
        )
    if machine.cache_free_mb < 1000:
        found.append(
            f"only {machine.cache_free_mb:,.0f} MB are free in {machine.cache_root}: decoded images"
            " will not be kept; set PACELINE_CACHE to a larger disk"
        )
    if machine.data_root and not Path(machine.data_root).is_dir():
        found.append(f"PACELINE_DATA = {machine.data_root} does not exist: correct or unset it")
    if "mpi4py" not in machine.versions:
        found.append('mpi4py is not installed: several machines need pip install "paceline[mpi]"')
    return found


def _mpiexec() -> str | None:
    import sys

    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _free_disk_mb(path: Path) -> float:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 1e6


def busy_cores(seconds: float = 0.4) -> float:
    """Part of the cores we may use that anything used just now, while we sleep.

    Other cores do not matter: several hosts may be emulated on one machine, a core each.
    """
    used: list[float] = psutil.cpu_percent(interval=seconds, percpu=True)
    own = [used[core] for core in visible_cores() if core < len(used)] or used
    return sum(own) / len(own) / 100.0


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or os.uname().machine
