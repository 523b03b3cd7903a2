"""Who trains with whom, on made-up machines that were measured."""

from __future__ import annotations

import dataclasses

import pytest
from cost_cases import host, machines

from paceline.errors import ConfigError, StrategyError
from paceline.plan.measured import choose, considered, everyone_of
from paceline.plan.prices import SAME, TERMS
from paceline.plan.together import trains_in_legs
from paceline.schema import Config, ExchangeSettings, Plan
from paceline.schema.machines import Machines

SMALL = 0.01
"""Of the weights: a model that exchanges quickly."""
WHOLE = Config(exchange=ExchangeSettings(partition="none"))


def check_what_always_holds(plan: Plan, lines: list[str], found: Machines) -> None:
    names = {node.host for node in plan.nodes}
    away = {each.option.removesuffix(" too") for each in plan.rejected if "too" in each.option}
    assert names | away == {host.name for host in found.hosts}
    assert max(node.share for node in plan.nodes) == 1
    assert len(lines) == 5
    terms = [plan.predicted[f"{term}_seconds"] for term in TERMS]
    assert sum(terms) == pytest.approx(plan.predicted["update_seconds"])
    for other in plan.rejected:
        if other.images_per_second and "more than is free" not in other.reason:
            assert "s per update" in other.reason
            best = plan.predicted["images_per_second"]
            assert other.images_per_second <= best * (1 + SAME) ** 2


def test_one_machine_trains_alone() -> None:
    found = machines(host("a"))
    plan, lines = choose(WHOLE, found)
    check_what_always_holds(plan, lines, found)
    assert [node.host for node in plan.nodes] == ["a"]
    assert plan.predicted["speedup"] == 1
    assert plan.predicted["bytes_per_update"] == 0
    assert "none is needed" in "\n".join(lines)


def test_equal_machines_share_equally() -> None:
    found = machines(host("a", parameters=SMALL), host("b", parameters=SMALL))
    plan, lines = choose(WHOLE, found)
    check_what_always_holds(plan, lines, found)
    assert "a takes 64, b takes 64: they are equally fast" in lines[1]
    assert (plan.exchange, plan.partition) == ("allreduce", "none")
    assert 1.5 < plan.predicted["speedup"] < 2
    assert plan.nodes[1].strategy == "threads"  # the local strategy that won there


def test_four_to_one_shares_by_speed() -> None:
    found = machines(host("b", slower=4, parameters=SMALL), host("a", parameters=SMALL))
    plan, lines = choose(WHOLE, found)
    check_what_always_holds(plan, lines, found)
    slow, fast = (node.share for node in plan.nodes)
    assert 5 < fast / slow < 8  # more than 4: the slow one's fixed time is four times as long too
    assert "so all are ready together" in lines[1]


def test_a_machine_of_a_21st_of_the_speed_is_left_out() -> None:
    found = machines(host("a", parameters=SMALL), host("b", slower=21, parameters=SMALL))
    plan, lines = choose(WHOLE, found)
    check_what_always_holds(plan, lines, found)
    assert [node.host for node in plan.nodes] == ["a"]
    assert "instead of 1,280" in lines[-1]
    assert lines[-1].startswith("Left out: b")


def test_a_slow_link_is_not_used() -> None:
    found = machines(host("a"), host("b"), megabits=100)
    plan, lines = choose(Config(), found)
    check_what_always_holds(plan, lines, found)
    assert [node.host for node in plan.nodes] == ["a"]


def test_a_fast_link_and_large_layers_are_split() -> None:
    found = machines(host("a"), host("b"), megabits=10_000)
    plan, lines = choose(Config(), found)
    check_what_always_holds(plan, lines, found)
    assert plan.partition == "feature"
    assert plan.feature_layers == ("fc1", "fc2")
    assert "fc1, fc2 are divided between machines" in lines[2]
    without, _ = choose(WHOLE, found)
    assert without.partition == "none"
    assert without.predicted["images_per_second"] < plan.predicted["images_per_second"]


def test_nothing_is_considered_that_a_training_does_not_try() -> None:
    """Every way is one of legs over these hosts; other exchanges are used when they are named."""
    found = machines(*(host(name, parameters=SMALL) for name in "abcd"), megabits=100)
    config = Config()
    everyone = everyone_of(config, found)
    assert trains_in_legs(config, everyone)
    kinds = {each.way.exchange.kind for each in considered(config, found, everyone, {})}
    assert kinds == {"allreduce", "ring", "reduce_broadcast"}
    asked = Config(exchange=ExchangeSettings(kind="averaging", every=16))
    plan, lines = choose(asked, found)
    assert not trains_in_legs(asked, plan)
    assert plan.exchange == "averaging"
    assert len(plan.nodes) == 4
    assert "averaging every 16" in lines[1]
    assert plan.predicted["update_seconds"] > 0


def test_memory_decides_where_it_must() -> None:
    """The whole model fits on no machine, its parts do."""
    roomy = machines(host("a", memory_mb=5000), host("b", memory_mb=5000), megabits=1000)
    assert len(choose(Config(), roomy)[0].nodes) == 1
    tight = machines(host("a", memory_mb=700), host("b", memory_mb=700), megabits=1000)
    plan, _ = choose(Config(), tight)
    assert plan.partition == "feature"
    assert plan.predicted["memory_mb"] <= 700
    alone = next(r for r in plan.rejected if r.option == "a alone")
    assert "more than is free" in alone.reason
    with pytest.raises(StrategyError, match="no way to train fits"):
        choose(Config(), machines(host("a", memory_mb=10)))


def test_large_buckets_where_every_message_is_slow() -> None:
    far = machines(host("a"), host("b"), megabits=100_000, latency=0.05)
    names = [each.name for each in considered(WHOLE, far, everyone_of(WHOLE, far), {})]
    assert "a and b, buckets of 100 MB" in names
    near = machines(host("a"), host("b"), megabits=1000)
    names = [each.name for each in considered(WHOLE, near, everyone_of(WHOLE, near), {})]
    assert not any("100 MB" in name for name in names)


def test_many_machines_are_no_trouble() -> None:
    found = machines(*(host(f"n{i:02}", parameters=SMALL) for i in range(40)), megabits=10_000)
    plan, _ = choose(WHOLE, found)
    assert 1 < len(plan.nodes) <= 40


def test_past_runs_have_their_say() -> None:
    found = machines(host("a", parameters=SMALL), host("b", parameters=SMALL))
    plain, _ = choose(WHOLE, found)
    assert len(plain.nodes) == 2
    # What one machine took longer, several take longer too.
    both, _ = choose(WHOLE, found, {"alone": 1.5})
    assert both.predicted["speedup"] == pytest.approx(plain.predicted["speedup"])
    # Where machines together were always far slower than predicted, one is chosen.
    slow = dict.fromkeys(("allreduce", "ring", "reduce_broadcast"), 5.0)
    assert len(choose(WHOLE, found, slow)[0].nodes) == 1


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(ConfigError, match="no hosts"):
        choose(WHOLE, Machines())
    bare = dataclasses.replace(host("a"), layers=())
    with pytest.raises(ConfigError, match="no per-layer profile"):
        choose(WHOLE, machines(bare))
    bare = dataclasses.replace(host("a"), updates=())
    with pytest.raises(ConfigError, match="no times per update"):
        choose(WHOLE, machines(bare))
