"""CPU quota, visible cores and memory limit of a host, by control groups v1 or v2."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.lab.spec import HostSpec
from paceline.schema import units

CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory")
# Short, so that a throttled host stutters for milliseconds instead of the default tenth of a
# second, which would dominate the time of a training step.
PERIOD_MICROSECONDS = 20_000
LEAST_QUOTA_MICROSECONDS = 1_000  # the kernel refuses less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a host used so far; None where the kernel does not say."""

    cpu_seconds: float | None = None
    """CPU time of all its processes."""

    throttled_seconds: float | None = None
    """Time its processes were ready to run but over the quota."""

    throttled_periods: int | None = None
    """Periods in which the quota ran out."""

    memory_peak: int | None = None
    """Most bytes of memory it held at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostGroup:
    """The control groups of one host."""

    folders: dict[str, Path]
    """Controller to directory (all the same one in version 2)."""

    def limit(self, cores: float) -> None:
        """Allow so many cores' worth of time from now on; OSError when the kernel refuses."""
        folder = self.folders["cpu"]
        period = PERIOD_MICROSECONDS
        if cores * period < LEAST_QUOTA_MICROSECONDS:
            period = int(LEAST_QUOTA_MICROSECONDS / cores) + 1
        quota = max(LEAST_QUOTA_MICROSECONDS, round(cores * period))
        if (folder / "cpu.cfs_period_us").exists():  # version 1
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}")

    def usage(self) -> Usage:
        cpu = _pairs(self.folders.get("cpu"), "cpu.stat")
        used = _number(self.folders.get("cpuacct"), "cpuacct.usage")
        throttled = cpu.get("throttled_time")
        peak = _number(self.folders.get("memory"), "memory.max_usage_in_bytes")
        return Usage(
            cpu_seconds=used / 1e9 if used is not None else _scaled(cpu.get("usage_usec"), 1e-6),
            throttled_seconds=_scaled(throttled, 1e-9)
            if throttled is not None
            else _scaled(cpu.get("throttled_usec"), 1e-6),
            throttled_periods=cpu.get("nr_throttled"),
            memory_peak=peak
            if peak is not None
            else _number(self.folders.get("memory"), "memory.peak"),
        )


class GroupTree:
    """All control groups of one lab, under one name, made at once and removed by name.

    In version 1 they lie below this process's own groups, so that limits on us
    hold for the lab too. Version 2 allows no processes beside child groups, so
    there they lie at the root.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.version, self.bases = find_controllers()

    def plan(self, hosts: Iterable[str]) -> list[str]:
        """Every directory that `make` will create, parents first."""
        tops = [base / self.name for base in self._unique_bases()]
        return [str(top) for top in tops] + [str(top / host) for host in hosts for top in tops]

    def entrances(self, host: str) -> list[str]:
        """Files into which a process of the host writes itself to be limited."""
        return [str(base / self.name / host / "cgroup.procs") for base in self._unique_bases()]

    def _unique_bases(self) -> list[Path]:
        return list(dict.fromkeys(self.bases.values()))

    def make(self, host: HostSpec, cores: Sequence[int]) -> HostGroup:
        """Create the groups of one host and set its limits; OSError when the kernel refuses."""
        for base in self._unique_bases():
            self._make_folder(base, self.name)
            self._make_folder(base / self.name, host.name)
        folders = {
            controller: base / self.name / host.name for controller, base in self.bases.items()
        }
        group = HostGroup(folders=folders)
        if "cpu" in folders and host.cores < host.visible_cores:
            group.limit(host.cores)
        if "cpuset" in folders:
            (folders["cpuset"] / "cpuset.cpus").write_text(",".join(map(str, cores)))
        if "memory" in folders and host.memory is not None:
            file = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            (folders["memory"] / file).write_text(str(units.size(host.memory)))
        return group

    def _make_folder(self, parent: Path, name: str) -> None:
        folder = parent / name
        if folder.is_dir():
            return
        if self.version == 2:
            wanted = " ".join(f"+{controller}" for controller in self.bases)
            (parent / "cgroup.subtree_control").write_text(wanted)
        folder.mkdir()
        if self.version == 1 and (folder / "cpuset.cpus").exists():
            # A new group of version 1 allows no core and no memory at all until told.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (folder / file).write_text((parent / file).read_text())


def find_controllers() -> tuple[int, dict[str, Path]]:
    """The version of control groups here, and the directory to build under per controller."""
    own = _own_groups()
    first: dict[str, Path] = {}
    second: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup":
            for controller in set(options.split(",")) & set(CONTROLLERS):
                path = Path(own.get(controller, "/"))
                below = path.relative_to(root) if path.is_relative_to(root) else Path()
                first[controller] = Path(point) / below
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                offered = (Path(point) / "cgroup.controllers").read_text().split()
                second = {name: Path(point) for name in offered if name in CONTROLLERS}
    version, bases = (1, first) if "cpu" in first or not second else (2, second)
    return version, {name: base for name, base in bases.items() if os.access(base, os.W_OK)}


def assign_cores(hosts: Sequence[HostSpec], available: Iterable[int]) -> dict[str, list[int]]:
    """Which cores each host sees: the least loaded ones, in the order of the file.

    >>> assign_cores([HostSpec(name="a"), HostSpec(name="b"), HostSpec(name="c")], [0, 1])
    {'a': [0], 'b': [1], 'c': [0]}
    """
    load = dict.fromkeys(sorted(available), 0.0)
    chosen: dict[str, list[int]] = {}
    for host in hosts:
        cores = sorted(sorted(load, key=lambda core: (load[core], core))[: host.visible_cores])
        for core in cores:
            load[core] += host.cores / len(cores)
        chosen[host.name] = cores
    return chosen


def _own_groups() -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _pairs(folder: Path | None, file: str) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        if folder is not None:
            lines = (folder / file).read_text().splitlines()
            return {key: int(value) for key, value in (line.split() for line in lines)}
    return {}


def _number(folder: Path | None, file: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        if folder is not None:
            return int((folder / file).read_text())
    return None


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
