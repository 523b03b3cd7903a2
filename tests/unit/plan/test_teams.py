"""Which nodes train together, and what is expected of it, from figures that are made up."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import LayerCost, model_cost
from paceline.cost.transfer import Wire
from paceline.plan.pilot import Knowledge, expected, next_leg
from paceline.plan.teams import (
    Manner,
    TeamKnowledge,
    Way,
    at_speed,
    going_on,
    labels,
    members_of,
    options_over,
    plan_of_way,
    rate_between,
    seconds_of_way,
    setup_of_way,
    team_name,
    teams,
    ways,
)
from paceline.schema import Config, ExchangeSettings, NodePlan, Numerics, Plan
from paceline.schema.legs import Leg
from paceline.schema.machines import LinearLayer
from paceline.training.shares import fairer_shares

ABC = Plan(nodes=tuple(NodePlan(host=name) for name in "abc"), batch_size=300)
FC = LinearLayer(name="fc", inputs=500, outputs=500, bias=False)
MODEL = model_cost([LayerCost(name="fc", parameter_bytes=1e6)])


def wire(rate: float) -> Wire:
    return Wire(latency=0.0, bandwidth=rate, both=rate, message=0.0)


SEEN = TeamKnowledge(
    nodes=(at_speed(100.0),) * 3, wire=wire(1e6), model=MODEL, batch=300, state=3e6, setup=0.5
)


def names(config: Config, everyone: Plan = ABC, speeds: tuple[float, ...] = ()) -> list[str]:
    seen = SEEN
    if speeds:
        seen = dataclasses.replace(SEEN, nodes=tuple(map(at_speed, speeds)))
    return [o.name for o, _, _ in options_over(config, everyone, seen, images=False)]


def test_the_simplest_is_the_first_node_alone() -> None:
    found = names(Config())
    assert found[0] == "a alone"
    assert set(found) == {
        "a alone", "a and b", "a and b, ring", "a and b, reduce_broadcast",
        "a, b and c", "a, b and c, ring", "a, b and c, reduce_broadcast",
    }  # fmt: skip
    assert found.index("a and b, ring") < found.index("a, b and c")


def test_what_was_asked_for_by_name_is_not_explored() -> None:
    ring = Config(exchange=ExchangeSettings(kind="ring"))
    assert names(ring) == ["a alone", "a and b, ring", "a, b and c, ring"]
    assert names(ring, speeds=(1.0, 1.0, 5.0)) == ["a alone", "a and c, ring", "a, b and c, ring"]
    layout = Config(numerics=Numerics(memory_format="channels_last"))
    assert names(layout)[0] == "a alone, channels_last"


def test_numerics_that_change_results_are_options_only_when_allowed() -> None:
    assert not any("bf16" in name for name in names(Config()))
    assert "a alone, bf16" in names(Config(numerics=Numerics(allow=("bf16",))))


def test_a_host_with_a_share_of_0_is_in_no_team() -> None:
    assert teams([1.0, 2.0, 3.0], [1.0, 0.0, 1.0]) == [(0,), (0, 2)]


def test_of_many_nodes_few_teams_are_considered() -> None:
    found = teams([1.0] * 100, [1.0] * 100)
    assert len(found) <= 6
    assert {len(members) for members in found} >= {1, 99, 100}


def test_split_layers_are_a_way_of_the_teams_that_have_them() -> None:
    seen = dataclasses.replace(SEEN, chains=((FC,),), batch=30)
    found = {way.name: way for way in ways(Config(), ABC, seen)}
    assert found["a, b and c, split layers"].layers == ("fc",)
    by_hand = Config(exchange=ExchangeSettings(partition="manual", layers=("fc",)))
    only = [way.name for way in ways(by_hand, ABC, seen)]
    assert only == ["a alone", "a and b, split layers", "a, b and c, split layers"]
    # One that has a feature for two nodes, not for three.
    narrow = dataclasses.replace(FC, outputs=2, inputs=2)
    seen = dataclasses.replace(seen, chains=((narrow,),))
    assert [way.name for way in ways(by_hand, ABC, seen)] == ["a alone", "a and b, split layers"]


def test_seconds_are_computing_and_what_it_does_not_hide() -> None:
    layers = [LayerCost(name=name, parameter_bytes=5e5, forward=1, backward=2) for name in "xy"]
    seen = dataclasses.replace(SEEN, model=model_cost(layers))
    alone, all_three = Way(members=(0,)), Way(members=(0, 1, 2))
    assert seconds_of_way(alone, seen) == pytest.approx(3.0)
    # Both layers fit into one bucket, which leaves at the end: 4/3 MB at 1 MB/s.
    assert seconds_of_way(all_three, seen) == pytest.approx(1 + 4 / 3)
    # Twice as large they leave one by one: the first beside the backward pass of the second.
    large = [dataclasses.replace(each, parameter_bytes=2e6) for each in layers]
    seen = dataclasses.replace(seen, model=model_cost(large))
    assert seconds_of_way(all_three, seen) == pytest.approx(1 + 2 * 8 / 3 - 1 / 3)
    fast = dataclasses.replace(seen, wire=wire(1e12))
    assert seconds_of_way(all_three, fast) == pytest.approx(1.0, rel=1e-4)
    # The proof's updates, and three megabytes of state.
    assert setup_of_way(all_three, fast) == pytest.approx(1 + 3 * 1.0, rel=1e-3)
    assert setup_of_way(alone, seen) == 0.5


def test_what_a_leg_took_tells_what_the_network_carries() -> None:
    all_three = Way(members=(0, 1, 2))
    for rate in (1e5, 1e6, 1e7):
        there = dataclasses.replace(SEEN, wire=wire(rate))
        took = seconds_of_way(all_three, there)
        assert rate_between(all_three, SEEN, took) == pytest.approx(rate, rel=0.02)


def decide(rate: float, updates: int = 2000) -> str:
    """What is tried after a first leg alone, over this network."""
    seen = dataclasses.replace(SEEN, wire=wire(rate))
    options = [o for o, _, _ in options_over(Config(), ABC, seen, images=False)]
    timed = {"update_seconds": 3.0, "error": 0.0, "best": "a alone", "plan": ABC}
    legs = (
        Leg(name="a alone", first=0, updates=4, role="first", seconds=12.0, **timed),
        Leg(name="a alone", first=4, updates=4, role="keep", seconds=12.0, **timed),
    )
    known = Knowledge(options=options, updates=updates, legs=legs, position=8, elapsed=24.0)
    return next_leg(known).name


def test_the_pilot_tries_all_hosts_where_the_network_carries_it() -> None:
    assert decide(rate=1e7) == "a, b and c"


def test_the_pilot_leaves_hosts_out_where_the_network_would_make_them_slower() -> None:
    assert decide(rate=1e5) == "a alone"


def test_a_short_training_stays_where_it_began() -> None:
    assert decide(rate=1e7, updates=12) == "a alone"


def test_what_was_timed_replaces_what_was_expected() -> None:
    seen = dataclasses.replace(SEEN, wire=wire(1e9), measured={"a, b and c": 6.0})
    options = [o for o, _, _ in options_over(Config(), ABC, seen, images=False)]
    known = Knowledge(options=options, updates=100)
    slow = next(option for option in options if option.name == "a, b and c")
    assert expected(known, slow, "a alone") == pytest.approx(2.0)


def test_what_one_way_took_longer_than_its_price_the_others_will_too() -> None:
    """Exchanges of the same price are not worth a trial because the tried one was dearer."""
    plain = options_over(Config(), ABC, SEEN, images=False)
    price = next(
        option.factors["a, b and c"] for option, _, _ in plain if option.name == "a, b and c"
    )
    seen = dataclasses.replace(SEEN, measured={"a, b and c": 1.5 * price})
    found = {
        option.name: option.factors
        for option, _, _ in options_over(Config(), ABC, seen, images=False)
    }
    before = {option.name: option.factors for option, _, _ in plain}
    ring, other = "a, b and c, ring", "a and b, ring"
    assert found[ring][ring] == pytest.approx(1.5 * before[ring][ring])
    assert found[other] == before[other]  # of other nodes it says nothing


def test_the_plan_of_a_way_has_its_nodes_and_shares_by_speed() -> None:
    way = Way(members=(0, 2), exchange=ExchangeCost(kind="ring"))
    plan = plan_of_way(ABC, way, Manner(), speeds=[1.0, 5.0, 3.0])
    assert [(node.host, node.share) for node in plan.nodes] == [("a", 1 / 3), ("c", 1.0)]
    assert (plan.exchange, plan.batch_size) == ("ring", 300)
    assert members_of(ABC, plan) == (0, 2)


def test_a_plan_of_hosts_that_are_not_there_has_no_members() -> None:
    other = Plan(nodes=(NodePlan(host="a"), NodePlan(host="z")))
    assert members_of(ABC, other) is None
    assert members_of(ABC, Plan(nodes=(NodePlan(host="b"),))) == (1,)


def test_slots_of_one_host_have_names_of_their_own() -> None:
    nodes = [NodePlan(host="a", cores=(0,)), NodePlan(host="a", cores=(1,)), NodePlan(host="b")]
    plan = Plan(nodes=tuple(nodes))
    assert labels(plan) == ["a-0", "a-1", "b"]
    assert team_name(plan, (0, 1)) == "a-0 and a-1"
    assert members_of(plan, Plan(nodes=(nodes[0], nodes[1]))) == (0, 1)


def test_many_hosts_are_counted_not_listed() -> None:
    plan = Plan(nodes=tuple(NodePlan(host=f"h{n}") for n in range(8)))
    assert team_name(plan, range(6)) == "6 of 8 hosts"


def test_a_throttled_host_gets_fewer_samples_within_a_few_updates() -> None:
    """A host at a quarter of its speed in the middle of an epoch."""
    balanced = [[1.0, 1.02], [1.01, 0.99]] * 20
    assert fairer_shares([0.5, 0.5], balanced) is None
    throttled = [*balanced, *([[1.0, 4.0]] * 5)]
    assert fairer_shares([0.5, 0.5], throttled) == pytest.approx([0.8, 0.2])
    # Three hitches in a row are none.
    assert fairer_shares([0.5, 0.5], [*balanced, *([[1.0, 4.0]] * 3)]) is None


def test_a_node_without_a_share_stays_without() -> None:
    found = fairer_shares([0.5, 0.0, 0.5], [[1.0, 0.0, 3.0]] * 8)
    assert found == pytest.approx([0.75, 0.0, 0.25])


def cored(*cores: int) -> Plan:
    """Hosts a, b, ... with so many cores each."""
    nodes = [
        NodePlan(host=name, strategy="threads", threads=count)
        for name, count in zip("abcd", cores, strict=False)
    ]
    return Plan(nodes=tuple(nodes), batch_size=300)


def test_nodes_may_use_their_cores_as_on_one_machine() -> None:
    everyone = cored(2, 2, 2)
    found = options_over(Config(), everyone, SEEN, images=False, divisible=True)
    options = {option.name: option for option, _, _ in found}
    inside = options["a, b and c, ring, processes 2x1"]
    assert inside.ranks == 2
    assert inside.factors["processes 2x1"] < 1
    assert options["a and b, replicas 2x1"].ranks == 0
    way, manner = next((w, m) for o, w, m in found if o.name == "a and b, processes 2x1")
    plan = plan_of_way(everyone, way, manner, speeds=[1.0, 1.0, 1.0])
    assert [(node.host, node.ranks, node.threads) for node in plan.nodes] == [
        ("a", 2, 1),
        ("b", 2, 1),
    ]


def test_hosts_with_unlike_cores_have_workers_of_as_many_threads() -> None:
    everyone = cored(1, 4, 8)
    found = options_over(Config(), everyone, SEEN, images=False, divisible=True)
    name = "a, b and c, processes of 2 threads"
    way, manner = next((w, m) for o, w, m in found if o.name == name)
    plan = plan_of_way(everyone, way, manner, speeds=[1.0, 1.0, 1.0])
    assert [(node.strategy, node.ranks) for node in plan.nodes] == [
        ("threads", 1),
        ("processes", 2),
        ("processes", 4),
    ]


def test_what_past_trainings_taught_of_a_manner_replaces_hope() -> None:
    found = options_over(
        Config(), cored(2, 2, 2), SEEN, images=False, divisible=True,
        learned={"processes 2x1": 0.4},
    )  # fmt: skip
    option = next(o for o, _, _ in found if o.name == "a alone, processes 2x1")
    assert option.factors["processes 2x1"] == 0.4
    assert not any(
        o.ranks for o, _, _ in options_over(Config(), cored(2, 2, 2), SEEN, images=False)
    )


ABCD = Plan(nodes=tuple(NodePlan(host=name) for name in "abcd"), batch_size=300)


def goes_on(
    mine: str, lost: set[int], speeds: tuple[float, ...], left: int = 1000, **known: object
) -> str:
    """What goes on when nodes of `mine` are lost from a network that costs next to nothing."""
    nodes = tuple(map(at_speed, speeds))
    seen = dataclasses.replace(SEEN, nodes=nodes, wire=wire(1e9), **known)
    before = {way.name: way for way in ways(Config(), ABCD, seen)}
    left_over = tuple(
        dataclasses.replace(node, share=0.0 if number in lost else 1.0)
        for number, node in enumerate(ABCD.nodes)
    )
    every = ways(Config(), dataclasses.replace(ABCD, nodes=left_over), seen)
    # Those that were tried stay options, as far as their nodes are there.
    names = {way.name for way in every}
    every += [w for w in before.values() if w.name not in names and not lost & set(w.members)]
    found = going_on(before[mine], lost, every, seen, left)
    assert found is not None
    return found.name


def test_after_a_loss_the_others_go_on() -> None:
    even = (100.0,) * 4
    assert goes_on("a, b, c and d", {2}, even) == "a, b and d"
    assert goes_on("a, b, c and d, ring", {2}, even) == "a, b and d, ring"
    assert goes_on("a and b", {1}, (100.0, 110.0, 1.0, 1.0)) == "a alone"
    assert goes_on("a and b", {3}, even) == "a and b"  # one that trained elsewhere was lost


def test_after_a_loss_the_best_team_by_what_is_known_goes_on_at_once() -> None:
    """Of b it is known that it is slow: shares and teams go by that, nothing is tried for it."""
    throttled = (100.0, 30.0, 100.0, 100.0)
    assert goes_on("a, b, c and d", {2}, throttled) == "a, b and d"
    # Timed before: with b it took far longer than the others by themselves.
    timed = {"a, b and d": 3.0, "a and d": 1.6}
    assert goes_on("a, b, c and d", {2}, throttled, measured=timed) == "a and d"
    # Two are left of a team that is none of the fastest: the fastest, not the first node alone.
    assert goes_on("a, b, c and d", {2, 3}, throttled) == "a and b"


def test_after_a_loss_another_team_must_pay_for_taking_over() -> None:
    timed = {"a, b and d": 3.0, "a and d": 1.6}
    speeds = (100.0, 30.0, 100.0, 100.0)
    assert goes_on("a, b, c and d", {2}, speeds, left=1, measured=timed) == "a, b and d"
    close = {"a, b and d": 1.7, "a and d": 1.6}
    assert goes_on("a, b, c and d", {2}, speeds, measured=close) == "a, b and d"


def test_an_exchange_that_was_never_timed_waits_for_a_trial() -> None:
    even = (100.0,) * 4
    timed = {"a, b and d": 3.0}
    assert goes_on("a, b, c and d", {2}, even, measured=timed) != "a, b and d, ring"
    timed |= {"a, b and d, ring": 1.0}
    assert goes_on("a, b, c and d", {2}, even, measured=timed) == "a, b and d, ring"
