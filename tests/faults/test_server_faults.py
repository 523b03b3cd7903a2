"""Parameter servers whose workers, or servers, are killed; workers that come later."""

from __future__ import annotations

import contextlib
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
from trainings import SMALL

from paceline import api
from paceline.config import dump_config, load_config
from paceline.config.environment import rank_environment
from paceline.schema import NodePlan, Plan, RankContext, write_json

pytestmark = pytest.mark.timeout(120)

_NODE = """
import sys
from pathlib import Path
from paceline.config.environment import rank_context
from paceline.launch.node import run_node
from paceline.run import RunDirectory
sys.exit(run_node(RunDirectory(Path(sys.argv[1])), rank_context(), silent=True))
"""

# Each forward pass of training takes as many seconds more as stand in the file `pace` beside it.
_MODEL = """
import pathlib, time, torch

HERE = pathlib.Path(__file__).parent

class Paced(torch.nn.Module):
    def __init__(self, channels=1, image_size=8, classes=10):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(channels * image_size**2, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, classes),
        )

    def forward(self, inputs):
        pace = HERE / "pace"
        if self.training and pace.exists():
            time.sleep(float(pace.read_text() or 0))
        return self.layers(inputs)
"""


class Nodes:
    """Processes of the nodes of one run, on loopback."""

    def __init__(self, folder: Path, workers: int, servers: int, changes: dict[str, object]):
        self.run, self.count = folder / "run", workers + servers
        self.run.mkdir()
        (folder / "paced.py").write_text(_MODEL)
        self.pace = folder / "pace"
        settings = SMALL | {"workload.model": f"{folder / 'paced.py'}:Paced"} | changes
        settings |= {"exchange.servers": servers, "train.deadline": 20}
        config = api.resolve(load_config(None, [f"{k}={v}" for k, v in settings.items()]))
        (self.run / "config.toml").write_text(dump_config(config))
        nodes = tuple(NodePlan(host=f"host-{number}") for number in range(self.count))
        batch = config.workload.global_batch(1)
        write_json(
            self.run / "plan.json", Plan(nodes=nodes, exchange="parameter_server", batch_size=batch)
        )
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *nodes: int) -> None:
        """Start nodes; all of them when none is named."""
        if not nodes:
            self.port = _free_port()
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
        output, _ = process.communicate(timeout=90)
        return process.returncode, output

    def kill(self, node: int) -> None:
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert self.processes[0].poll() is None or condition(), self.ends(0)
            assert time.monotonic() < end, "the training did not get there"
            time.sleep(0.01)

    def lines(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def staleness(self) -> dict[str, Any]:
        path = self.run / "staleness.json"
        found: dict[str, Any] = {"workers": []}
        if path.exists():
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                found = json.loads(path.read_text())
        return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    made: list[Nodes] = []

    def make(workers: int, servers: int = 1, **changes: object) -> Nodes:
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        made.append(Nodes(tmp_path, workers, servers, settings))
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
    "exchange__mode": "async",
}


def test_downpour_goes_on_without_a_worker_and_takes_a_new_one(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, **DIGITS)
    nodes.pace.write_text("0.01")
    nodes.start()
    nodes.until(lambda: len(nodes.lines()) >= 6)
    nodes.kill(2)
    nodes.pace.write_text("0.1")
    nodes.start(2)
    nodes.until(lambda: any("joined" in line for line in nodes.staleness()["workers"]))
    before = nodes.lines()[-1]["server_updates"]
    nodes.pace.unlink()
    code, output = nodes.ends(0)
    assert code == 0, output
    lost, joined = nodes.staleness()["workers"]
    assert lost.startswith("worker 2 on host-2 was lost at update ")
    assert lost.endswith("; going on with 2 workers")
    assert joined.startswith("worker 2 on host-2 joined at update ")
    assert lost in output
    assert joined in output
    for node in (1, 2, 3):
        assert nodes.ends(node)[0] == 0, node
    last = nodes.lines()[-1]
    assert last["epoch"] == 12
    assert last["test_accuracy"] >= 0.95
    assert last["server_updates"] > before
    found = nodes.staleness()
    assert sum(found["histogram"].values()) == found["updates"] == last["server_updates"]
    assert found["largest"] >= 1


def test_sync_goes_on_without_a_worker(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, train__epochs=2)
    nodes.pace.write_text("0.05")
    nodes.start()
    nodes.until(lambda: (nodes.run / "checkpoints" / "latest").exists())
    nodes.kill(1)
    nodes.pace.unlink()
    for node in (0, 2):
        code, output = nodes.ends(node)
        assert code == 0, output
    assert nodes.lines()[-1]["epoch"] == 2
    assert nodes.lines()[-1]["server_updates"] == 20
    assert "worker 1 on host-1 was lost" in nodes.staleness()["workers"][0]


def test_a_lost_server_ends_the_run_and_the_checkpoint_goes_on(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(1, train__epochs=2)
    nodes.pace.write_text("0.05")
    nodes.start()
    nodes.until(lambda: (nodes.run / "checkpoints" / "latest").exists())
    nodes.kill(1)
    code, output = nodes.ends(0)
    assert code == 1
    assert "lost a server (host-1)" in output
    assert "--resume" in output
    nodes.pace.unlink()
    nodes.start()
    for node in (0, 1):
        code, output = nodes.ends(node)
        assert code == 0, output
    assert [line["epoch"] for line in nodes.lines()] == [1, 2]


@pytest.mark.slow
def test_groups_and_a_bound_on_staleness(make_nodes: MakeNodes) -> None:
    """Three workers in two groups: two updates per step, and at most 2 x 1 + 1 between two."""
    nodes = make_nodes(3, exchange__mode="async", exchange__groups=2, exchange__max_staleness=1)
    nodes.start()
    for node in range(4):
        code, output = nodes.ends(node)
        assert code == 0, output
    last = nodes.lines()[-1]
    assert last["server_updates"] == 2 * 40
    assert last["staleness_largest"] <= 3


@pytest.mark.slow
def test_server_groups_learn_digits(make_nodes: MakeNodes) -> None:
    """Four workers in two groups, each bound to a server group of two shards (SINGA)."""
    options = {"exchange__groups": 2, "exchange__server_groups": 2, "train__epochs": 8}
    nodes = make_nodes(4, 4, **(DIGITS | options))
    nodes.start()
    for node in range(8):
        code, output = nodes.ends(node)
        assert code == 0, output
    last = nodes.lines()[-1]
    assert last["test_accuracy"] >= 0.95
    # One update of each worker group per global batch, 23 of which are an epoch.
    assert last["server_updates"] == 2 * 8 * 23
    assert nodes.staleness()["mixes"] >= 2 * 8 * 23 // 4


def test_a_worker_of_a_later_server_group_dies_and_the_group_goes_on(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, 2, exchange__mode="async", exchange__server_groups=2, train__epochs=2)
    nodes.pace.write_text("0.1")
    nodes.start()
    nodes.until(lambda: (nodes.run / "checkpoints" / "latest").exists())
    nodes.kill(2)
    nodes.pace.unlink()
    for node in (0, 1, 3, 4):
        code, output = nodes.ends(node)
        assert code == 0, output
    (lost,) = nodes.staleness()["workers"]
    assert lost.startswith("worker 2 on host-2 was lost at update "), lost
    assert nodes.lines()[-1]["epoch"] == 2
