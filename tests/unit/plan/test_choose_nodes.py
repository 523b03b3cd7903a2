"""Who trains with whom, on made-up machines."""

from __future__ import annotations

import dataclasses

import pytest
from cost_cases import host, machines

from paceline.errors import ConfigError, StrategyError
from paceline.plan.nodes import NodeChoice, choose_nodes, explain_nodes
from paceline.schema.machines import Machines

SMALL = 0.01
"""Of the weights: a model that exchanges quickly."""


def check_what_always_holds(choice: NodeChoice, found: Machines) -> None:
    assert sum(choice.samples) == choice.batch_size
    assert sum(node.share for node in choice.nodes) == pytest.approx(1)
    assert {n.host for n in choice.nodes} | set(choice.left_out) == {h.name for h in found.hosts}
    assert len(explain_nodes(choice).splitlines()) == 5
    terms = ("compute", "exposed", "bubble", "waiting", "data")
    assert sum(choice.predicted[f"{t}_seconds"] for t in terms) == pytest.approx(
        choice.predicted["update_seconds"]
    )
    for other in choice.rejected:
        assert "s per update" in other.reason
        assert other.images_per_second
        if "not exact" not in other.reason and "more than is free" not in other.reason:
            best = choice.predicted["images_per_second"]
            assert other.images_per_second <= best * 1.0205


def test_one_machine_trains_alone() -> None:
    found = machines(host("a"))
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert [node.host for node in choice.nodes] == ["a"]
    assert choice.predicted["speedup"] == 1
    assert choice.predicted["bytes_sent"] == 0
    assert "none is needed" in explain_nodes(choice)


def test_equal_machines_share_equally() -> None:
    found = machines(host("a", parameters=SMALL), host("b", parameters=SMALL))
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert choice.samples == (64, 64)
    assert choice.exchange.kind == "allreduce"
    assert choice.partition_name == "none"
    assert 1.5 < choice.predicted["speedup"] < 2
    assert choice.nodes[1].strategy == "threads"  # the local strategy that won there


def test_four_to_one_shares_by_speed() -> None:
    found = machines(host("b", slower=4, parameters=SMALL), host("a", parameters=SMALL))
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert [node.host for node in choice.nodes] == ["a", "b"]
    fast, slow = choice.samples
    assert 5 < fast / slow < 8  # more than 4: the slow one's fixed time is four times as long too
    assert "so all are ready together" in explain_nodes(choice)


def test_a_machine_of_a_21st_of_the_speed_is_left_out() -> None:
    found = machines(host("a", parameters=SMALL), host("b", slower=21, parameters=SMALL))
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert [node.host for node in choice.nodes] == ["a"]
    assert "instead of 1,280" in choice.left_out["b"]
    assert "Left out: b" in explain_nodes(choice)


def test_a_slow_link_is_not_used() -> None:
    found = machines(host("a"), host("b"), megabits=100)
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert [node.host for node in choice.nodes] == ["a"]


def test_a_fast_link_and_large_layers_are_partitioned() -> None:
    found = machines(host("a"), host("b"), megabits=10_000)
    choice = choose_nodes(found)
    check_what_always_holds(choice, found)
    assert choice.partition_name == "feature"
    assert choice.partition == {"conv": "batch", "fc1": "feature", "fc2": "feature", "fc3": "batch"}
    assert "instead of 228" in explain_nodes(choice)
    without = choose_nodes(found, kinds=("allreduce", "ring"))
    assert without.partition_name == "none"
    assert without.predicted["images_per_second"] < choice.predicted["images_per_second"]


def test_what_is_not_exact_must_be_allowed() -> None:
    found = machines(*(host(name, parameters=SMALL) for name in "abcd"), megabits=100)
    assert choose_nodes(found).exchange.exact
    rare = choose_nodes(found, allow=("averaging",))
    assert rare.exchange.kind == "averaging"
    assert rare.predicted["images_per_second"] > choose_nodes(found).predicted["images_per_second"]


def test_memory_decides_where_it_must() -> None:
    """The whole model fits on no machine, its parts do."""
    roomy = machines(host("a", memory_mb=5000), host("b", memory_mb=5000), megabits=1000)
    assert len(choose_nodes(roomy).nodes) == 1
    tight = machines(host("a", memory_mb=700), host("b", memory_mb=700), megabits=1000)
    choice = choose_nodes(tight)
    assert choice.partition_name == "feature"
    assert choice.predicted["memory_mb"] <= 700
    alone = next(r for r in choice.rejected if r.option == "a alone")
    assert "more than is free" in alone.reason
    with pytest.raises(StrategyError, match="no way to train fits"):
        choose_nodes(machines(host("a", memory_mb=10)))


def test_many_machines_are_no_trouble() -> None:
    found = machines(*(host(f"n{i:02}", parameters=SMALL) for i in range(40)), megabits=10_000)
    choice = choose_nodes(found)
    assert 1 < len(choice.nodes) <= 40
    assert sum(choice.samples) == 128


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(ConfigError, match="no hosts"):
        choose_nodes(Machines())
    bare = dataclasses.replace(host("a"), layers=())
    with pytest.raises(ConfigError, match="no per-layer profile"):
        choose_nodes(machines(bare))
    bare = dataclasses.replace(host("a"), updates=())
    with pytest.raises(ConfigError, match="no times per update"):
        choose_nodes(machines(bare))
