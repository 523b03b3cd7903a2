"""Links of known rate are measured as what they are."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.api import HostsRequest
from paceline.config.environment import rank_environment
from paceline.config.hosts import find_hosts
from paceline.cost.transfer import allreduce_seconds, slowest_wire
from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.launch.session import HostOrder, Session
from paceline.run import RunDirectory
from paceline.schema import Plan, RankContext, decode
from paceline.schema.machines import Machines
from paceline.workflow.spread import choose_engine

__all__ = ["make_lab"]
MBIT = 1e6 / 8
ETHERNET = 1448 / 1514
"""What headers leave of the bytes that a shaper counts."""


def measured(lab: Lab, names: tuple[str, ...], folder: Path) -> Machines:
    """What `measure_links` finds between the hosts of a lab."""
    outputs = [folder / name for name in names]
    with contextlib.ExitStack() as stack:
        processes = []
        for node, name in enumerate(names):
            context = RankContext(node=node, nodes=len(names), address=names[0], port=23456)
            words = [sys.executable, "-m", "paceline.hardware.links", json.dumps(names)]
            output = stack.enter_context(outputs[node].open("wb"))
            processes.append(
                lab.start(words, on=name, env=rank_environment(context), stdout=output)
            )
        assert [process.wait(timeout=600) for process in processes] == [0] * len(names)
    found = [decode(Machines, json.loads(output.read_text())) for output in outputs]
    return Machines(
        links=tuple(link for each in found for link in each.links),
        curves=tuple(curve for each in found for curve in each.curves),
    )


@pytest.mark.slow
@pytest.mark.lab
def test_bandwidth_is_that_of_the_link(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab("a", "b", rate="100mbit")
    found = measured(lab, ("a", "b"), tmp_path)
    (link,) = found.links
    assert (link.first, link.second) == ("a", "b")
    for figure in (link.forward, link.backward, link.both):
        assert figure is not None
        assert figure.samples > 1
        # A shaper lets nothing through faster; a busy machine makes transfers slower.
        assert 0 < figure.low < 1.35 * 100 * MBIT * ETHERNET, figure
        assert figure.low <= figure.median <= figure.high
    assert link.latency.median > 0
    (curve,) = found.curves
    assert curve.hosts == ("a", "b")
    assert curve.points[0].bytes == 1024
    assert curve.points[-1].bytes >= 4 * 2**20
    assert curve.cpu_per_byte is not None
    # The cost model is fitted to the curve: more bytes take longer.
    wire = slowest_wire(found, ["a", "b"])
    assert allreduce_seconds(wire, 2**20, 2) < allreduce_seconds(wire, 2**24, 2)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_agents_measure_links_and_are_let_go(tmp_path: Path) -> None:
    hosts = find_hosts("localhost:2")
    order = HostOrder(
        run=RunDirectory(tmp_path),
        hosts=hosts,
        config='name = "test"\n',
        plan=lambda session: (Plan(), None),
        say=lambda text: None,
        show=lambda text: None,
        start_seconds=60.0,
    )
    found: list[list[Machines]] = []
    engine = choose_engine(HostsRequest(hosts=hosts, engine="ssh"), None)
    Session(order, engine).visit(lambda session: found.append(session.links(["x", "y"], "gloo")))
    ((first, second),) = found
    assert [(link.first, link.second) for link in first.links] == [("x", "y")]
    assert first.curves[0].points[-1].bytes == 16 * 2**20
    assert not second.links
    assert not second.curves
    assert not (tmp_path / ".launch").exists()
