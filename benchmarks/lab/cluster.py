"""Runs a bench on the hosts of a lab and brings the timings together."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lab.trials import Bench, Timing, Timings, Trial
from paceline.config.environment import rank_environment
from paceline.errors import RunError
from paceline.lab import Lab, LabProcess, LabSpec
from paceline.schema import RankContext, read_json, write_json

_PORT = 29431
"""On the lab's own network, where nobody else listens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial over all rounds and hosts: medians."""

    name: str
    seconds: float
    low: float
    high: float
    images_per_second: float
    mb_sent: float
    """Per host and update, by the kernel's counters, the host that sends most."""
    mb_counted: float
    """Per host and update, as the exchange counts them, the host that sends most."""
    packets: float
    waiting: float
    """Part of the time in which computing stood still for the network, mean over hosts."""
    failed: str = ""


def run_in_lab(
    spec: LabSpec,
    bench: Bench,
    *,
    timeout: float = 1800.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Timing]:
    """Every timing of every host."""
    with Lab(spec) as lab, tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        hosts = [host.name for host in spec.hosts]
        bench = dataclasses.replace(bench, hosts=tuple(hosts))
        write_json(folder / "bench.json", bench)
        for warning in (*lab.warnings, *lab.cannot):
            say(f"warning: {warning}")
        with contextlib.ExitStack() as stack:
            started = [
                _start(lab, folder, number, len(hosts), stack) for number in range(len(hosts))
            ]
            _wait(started, folder, hosts, timeout)
        return [
            timing
            for host in hosts
            for timing in read_json(Timings, folder / f"{host}.json").timings
        ]


def _start(
    lab: Lab, folder: Path, number: int, count: int, stack: contextlib.ExitStack
) -> LabProcess:
    host = lab.spec.hosts[number].name
    first = lab.addresses[lab.spec.hosts[0].name]
    context = RankContext(
        rank=number, world_size=count, node=number, nodes=count, address=first, port=_PORT
    )
    output = stack.enter_context((folder / f"{host}.log").open("wb"))
    return lab.start(
        [
            sys.executable,
            "-m",
            "benchmarks.lab.worker",
            str(folder / "bench.json"),
            str(folder / f"{host}.json"),
        ],
        on=host,
        env=rank_environment(context) | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def _wait(
    started: Sequence[LabProcess], folder: Path, hosts: Sequence[str], timeout: float
) -> None:
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in started):
        failed = [n for n, process in enumerate(started) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > end:
            time.sleep(1.0)  # the others have something to say too
            logs = "\n".join(
                f"--- {host} ---\n{(folder / f'{host}.log').read_text()[-3000:]}" for host in hosts
            )
            what = f"not done within {timeout:.0f} s"
            if failed:
                what = f"{hosts[failed[0]]} {_how_it_ended(started[failed[0]])}"
            raise RunError(f"the bench could not be run: {what}\n{logs}")
        time.sleep(0.1)


def _how_it_ended(process: LabProcess) -> str:
    code = process.returncode or 0
    if code >= 0:
        return "failed"
    remedy = ""
    if code == -signal.SIGKILL:
        remedy = "; if memory ran out, take fewer hosts or a smaller model"
    return f"was killed by {signal.Signals(-code).name}{remedy}"


def summarise(trials: Sequence[Trial], timings: Sequence[Timing]) -> list[TrialRow]:
    """One row per trial: the median over rounds of the slowest host's time."""
    rows = []
    for trial in trials:
        mine = [timing for timing in timings if timing.trial == trial.name]
        failed = next((timing.failed for timing in mine if timing.failed), "")
        if failed or not mine:
            rows.append(
                TrialRow(
                    name=trial.name,
                    seconds=0,
                    low=0,
                    high=0,
                    images_per_second=0,
                    mb_sent=0,
                    mb_counted=0,
                    packets=0,
                    waiting=0,
                    failed=failed or "not run",
                )
            )
            continue
        rounds = sorted({timing.round for timing in mine})
        by_round = [[t for t in mine if t.round == number] for number in rounds]
        seconds = [max(t.seconds for t in one) for one in by_round]
        if trial.kind == "alone":
            rates = [sum(t.samples / t.seconds for t in one if t.samples) for one in by_round]
        else:
            rates = [
                sum(t.samples for t in one) / time
                for one, time in zip(by_round, seconds, strict=True)
            ]
        rows.append(
            TrialRow(
                name=trial.name,
                seconds=statistics.median(seconds),
                low=min(seconds),
                high=max(seconds),
                images_per_second=statistics.median(rates),
                mb_sent=max(t.kernel_bytes_sent for t in mine) / 1e6,
                mb_counted=max(t.bytes_sent for t in mine) / 1e6,
                packets=max(t.packets_sent for t in mine),
                waiting=statistics.fmean(t.waited / t.seconds for t in mine),
            )
        )
    return rows
