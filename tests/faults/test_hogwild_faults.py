"""Distributed Hogwild: copies that are mixed without waiting, and nodes that die."""

from __future__ import annotations

import signal

import pytest
from nodes import DIGITS, MakeNodes, Nodes, make_nodes

__all__ = ["make_nodes"]
pytestmark = pytest.mark.timeout(900)


def until_all_train(nodes: Nodes) -> None:
    """Nobody waits for anybody: the first node may be far ahead when another one starts."""

    def all_train() -> bool:
        updates = nodes.staleness().get("updates", {})
        return len(updates) == nodes.count - 1 and min(updates.values()) > 0

    nodes.until(all_train)


@pytest.mark.slow
def test_hogwild_learns_digits_and_goes_on_without_a_node(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(3, 0, **(DIGITS | {"exchange__kind": "hogwild"}))
    nodes.pace.write_text("0.05")
    nodes.start()
    until_all_train(nodes)
    nodes.kill(2)
    nodes.pace.unlink()
    code, output = nodes.ends(0)
    assert code == 0, output
    assert nodes.ends(1)[0] == 0
    found = nodes.staleness()
    (lost,) = found["nodes"]
    assert lost.startswith("node 2 on host-2 was lost at update ")
    assert lost.endswith("; going on with 2 nodes")
    assert lost in output
    last = nodes.lines()[-1]
    assert last["epoch"] == 12
    assert last["test_accuracy"] >= 0.95
    assert sum(found["histogram"].values()) == found["mixes"] == last["mixes"]
    assert found["mixes"] >= 12


@pytest.mark.slow
def test_without_the_first_node_the_others_end_with_a_sentence(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 0, exchange__kind="hogwild", train__epochs=20)
    nodes.pace.write_text("0.2")
    nodes.start()
    until_all_train(nodes)
    nodes.kill(0)
    code, output = nodes.ends(1)
    assert code == 1
    assert "node 1 on host-1 lost the first node, host-0, which writes the checkpoints" in output
    nodes.pace.unlink()
    nodes.start()
    for node in (0, 1):
        code, output = nodes.ends(node)
        assert code == 0, output
    assert [line["epoch"] for line in nodes.lines()] == list(range(1, 21))


@pytest.mark.slow
def test_a_wish_to_stop_reaches_all(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2, 0, exchange__kind="hogwild", train__epochs=1000)
    nodes.pace.write_text("0.01")
    nodes.start()
    until_all_train(nodes)
    nodes.processes[0].send_signal(signal.SIGINT)
    code, output = nodes.ends(0)
    assert code == 130, output
    assert nodes.ends(1)[0] == 0
    assert (nodes.run / "checkpoints" / "latest").exists()
