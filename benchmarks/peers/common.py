"""What every peer needs: the workload of a configuration, hosts to run on, and its result."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import socket
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
PASSED = (
    "PYTHONPATH",
    "PACELINE_DATA",
    "PACELINE_CACHE",
    "ONEDNN_MAX_CPU_ISA",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN_PATH",
)
"""Variables that a command on another host needs; ssh gives it a fresh environment."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a peer was asked to do."""

    config: Path
    result: Path
    processes: int
    """On each host."""
    threads: int
    """Of each process, which is then pinned to its part of the cores; 0: as its launcher leaves
    them."""
    variant: str
    """Where a peer has several ways."""
    worker: bool

    @property
    def words(self) -> list[str]:
        """For the worker that a launcher starts."""
        numbers = ["--processes", str(self.processes), "--threads", str(self.threads)]
        way = ["--variant", self.variant] if self.variant else []
        return [str(self.config), "--result", str(self.result), *numbers, *way, "--worker"]


def read_request(description: str | None, variants: Sequence[str] = ()) -> Request:
    """From the command line; of `variants` the first is what is run when none is asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("config", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--processes", type=int, help="on each host; one per visible core")
    parser.add_argument("--threads", type=int, default=0, help="of each; 0: the launcher's own")
    if variants:
        parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    return Request(
        config=asked.config.resolve(),
        result=asked.result.resolve(),
        processes=asked.processes or visible_cores(),
        threads=asked.threads,
        variant=asked.variant if variants else "",
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


def use_cores(request: Request, place: int, *, pinned: bool = True) -> None:
    """Pin this process, the one at `place` of its host's, to its part of the visible cores.

    Only where threads are asked for: pinned like Paceline's own ranks, and as many threads.
    `pinned=False`: as many threads alone.
    """
    if not request.threads:
        return
    import torch

    torch.set_num_threads(request.threads)
    if not pinned:
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // request.processes)
    first = place * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])


def on_host(address: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on another host, from this directory."""
    variables = [f"{name}={os.environ[name]}" for name in PASSED if name in os.environ]
    words = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *variables, *command])}"
    return ["ssh", address, words]


def wait_for(
    process: subprocess.Popen[bytes], host: str, port: int, who: str, patience: float
) -> None:
    """Until a process of ours listens there."""
    ends = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if process.poll() is not None:
                sys.exit(f"{who} ended with exit code {process.returncode}")
            if time.monotonic() > ends:
                sys.exit(f"{who} did not listen at {host}:{port} within {patience:.0f} s")
            time.sleep(0.2)


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


def require(name: str) -> None:
    """End with the line that makes a peer ready, unless this is its environment."""
    from studies.peers.environments import find_peer, install_line

    peer = find_peer(name)
    if importlib.util.find_spec(peer.recipe.module.partition(".")[0]) is None:
        sentence = install_line(name)
    elif peer.missing:
        sentence = "; ".join(program.remedy for program in peer.missing)
    else:
        return
    print(f"not installed: {sentence}", file=sys.stderr)
    sys.exit(NOT_INSTALLED)


def sent_bytes() -> int | None:
    """What the kernel has sent through this host's interface to the others; None: it has none."""
    path = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() and lab_hosts() else None


@dataclass
class Clock:
    """Seconds of every epoch and update, evaluation left out."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of this process, one per update."""
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
