"""Parameter servers whose workers, or servers, are killed; workers that come later."""

from __future__ import annotations

import signal
from typing import Any

import nodes as helpers
import numpy as np
import pytest
import torch
from nodes import MakeNodes, Nodes, make_nodes
from safetensors.torch import load_file

from paceline.config import load_config
from paceline.schema.events import Span, decode_line
from paceline.training.parts import make_parts

__all__ = ["make_nodes"]
pytestmark = pytest.mark.timeout(900)
DIGITS = helpers.DIGITS | {"exchange__mode": "async"}


@pytest.mark.slow
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


def test_sync_goes_on_without_workers_and_evaluates_the_whole_test_set(
    make_nodes: MakeNodes,
) -> None:
    """One worker is lost in an update, and one in the evaluation after it."""
    nodes = make_nodes(3, train__epochs=2, train__keep=20)
    nodes.pace.write_text("0.05")
    hold = nodes.pace.with_name("hold")
    hold.touch()
    nodes.start()
    nodes.until(lambda: (nodes.run / "checkpoints" / "latest").exists())
    nodes.kill(2)
    held = [hold.with_name(f"held-{nodes.processes[node].pid}") for node in range(2)]
    nodes.until(lambda: all(path.exists() for path in held))
    nodes.kill(1)
    hold.unlink()
    nodes.pace.unlink()
    for node in (0, 3):
        code, output = nodes.ends(node)
        assert code == 0, output
    first, last = nodes.lines()
    assert (first["epoch"], last["epoch"], last["server_updates"]) == (1, 2, 20)
    lost = nodes.staleness()["workers"]
    assert [line.split(" was lost")[0] for line in lost] == [
        "worker 2 on host-2",
        "worker 1 on host-1",
    ]
    check_evaluation(nodes, first, "step-00000010")
    check_evaluation(nodes, last, "step-00000020")


def check_evaluation(nodes: Nodes, line: dict[str, Any], checkpoint: str) -> None:
    """What was reported is true of the weights on the whole test set, in one process."""
    parts = make_parts(load_config(nodes.run / "config.toml"), None)
    try:
        model = parts.build_model().eval()
        test = parts.dataset.test
        inputs, targets = test.fetch(np.arange(len(test)), epoch=0, augment=False)
    finally:
        parts.dataset.close()
    model.load_state_dict(load_file(nodes.run / "checkpoints" / checkpoint / "model.safetensors"))
    with torch.no_grad():
        outputs = model(inputs)
        loss = float(parts.loss(outputs, targets))
    assert line["test_accuracy"] == int((outputs.argmax(dim=1) == targets).sum()) / len(targets)
    assert line["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_signal_to_all_stops_the_workers_in_order_and_saves(make_nodes: MakeNodes) -> None:
    """As where an agent or Slurm ends every process: workers need their server until they saved."""
    nodes = make_nodes(2, train__epochs=400, train__checkpoint_every=1000000)
    nodes.pace.write_text("0.02")
    nodes.start()
    nodes.until(lambda: len(nodes.lines()) >= 2)
    for process in nodes.processes.values():
        process.send_signal(signal.SIGTERM)
    assert [nodes.ends(node)[0] for node in (0, 1, 2)] == [143, 143, 0]
    saved = int((nodes.run / "checkpoints" / "latest").readlink().name.removeprefix("step-"))
    lines = (nodes.run / "rank-2" / "events.jsonl").read_text().splitlines()
    spans = [each for each in map(decode_line, lines) if isinstance(each, Span)]
    assert saved == 1 + max(each.update or 0 for each in spans if each.name == "optimizer")


@pytest.mark.slow
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
    # Each of the four servers mixes once at the end, and before as often as it gets to it.
    assert nodes.staleness()["mixes"] > 4


@pytest.mark.slow
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
