"""Synchronous parameter servers end with the weights of one process on the same global batch.

Tolerance as in test_nodes.py: only the order of additions differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from node_runs import metrics, train_nodes
from runs import assert_same

from paceline.observe.ledger import ledger_of
from paceline.schema import NodePlan

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.05")
ADAM = ("optimizer.name=adam", "optimizer.schedule=linear", "optimizer.warmup=0.4")


def workers(*shares: float, servers: int = 1) -> list[NodePlan]:
    return [NodePlan(share=share) for share in shares] + [NodePlan()] * servers


CASES = {
    "1 worker, clipped": (workers(1.0), ("optimizer.clip_norm=0.5",)),
    "3 workers": (workers(3.0, 1.0, 2.0), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_sgd(name: str, alone, tmp_path: Path) -> None:
    nodes, changes = CASES[name]
    found = train_nodes(tmp_path / "run", nodes, *SGD, *changes, exchange="parameter_server")
    assert_same(found, alone((*SGD, *changes)))
    line = metrics(tmp_path / "run")[0]
    assert line["staleness_largest"] == 0
    assert line["server_updates"] == 5
    weights = sum(tensor.nbytes for key, tensor in found.items() if "|" not in key)
    # The first worker's weights, five gradients from every worker, besides headers and sums.
    count = len(nodes) - 1
    received = (1 + 5 * count) * weights
    assert received <= line["server_bytes_received"] < received + 50_000
    check_server_events(tmp_path / "run", count, weights)


def check_server_events(run: Path, workers: int, weights: int) -> None:
    """A server books its time as every rank does, and counts what each update moved."""
    ledger = ledger_of(run)
    (server,) = [rank for rank in ledger.ranks if rank.role == "server"]
    assert (server.rank, len(ledger.workers)) == (workers, workers)
    assert sum(server.seconds.values()) == pytest.approx(server.wall)
    for category in ("optimizer", "communication", "waiting", "start_up"):
        assert server.seconds[category] > 0, category
    assert server.seconds["compute"] == 0
    assert server.exchange.updates == 5
    received = (1 + 5 * workers) * weights
    assert received <= server.exchange.bytes_received < received + 50_000
    assert not server.waited_for


@pytest.mark.slow
def test_adam_over_two_servers(alone, tmp_path: Path) -> None:
    nodes = workers(2.0, 1.0, servers=2)
    changes = (*ADAM, "exchange.servers=2")
    found = train_nodes(tmp_path / "run", nodes, *changes, exchange="parameter_server")
    assert_same(found, alone(ADAM), atol=1e-4)
