"""Several nodes end with the weights of one process on the same global batch.

Tolerance: rtol 1e-4 and atol 1e-5 in fp32 (Adam: atol 1e-4) after five updates, the last of
them smaller; only the order of additions differs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from node_runs import metrics, state, train_nodes
from runs import assert_same, train_weights

from paceline.schema import NodePlan

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.05")
ADAM = ("optimizer.name=adam",)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """Weights and optimizer state of one process, by settings."""

    @cache
    def train(changes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("alone")
        train_weights(folder, *changes)
        return state(next(folder.iterdir()))

    return train


SHARES = {
    "equal": [1.0, 1.0],
    "2:1": [2.0, 1.0],
    "4:1": [4.0, 1.0],
    "20:1": [20.0, 1.0],
    "one without": [1.0, 0.0],
    "four": [3.0, 1.0, 2.0, 1.0],
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
def test_shares(shares: list[float], alone, tmp_path: Path) -> None:
    nodes = [NodePlan(share=share) for share in shares]
    found = train_nodes(tmp_path / "run", nodes, *SGD)
    assert_same(found, alone(SGD))
    line = metrics(tmp_path / "run")[0]
    assert line["bytes_sent"] > 0
    assert len(line["shares"]) == len(shares)


LOCAL = {
    "threads": NodePlan(strategy="threads", threads=2),
    "replicas": NodePlan(strategy="replicas", replicas=2),
    "processes": NodePlan(strategy="processes", processes=2),
    "pipeline": NodePlan(strategy="pipeline", stages=2, micro_batches=2),
    "hybrid": NodePlan(strategy="hybrid", replicas=2, stages=2, micro_batches=1),
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_strategies_of_nodes(name: str, alone, tmp_path: Path) -> None:
    """A node with ranks of its own beside one that has a single rank."""
    found = train_nodes(tmp_path / "run", [LOCAL[name], NodePlan()], *SGD)
    assert_same(found, alone(SGD))


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", [2, 4])
def test_mpi(nodes: int, alone, tmp_path: Path) -> None:
    plans = [NodePlan(share=1.0 + number) for number in range(nodes)]
    found = train_nodes(tmp_path / "run", plans, *ADAM, backend="mpi4py")
    assert_same(found, alone(ADAM), atol=1e-4)


@pytest.mark.mpi
def test_mpi_with_workers_of_its_own(alone, tmp_path: Path) -> None:
    """mpiexec starts one process per node, which starts its own workers."""
    found = train_nodes(tmp_path / "run", [LOCAL["processes"], NodePlan()], *SGD, backend="mpi4py")
    assert_same(found, alone(SGD))
