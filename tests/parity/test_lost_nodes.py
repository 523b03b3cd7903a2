"""A node that dies ends its leg: the others go on, with the weights of one process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from lost_nodes import await_leg, kill_together, member, start
from node_runs import metrics, state
from runs import assert_same, base_changes
from test_leg_nodes import paced, weights_of

from paceline.schema.legs import read_legs


def lose(
    tmp_path: Path, alone, nodes: int, exchange: str, lost: int, *more: str, **how: object
) -> str:
    """A training that loses a node; what it printed, its results having been compared."""
    changes = (*paced("paced"), *more)
    run = tmp_path / "run"
    settings = (*base_changes(), *changes, "local.strategy=auto", f"exchange.kind={exchange}")
    process = start(run, nodes, settings)
    try:
        kill_together(process, run, nodes, lost, **how)  # type: ignore[arg-type]
        output = process.communicate(timeout=600)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert_same(weights_of(state(run)), weights_of(alone(changes)), atol=1e-4)
    assert [line["epoch"] for line in metrics(run)] == list(range(1, 21))
    legs = read_legs(run / "legs.jsonl")
    (broken,) = [each for each in legs if each.left]
    assert broken.left == (f"localhost-{lost}",)
    # On a busy machine its silence may be noticed in a leg that does without it, and costs nothing.
    assert (broken.lost_seconds > 0) == (len(broken.plan.nodes) > 1)
    assert sum(each.updates for each in legs) == 100
    after = legs[legs.index(broken) + 1 :]
    assert after
    assert all(len(each.plan.nodes) < nodes for each in after)
    assert output.count("training goes on with") == 1, output
    return output


@pytest.mark.world_size(2)
def test_a_killed_rank_ends_its_leg_and_not_the_run(alone, tmp_path: Path) -> None:
    output = lose(tmp_path, alone, 2, "allreduce", 1)
    assert "was killed by SIGKILL" in output


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize("exchange", ["allreduce", "ring", "reduce_broadcast"])
def test_one_of_four_is_killed(exchange: str, alone, tmp_path: Path) -> None:
    lose(tmp_path, alone, 4, exchange, 2)


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_an_agent_is_killed(alone, tmp_path: Path) -> None:
    output = lose(tmp_path, alone, 4, "allreduce", 3, agent=True)
    assert "has gone: its connection was closed" in output


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_a_host_falls_silent(alone, tmp_path: Path) -> None:
    """Nothing tells the others that it has stopped but its silence; it ends when it wakes up."""
    output = lose(tmp_path, alone, 4, "ring", 1, "train.silence=3", number=signal.SIGSTOP)
    assert "has not been heard of" in output


@dataclasses.dataclass
class Training:
    """A training of a hundred epochs that is slow until it is let go."""

    folder: Path
    nodes: int
    hosts: str
    engine: str = "ssh"
    exchange: str = "allreduce"

    def __post_init__(self) -> None:
        self.run, self.hold = self.folder / "run", self.folder / "hold"
        self.hold.touch()
        models = Path(__file__).with_name("leg_models.py")
        self.changes = (
            *paced("paced"), "train.epochs=100", "train.evaluate_every=10",
            f"workload.model={models}:Held", f'workload.model_options.hold="{self.hold}"',
        )  # fmt: skip
        more = ("local.strategy=auto", f"exchange.kind={self.exchange}")
        settings = (*base_changes(), *self.changes, *more)
        self.process = start(self.run, self.hosts, settings, engine=self.engine)

    def await_leg(self, holds: Callable[..., bool]) -> None:
        await_leg(self.process, self.run, holds)

    def join(self, host: str) -> str:
        words = [sys.executable, "-m", "paceline.cli", "join", str(self.run), "--host", host]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ends_as_one_process(self, alone) -> str:
        """What it printed to its end, its weights having been compared."""
        self.hold.unlink()
        try:
            output = self.process.communicate(timeout=400)[0]
        finally:
            self.process.kill()
            self.process.wait()
        assert self.process.returncode == 0, output
        assert_same(weights_of(state(self.run)), weights_of(alone(self.changes)), atol=1e-4)
        legs = read_legs(self.run / "legs.jsonl")
        assert sum(each.updates for each in legs) == 500
        return output


def both(hosts: int) -> Callable[..., bool]:
    return lambda leg: len(leg.plan.nodes) == hosts and leg.updates > 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(2, marks=pytest.mark.world_size(2)),
        pytest.param(4, marks=[pytest.mark.world_size(4), pytest.mark.slow]),
    ],
)
def test_mpi_starts_again_after_a_rank_was_killed(nodes: int, alone, tmp_path: Path) -> None:
    """MPI dies as a whole; the one that was killed is named, and all begin again by themselves."""
    training = Training(tmp_path, nodes, f"localhost:{nodes}", engine="mpi")
    training.await_leg(both(nodes))
    os.kill(member(training.process, nodes - 1), signal.SIGKILL)
    training.await_leg(lambda leg: leg.lost_seconds > 0)
    output = training.ends_as_one_process(alone)
    assert f"rank {nodes - 1} on host localhost was killed by SIGKILL" in output
    assert "starting again from update" in output
    (broken,) = [each for each in read_legs(training.run / "legs.jsonl") if each.lost_seconds]
    assert "was killed by SIGKILL" in broken.ended


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_first_node_is_lost_and_all_start_again(alone, tmp_path: Path) -> None:
    training = Training(tmp_path, 2, "localhost:2")
    training.await_leg(both(2))
    os.kill(member(training.process, 0), signal.SIGKILL)
    training.await_leg(lambda leg: leg.lost_seconds > 0)
    output = training.ends_as_one_process(alone)
    assert "rank 0 on host localhost was killed by SIGKILL" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        pytest.param(2, "localhost,127.0.0.1", marks=pytest.mark.world_size(2)),
        pytest.param(4, "localhost:3,127.0.0.1", marks=pytest.mark.world_size(4)),
    ],
)
def test_a_host_that_was_lost_comes_back(nodes: int, hosts: str, alone, tmp_path: Path) -> None:
    training = Training(tmp_path, nodes, hosts)
    training.await_leg(both(nodes))
    os.kill(member(training.process, nodes - 1), signal.SIGKILL)
    training.await_leg(lambda leg: leg.came == ("127.0.0.1",))
    legs = read_legs(training.run / "legs.jsonl")
    came = next(leg for leg in legs if leg.came)
    # A comparison that was under way comes to its end first; held updates are worth sharing.
    training.await_leg(lambda leg: leg.first >= came.first and both(nodes)(leg))
    output = training.ends_as_one_process(alone)
    assert "127.0.0.1 has come, before update" in output
    legs = read_legs(training.run / "legs.jsonl")
    assert [leg.left for leg in legs if leg.left] == [("127.0.0.1",)]


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize("exchange", ["allreduce", "ring"])
def test_another_host_joins(exchange: str, alone, tmp_path: Path) -> None:
    training = Training(tmp_path, 3, "localhost:3", exchange=exchange)
    training.await_leg(both(3))
    assert training.join("127.0.0.1") == "host 127.0.0.1 joins as node 3\n"
    training.await_leg(lambda leg: leg.came == ("127.0.0.1",))
    training.await_leg(both(4))
    training.ends_as_one_process(alone)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_killed_launcher_leaves_a_run_that_goes_on(alone, tmp_path: Path) -> None:
    """The nodes end by themselves, in order where they can, and leave nothing but the run."""
    training = Training(tmp_path, 2, "localhost:2")
    training.await_leg(both(2))
    nodes = [psutil.Process(member(training.process, node)) for node in (0, 1)]
    training.process.kill()
    training.process.wait()
    assert psutil.wait_procs(nodes, timeout=60)[1] == []
    end = time.monotonic() + 60
    while (training.run / ".launch").exists() or (training.run / "join.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    words = ["train", "--resume", "--run", str(training.run), "--hosts", "localhost:2"]
    training.process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *words, "--engine", "ssh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "continuing" in training.ends_as_one_process(alone)
