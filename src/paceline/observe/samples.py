"""What a process and its machine are using, read from /proc; nothing where there is no /proc.

The network is read through /proc/self, which shows the interfaces of the process's own network
namespace: inside a container or an emulated host those of that host, not of the machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.schema.events import InterfaceTraffic, Sample

PROC = Path("/proc")


@dataclass(frozen=True)
class _Times:
    """Counters that only differences are taken of."""

    moment: float
    process: float
    """Seconds of core time that the process has used."""
    total: float
    idle: float
    iowait: float


class ResourceSampler:
    """Call it with the current time; the first call gives means since it was made.

    >>> sampler = ResourceSampler()                                      # doctest: +SKIP
    >>> sampler(time.time()).cpu                                         # doctest: +SKIP
    0.98
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before = self._times()[0]

    def __call__(self, now: float) -> Sample:
        times, resident, threads = self._times()
        before, self._before = self._before, times
        seconds = times.moment - before.moment
        total = times.total - before.total
        # The kernel's idle counters may step back a tick; a part is never below 0 or above 1.
        idle = min(max(times.idle - before.idle, 0.0) / total, 1.0) if total > 0 else 0.0
        iowait = max(times.iowait - before.iowait, 0.0) / total if total > 0 else 0.0
        iowait = min(iowait, 1.0 - idle)
        read, written = read_disk(self._proc / "self" / "io")
        return Sample(
            time=now,
            cpu=(times.process - before.process) / seconds if seconds > 0 else 0.0,
            busy=max(1.0 - idle - iowait, 0.0) if total > 0 else 0.0,
            idle=idle,
            iowait=iowait,
            resident=resident,
            threads=threads,
            network=read_network(self._proc / "self" / "net" / "dev"),
            disk_read=read,
            disk_written=written,
        )

    def _times(self) -> tuple[_Times, int, int]:
        own = _stat_fields(self._proc)
        # user nice system idle iowait irq softirq steal; guests are counted in user already
        machine = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
        cores = [int(number) / self._ticks for number in machine]
        times = _Times(
            moment=time.perf_counter(),
            process=time.process_time(),
            total=sum(cores),
            idle=cores[3],
            iowait=cores[4],
        )
        return times, int(own[21]) * self._page, int(own[17])


def make_sampler() -> ResourceSampler | None:
    """A sampler, or None on a system without /proc."""
    try:
        return ResourceSampler()
    except (OSError, ValueError, IndexError):
        return None


def read_network(path: Path) -> dict[str, InterfaceTraffic]:
    """Totals of every interface; empty where there is nothing to read."""
    try:
        lines = path.read_text().splitlines()[2:]
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if len(fields) >= 10:
            found[name.strip()] = InterfaceTraffic(
                bytes_received=int(fields[0]),
                packets_received=int(fields[1]),
                bytes_sent=int(fields[8]),
                packets_sent=int(fields[9]),
            )
    return found


def read_disk(path: Path) -> tuple[int, int]:
    """Bytes that the process has read from and written to disks; 0 where that is not shown."""
    try:
        fields = dict(line.split(": ") for line in path.read_text().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, KeyError, ValueError):
        return 0, 0


def process_began() -> float:
    """When this process was started, in seconds since 1970: imports are part of its time."""
    try:
        started = int(_stat_fields(PROC)[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()
    return time.time() - max(age, 0.0)


def _stat_fields(proc: Path) -> list[str]:
    """/proc/self/stat from its third field on: the name before may hold blanks and brackets."""
    return (proc / "self" / "stat").read_text().rpartition(")")[2].split()
