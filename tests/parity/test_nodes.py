"""Several nodes end with the weights of one process on the same global batch.

Tolerance: rtol 1e-4 and atol 1e-5 in fp32 (Adam: atol 1e-4) after five updates, the last of
them smaller; only the order of additions differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from node_runs import metrics, train_nodes
from node_series import Run, train_series
from runs import assert_same

from paceline.schema import NodePlan

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.05")


SHARES = [(2.0, 1.0), (4.0, 1.0), (20.0, 1.0)]
"""Equal shares, a node without any, and four nodes are in the matrix of exchanges."""


def test_shares(alone, tmp_path: Path) -> None:
    runs = [Run("allreduce", SGD, [NodePlan(share=s) for s in shares]) for shares in SHARES]
    for number, found in enumerate(train_series(tmp_path, runs)):
        assert_same(found, alone(SGD))
        line = metrics(tmp_path / f"run-{number}")[0]
        assert line["bytes_sent"] > 0
        assert line["shares"] == pytest.approx(
            [s / sum(SHARES[number]) for s in SHARES[number]], abs=1e-3
        )


LOCAL = {
    "replicas": NodePlan(strategy="replicas", replicas=2),
    "processes": NodePlan(strategy="processes", processes=2),
    "hybrid": NodePlan(strategy="hybrid", replicas=2, stages=2, micro_batches=1),
}


@pytest.mark.parametrize(
    "name",
    ["processes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("replicas", "hybrid"))],
)
def test_local_strategies_of_nodes(name: str, alone, tmp_path: Path) -> None:
    """A node with ranks of its own beside one that has a single rank."""
    found = train_nodes(tmp_path / "run", [LOCAL[name], NodePlan()], *SGD)
    assert_same(found, alone(SGD))


@pytest.mark.slow
def test_weights_rounded_on_one_node_alone(alone, tmp_path: Path) -> None:
    """bf16: the ranks of one node share rounded weights, the other node leaves it to autocast."""
    settings = (*SGD, "numerics.precision=bf16")
    found = train_nodes(tmp_path / "run", [LOCAL["processes"], NodePlan()], *settings)
    weights, expected = (
        {name: tensor for name, tensor in state.items() if "|" not in name}
        for state in (found, alone(settings))
    )
    # Gradients of parts are rounded to 8 bits before they are summed.
    assert_same(weights, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.mpi
def test_mpi_with_workers_of_its_own(alone, tmp_path: Path) -> None:
    """mpiexec starts one process per node, which starts its own workers."""
    found = train_nodes(tmp_path / "run", [LOCAL["processes"], NodePlan()], *SGD, backend="mpi4py")
    assert_same(found, alone(SGD))
