"""What every peer needs: the workload of a configuration, hosts to run on, and its result."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_INSTALLED = 3
PASSED = ("PYTHONPATH", "PACELINE_DATA", "PACELINE_CACHE", "ONEDNN_MAX_CPU_ISA")
"""Variables that a command on another host needs; ssh gives it a fresh environment."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a peer was asked to do."""

    config: Path
    result: Path
    processes: int | None
    worker: bool

    @property
    def words(self) -> list[str]:
        """For the worker that a launcher starts."""
        return [str(self.config), "--result", str(self.result), "--worker"]


def read_request(description: str | None) -> Request:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--processes", type=int, help="on each host; one per visible core")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    return Request(
        config=asked.config.resolve(),
        result=asked.result.resolve(),
        processes=asked.processes,
        worker=asked.worker,
    )


def lab_hosts() -> list[str]:
    """Hosts of the lab that this runs in, this one first; none: this machine alone."""
    path = os.environ.get("PACELINE_LAB_HOSTS")
    if not path:
        return []
    hosts = tomllib.loads(Path(path).read_text())["host"]
    return [str(host["address"]) for host in hosts]


def visible_cores() -> int:
    return len(os.sched_getaffinity(0))


def on_host(address: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on another host, from this directory."""
    variables = [f"{name}={os.environ[name]}" for name in PASSED if name in os.environ]
    words = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *variables, *command])}"
    return ["ssh", address, words]


def run_together(commands: Sequence[Sequence[str]]) -> int:
    """Run commands at the same time; the first that fails, or our own end, ends the others."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes = [subprocess.Popen(command) for command in commands]
    try:
        while True:
            codes = [process.poll() for process in processes]
            bad = [code for code in codes if code]
            if bad or all(code == 0 for code in codes):
                return bad[0] if bad else 0
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def not_installed(line: str) -> None:
    """Say how to install the peer, and end."""
    print(f"not installed: {line}", file=sys.stderr)
    sys.exit(NOT_INSTALLED)


def sent_bytes() -> int | None:
    """What the kernel has sent through this host's interface to the others; None: it has none."""
    path = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() and lab_hosts() else None


@dataclass
class Clock:
    """Seconds of every epoch and update, evaluation left out."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    _mark: float = 0.0

    def start(self) -> None:
        self.updates = []
        self._mark = time.perf_counter()

    def update(self) -> None:
        now = time.perf_counter()
        self.updates.append(now - self._mark)
        self._mark = now

    def epoch(self, images: int, **more: Any) -> None:
        """The end of an epoch in which all processes together trained on `images`."""
        seconds = sum(self.updates)
        self.epochs.append(
            {
                "epoch": len(self.epochs) + 1,
                "seconds": seconds,
                "updates": len(self.updates),
                "images_per_second": images / seconds,
                "update_seconds_mean": seconds / len(self.updates),
                **more,
            }
        )


def summary(clock: Clock) -> dict[str, Any]:
    """What the epochs say together; the first, which warms up, is left out if there are others."""
    epochs = clock.epochs[1:] or clock.epochs
    return {
        "epochs": clock.epochs,
        "images_per_second": statistics.median([each["images_per_second"] for each in epochs]),
        "epoch_seconds": statistics.median([each["seconds"] for each in epochs]),
        "update_seconds_mean": statistics.median([each["update_seconds_mean"] for each in epochs]),
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(path)
