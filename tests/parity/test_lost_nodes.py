"""A node that dies ends its leg: the others go on, with the weights of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from lost_nodes import kill_together, start
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
    assert broken.lost_seconds > 0
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
    output = lose(tmp_path, alone, 4, "ring", 1, number=signal.SIGSTOP)
    assert "has not been heard of" in output
