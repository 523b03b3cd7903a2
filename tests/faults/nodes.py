"""Nodes of one run as processes on loopback, to be killed, slowed down and started again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paced_model import put_into
from ports import free_port
from trainings import SMALL

from paceline import api
from paceline.config import dump_config, load_config
from paceline.config.environment import rank_environment
from paceline.schema import NodePlan, Plan, RankContext, write_json

_NODE = """
import sys
from pathlib import Path
from paceline.config.environment import rank_context
from paceline.launch.node import run_node
from paceline.launch.rank import leave
from paceline.run import RunDirectory
leave(run_node(RunDirectory(Path(sys.argv[1])), rank_context(), silent=True))
"""


class Nodes:
    """Processes of the nodes of one run, on loopback."""

    def __init__(self, folder: Path, workers: int, servers: int, changes: dict[str, object]):
        """Without servers the plan's exchange is `exchange.kind`."""
        self.run, self.count = folder / "run", workers + servers
        self.run.mkdir()
        self.pace = folder / "pace"
        settings = SMALL | {"workload.model": put_into(folder)} | changes
        settings |= {"exchange.servers": max(1, servers), "train.deadline": 20}
        config = api.resolve(load_config(None, [f"{k}={v}" for k, v in settings.items()]))
        (self.run / "config.toml").write_text(dump_config(config))
        nodes = tuple(NodePlan(host=f"host-{number}") for number in range(self.count))
        batch = config.workload.global_batch(1)
        kind = "parameter_server" if servers else config.exchange.kind
        write_json(self.run / "plan.json", Plan(nodes=nodes, exchange=kind, batch_size=batch))
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *nodes: int) -> None:
        """Start nodes; all of them when none is named."""
        if not nodes:
            self.port = free_port()
        for node in nodes or range(self.count):
            context = RankContext(node=node, nodes=self.count, port=self.port)
            process = subprocess.Popen(
                [sys.executable, "-c", _NODE, str(self.run)],
                env=os.environ | rank_environment(context) | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.processes[node] = process
            self.all.append(process)

    def ends(self, node: int) -> tuple[int, str]:
        """Exit code and output of a node, once it has ended."""
        process = self.processes[node]
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def kill(self, node: int) -> None:
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert self.processes[0].poll() is None or condition(), self.ends(0)
            assert time.monotonic() < end, "the training did not get there"
            time.sleep(0.01)

    def lines(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def position(self) -> int:
        """Updates done when the newest checkpoint was written; 0 without one."""
        latest = self.run / "checkpoints" / "latest"
        return int(latest.readlink().name.removeprefix("step-")) if latest.exists() else 0

    def weights(self) -> str:
        """Fingerprint of the last weights, bit for bit."""
        newest = self.run / "checkpoints" / "latest" / "model.safetensors"
        return hashlib.sha256(newest.read_bytes()).hexdigest()

    def staleness(self) -> dict[str, Any]:
        path = self.run / "staleness.json"
        found: dict[str, Any] = {"workers": []}
        if path.exists():
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                found = json.loads(path.read_text())
        return found


MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    made: list[Nodes] = []

    def make(workers: int, servers: int = 1, **changes: object) -> Nodes:
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        folder = tmp_path / f"nodes-{len(made)}"
        folder.mkdir()
        made.append(Nodes(folder, workers, servers, settings))
        return made[-1]

    yield make
    for nodes in made:
        for process in nodes.all:
            process.kill()
            process.communicate()


DIGITS = {
    "workload__data": "digits",
    "workload__batch_size": 64,
    "data__options": "{}",
    "optimizer__learning_rate": 0.003,
    "train__checkpoint_every": 100,
    "train__epochs": 12,
}
