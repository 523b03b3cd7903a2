"""The simulation agrees with the formulas where both apply, and says more where they do not."""

from __future__ import annotations

import pytest
from simulated import (
    ServerTask,
    simulate_servers,
    simulate_stragglers,
)

from paceline.cost.compute import expected_maximum, update_curve
from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import LayerCost, model_cost
from paceline.cost.step import TeamMember, step_cost
from paceline.cost.transfer import Wire
from paceline.errors import ConfigError


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (8, 2), (4, 4)])
def test_synchronous_servers_agree_with_the_formula(workers: int, servers: int) -> None:
    wire = Wire(latency=0.01, bandwidth=100.0, both=100.0, message=0.0)
    model = model_cost([LayerCost(parameter_bytes=50.0)])
    exchange = ExchangeCost(kind="parameter_server", servers=servers, dedicated=True)
    curve = update_curve([(1, 1.0)])
    expected = step_cost([TeamMember(curve, workers)], wire, model, exchange, workers).seconds
    task = ServerTask(
        compute=(1.0,) * workers, size=50.0, bandwidth=100.0, latency=0.01, servers=servers
    )
    run = simulate_servers(task)
    assert run.seconds / task.updates == pytest.approx(expected, rel=0.01)
    assert set(run.staleness) == {0}


def test_one_after_the_other_overlaps_what_sharing_does_not() -> None:
    """The first worker computes while the last one still pulls: W + 1 messages, not 2 W."""
    task = ServerTask(compute=(1.0,) * 4, size=50.0, bandwidth=100.0, sharing="fifo", updates=40)
    run = simulate_servers(task)
    assert run.seconds / task.updates == pytest.approx(1.0 + 5 * 0.5, rel=0.02)


@pytest.mark.parametrize("workers", [2, 3, 12])
def test_asynchronous_servers_agree_with_the_formula(workers: int) -> None:
    wire = Wire(latency=0.0, bandwidth=100.0, both=100.0, message=0.0)
    model = model_cost([LayerCost(parameter_bytes=50.0)])
    exchange = ExchangeCost(kind="parameter_server", dedicated=True, asynchronous=True)
    team = [TeamMember(update_curve([(1, 1.0)]), workers)]
    expected = step_cost(team, wire, model, exchange, workers)
    run = simulate_servers(
        ServerTask(
            compute=(1.0,) * workers, size=50.0, bandwidth=100.0, asynchronous=True,
            deviation=0.05, updates=200,
        )
    )  # fmt: skip
    assert run.updates_per_second == pytest.approx(expected.images_per_second, rel=0.1)
    assert run.mean_staleness == pytest.approx(workers - 1, abs=0.1 + 0.05 * workers)


def test_slow_workers_are_stale_and_fast_ones_are_not_held_up() -> None:
    def run(asynchronous: bool) -> object:
        return simulate_servers(
            ServerTask(
                compute=(1.0, 1.0, 1.0, 21.0), size=1.0, bandwidth=1e6, updates=20,
                asynchronous=asynchronous, deviation=0.01,
            )
        )  # fmt: skip

    apart, together = run(True), run(False)
    assert max(apart.staleness) > 40  # type: ignore[attr-defined]
    assert apart.updates == together.updates  # type: ignore[attr-defined]
    assert together.seconds == pytest.approx(20 * 21, rel=0.02)  # type: ignore[attr-defined]


def test_queues_grow_at_one_server() -> None:
    def queueing(servers: int) -> float:
        task = ServerTask(compute=(0.1,) * 32, size=10.0, bandwidth=100.0, servers=servers)
        return simulate_servers(task).queueing

    assert queueing(1) > 4 * queueing(8)


@pytest.mark.parametrize("nodes", [1, 4, 64, 1024])
def test_stragglers_agree_with_the_expected_maximum(nodes: int) -> None:
    run = simulate_stragglers([1.0] * nodes, deviation=0.05, steps=200)
    assert run.seconds == pytest.approx(1 + 0.05 * expected_maximum(nodes), rel=0.01)
    if nodes > 1:
        rare = simulate_stragglers([1.0] * nodes, deviation=0.05, steps=208, every=16)
        assert rare.waiting == pytest.approx(0.05 * expected_maximum(nodes) / 4, rel=0.3)


def test_backups_and_stalls() -> None:
    calm = simulate_stragglers([1.0] * 16, deviation=0.02)
    stalled = simulate_stragglers([1.0] * 16, deviation=0.02, stall=(0.02, 5.0))
    saved = simulate_stragglers([1.0] * 16, deviation=0.02, stall=(0.02, 5.0), backups=3)
    assert calm.seconds < stalled.seconds
    assert saved.seconds < 0.7 * stalled.seconds
    with pytest.raises(ConfigError, match="at least one node"):
        simulate_stragglers([1.0], deviation=0.0, backups=1)


def test_thousands_of_nodes() -> None:
    servers = ServerTask(
        compute=(1.0,) * 4096, size=1e6, bandwidth=1e8, servers=8, updates=2,
        asynchronous=True, deviation=0.1,
    )  # fmt: skip
    assert simulate_servers(servers).updates == 8192
