"""The time of a step: formulas by hand, and what must always hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
from cost_cases import (
    alexnet_like,
    chains,
    exchanges,
    host,
    machines,
    member,
    models,
    synchronous,
    teams,
    wires,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.cost.compute import update_curve
from paceline.cost.exchanges import ExchangeCost, agreement_bytes, agreement_seconds, server_bytes
from paceline.cost.memory import Footprint, spread_mb
from paceline.cost.model import LayerCost, ModelCost, host_model, model_cost
from paceline.cost.overlap import BucketCost, buckets, exposed_seconds
from paceline.cost.split import Division, best_split, step_bytes
from paceline.cost.step import (
    TeamMember,
    handling_seconds,
    held_part,
    optimizer_seconds,
    step_cost,
)
from paceline.cost.transfer import (
    Wire,
    allreduce_seconds,
    described_link,
    fitted,
    slowest_wire,
    wire,
)
from paceline.errors import ConfigError, UnsupportedError
from paceline.schema import NodePlan
from paceline.schema.machines import (
    AllReduceCurve,
    CurvePoint,
    Layer,
    LinearLayer,
    Link,
    WorkloadFacts,
    exactly,
)

GIGABIT = Wire(latency=2e-4, bandwidth=125e6, both=125e6, message=0.0)


@given(teams, wires, models, exchanges, st.integers(1, 500), st.floats(1.0, 1e3))
@settings(max_examples=150, deadline=None)
def test_more_bandwidth_is_never_slower(
    team: list[TeamMember],
    wire: Wire,
    model: ModelCost,
    exchange: ExchangeCost,
    batch: int,
    times: float,
) -> None:
    slow = step_cost(team, wire, model, exchange, batch).seconds
    wider = dataclasses.replace(wire, bandwidth=times * wire.bandwidth, both=times * wire.both)
    fast = step_cost(team, wider, model, exchange, batch).seconds
    assert fast <= slow * (1 + 1e-9)


@given(teams, wires, models, synchronous, st.integers(1, 500), st.floats(0, 1.0))
@settings(max_examples=100, deadline=None)
def test_more_latency_is_never_faster(
    team: list[TeamMember],
    wire: Wire,
    model: ModelCost,
    exchange: ExchangeCost,
    batch: int,
    more: float,
) -> None:
    far = dataclasses.replace(wire, latency=wire.latency + more)
    near = step_cost(team, wire, model, exchange, batch).seconds
    assert step_cost(team, far, model, exchange, batch).seconds >= near * (1 - 1e-9)


@given(wires, models, exchanges, st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_one_node_does_not_communicate(
    wire: Wire, model: ModelCost, exchange: ExchangeCost, batch: int
) -> None:
    assume(not (exchange.kind == "parameter_server" and exchange.dedicated))
    curve = update_curve([(16, 0.1), (64, 0.3)])
    cost = step_cost([member(curve, 1)], wire, model, exchange, batch)
    assert cost.communication == cost.exposed == cost.bytes_sent == cost.waiting == 0
    assert cost.seconds == pytest.approx(curve.seconds(batch))


@given(teams, wires, models, exchanges, st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_terms_are_never_negative_and_what_is_exposed_was_communicated(
    team: list[TeamMember], wire: Wire, model: ModelCost, exchange: ExchangeCost, batch: int
) -> None:
    cost = step_cost(team, wire, model, exchange, batch)
    for term in (cost.compute, cost.exposed, cost.waiting, cost.data, cost.bytes_sent):
        assert term >= -1e-12
    if not exchange.asynchronous:
        assert cost.exposed <= cost.communication * (1 + 1e-9) + 1e-12


def lane_end(waiting: Sequence[BucketCost], seconds: Callable[[float], float]) -> float:
    """When one network lane has carried all buckets, in order.

    end_k = max(end_k-1, ready_k) + seconds(size_k)
    """
    end = 0.0
    for bucket in waiting:
        end = max(end, bucket.ready) + seconds(bucket.size)
    return end


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 10)), max_size=8),
    st.floats(0, 20),
    st.floats(1, 5),
    st.floats(0, 1),
)
def test_hindrance_only_adds_and_never_more_than_taking_turns(
    layers: list[tuple[float, float]], longer: float, slowdown: float, part: float
) -> None:
    waiting = buckets(layers, size=5.0)
    backward = sum(seconds for seconds, _ in layers) + longer
    free = exposed_seconds(waiting, backward, lambda size: size)
    hindered = exposed_seconds(
        waiting, backward, lambda size: size, slowdown=slowdown, taken=part / slowdown
    )
    assert free == pytest.approx(max(0.0, lane_end(waiting, lambda size: size) - backward))
    assert free - 1e-9 <= hindered <= sum(size for _, size in layers) + 1e-9


def test_servers_handle_what_they_get() -> None:
    model = dataclasses.replace(model_cost([LayerCost(parameter_bytes=100e6)]), optimizer_slots=1)
    assert optimizer_seconds(model, 10e9) == pytest.approx(0.05)
    team = [TeamMember(update_curve([(32, 0.6), (64, 1.0)]), 2, copying=10e9)]
    served = ExchangeCost(kind="parameter_server")
    slow = TeamMember(update_curve([(64, 4.0)]), copying=2e9)
    # a worker 40 ms; the server adds one gradient (150 ms), copies once (100), updates (250)
    assert handling_seconds(team, slow, model, served, 2) == pytest.approx(0.54)
    without = step_cost(team, GIGABIT, model, served, 64)
    cost = step_cost(team, GIGABIT, model, served, 64, serving=slow)
    assert cost.exposed - without.exposed == pytest.approx(0.54)
    assert cost.compute == pytest.approx(0.6 - 0.05)  # the optimizer is the server's


def test_pushing_hides_under_backward_and_pulling_does_not() -> None:
    """Backward of the second layer, 0.4 s, hides the first one's push; nothing hides the rest."""
    layer = LayerCost(parameter_bytes=12.5e6, forward=0.1, backward=0.4)
    model = model_cost([layer, layer])
    team = [member(update_curve([(16, 0.5), (32, 1.0)]), 2)]
    cost = step_cost(team, GIGABIT, model, ExchangeCost(kind="parameter_server"), 64)
    one_push = 2e-4 + 2 * 12.5e6 / 125e6  # both workers' bytes pass the server's link
    assert cost.communication == pytest.approx(2 * one_push + 2e-4 + 4 * 12.5e6 / 125e6)
    assert cost.exposed == pytest.approx(one_push + 2e-4 + 4 * 12.5e6 / 125e6)


def test_alexnet_over_two_nodes_by_hand() -> None:
    """2 (N-1)/N of all weights against 10 MB of convolutions and the activations of 32."""
    model = alexnet_like()
    division = Division(parts=(16, 16), shares=(1.0, 1.0))
    split = best_split(chains(), division)
    assert split is not None
    assert split.layers == ("fc1", "fc2")
    # gather 36,864 before fc1 and scatter 16,384 after fc2, forward and backward, half each
    assert split.moved == 32 * (36_864 + 16_384)
    assert split.changes == 2
    team = [member(update_curve([(16, 0.8), (32, 1.6)]), 2)]
    plain = step_cost(team, GIGABIT, model, ExchangeCost(), 32)
    parted = step_cost(team, GIGABIT, model, ExchangeCost(split=split), 32)
    assert plain.bytes_sent == pytest.approx(228.05e6)
    # the bias of fc2, whose outputs are summed, is on both nodes
    assert parted.bytes_sent == pytest.approx(10.05e6 + 1.704e6, rel=3e-3)
    assert parted.seconds < plain.seconds
    assert held_part(model, split) == pytest.approx((10.05 + 109) / 228.05, rel=1e-3)
    assert held_part(model, None) == 1.0


def test_what_is_split_is_priced_as_it_is_run() -> None:
    """The bytes that a plan promises are those that the layers' own arithmetic gives."""
    division = Division(parts=(16, 16), shares=(1.0, 1.0))
    split = best_split(chains(), division)
    assert split is not None
    model = model_cost(
        [LayerCost(name=each.name, parameter_bytes=4.0 * each.parameters) for each in chains()[0]]
    )
    team = [member(update_curve([(16, 0.8)]), 2)]
    cost = step_cost(team, GIGABIT, model, ExchangeCost(split=split), 32)
    assert cost.bytes_sent == pytest.approx(max(step_bytes(split.chains, division)))


def test_batch_norm_adds_up_over_all_nodes() -> None:
    """Sums and squares of 64 channels, forward and backward, before anything else can go on."""
    plain = LayerCost(kind="BatchNorm2d", parameter_bytes=512.0)
    team = [member(update_curve([(32, 1.0)]), 2)]
    local = step_cost(team, GIGABIT, model_cost([plain]), ExchangeCost(), 64)
    whole = model_cost([dataclasses.replace(plain, sum_bytes=512.0)])
    cost = step_cost(team, GIGABIT, whole, ExchangeCost(), 64)
    assert cost.exposed - local.exposed == pytest.approx(2 * allreduce_seconds(GIGABIT, 512, 2))
    assert cost.bytes_sent - local.bytes_sent == 2 * 512
    layers = (Layer(name="norm", kind="BatchNorm2d", parameter_bytes=512),)
    measured = dataclasses.replace(host(), layers=layers)
    assert host_model(measured, WorkloadFacts()).layers[0].sum_bytes == 512
    assert host_model(measured, WorkloadFacts(local_batch_norm=True)).layers[0].sum_bytes == 0


def test_exchanges_by_hand() -> None:
    size, nodes = 100e6, 4
    ring = 2 * 3 / 4 * size
    assert agreement_bytes(ExchangeCost(), size, nodes) == ring
    assert agreement_bytes(ExchangeCost(kind="ring"), size, nodes) == ring
    assert allreduce_seconds(GIGABIT, size, nodes) == pytest.approx(4e-4 + ring / 125e6)
    assert allreduce_seconds(GIGABIT, size, nodes, "ring") == pytest.approx(12e-4 + ring / 125e6)
    star = ExchangeCost(kind="reduce_broadcast")
    through_the_first = 4e-4 + 3 * (size + 2**20) / 125e6
    assert agreement_seconds(star, GIGABIT, size, nodes) == pytest.approx(through_the_first)
    assert agreement_bytes(star, size, nodes) == 3 * size
    apart = ExchangeCost(kind="parameter_server", servers=2, dedicated=True)
    assert server_bytes(apart, size, 8) == 4 * size
    assert server_bytes(apart, size, 1) == size
    beside = ExchangeCost(kind="parameter_server", servers=nodes, dedicated=False)
    assert 2 * server_bytes(beside, size, nodes) == ring
    rare = ExchangeCost(kind="averaging", every=10)
    team = [member(update_curve([(64, 1.0)]), nodes)]
    often = step_cost(team, GIGABIT, alexnet_like(), ExchangeCost(kind="averaging"), 64)
    seldom = step_cost(team, GIGABIT, alexnet_like(), rare, 64)
    assert seldom.exposed == pytest.approx(often.exposed / 10)


@given(st.integers(2, 2000), st.integers(1, 50))
def test_server_links_grow_with_workers(workers: int, servers: int) -> None:
    for dedicated in (True, False):
        few = ExchangeCost(kind="parameter_server", servers=servers, dedicated=dedicated)
        assert server_bytes(few, 1.0, workers) <= server_bytes(few, 1.0, workers + 1) + 1e-9


def test_buckets_hide_under_backward() -> None:
    def seconds(size: float) -> float:
        return size / 10

    waiting = [BucketCost(10, 1.0), BucketCost(20, 4.0)]
    assert lane_end(waiting, seconds) == 6.0
    assert exposed_seconds(waiting, 4.0, seconds) == 2.0
    assert exposed_seconds(waiting, 9.0, seconds) == 0.0
    # 3 s under way take half of the cores: backward ends 1.5 s later
    assert exposed_seconds(waiting, 9.0, seconds, taken=0.5) == pytest.approx(1.5)
    # the second bucket has 1 s of backward beside it: half of its 2 s are left then, and hidden
    assert exposed_seconds(waiting, 5.0, seconds, slowdown=2.0) == pytest.approx(1.5)
    # taking turns is the worst there is
    assert exposed_seconds(waiting, 4.0, seconds, taken=1.0) == pytest.approx(3.0)
    assert buckets([(1.0, 0.0)]) == []


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e8)), max_size=20))
def test_buckets_lose_nothing(layers: list[tuple[float, float]]) -> None:
    found = buckets(layers)
    assert sum(b.size for b in found) == pytest.approx(sum(size for _, size in layers))
    assert [b.ready for b in found] == sorted(b.ready for b in found)


def test_waiting_for_the_slowest_and_for_data() -> None:
    fast, slow = update_curve([(64, 1.0)]), update_curve([(64, 1e6)])
    team = [TeamMember(fast, 1), TeamMember(slow, 1)]
    model = model_cost([LayerCost(parameter_bytes=4.0)])
    cost = step_cost(team, GIGABIT, model, ExchangeCost(), 64)
    assert {p.samples for p in cost.portions} == {0, 64}
    assert cost.waiting == pytest.approx(0.5)  # the mean of 1 s and nothing
    noisy = step_cost([TeamMember(fast, 8, deviation=0.1)], GIGABIT, model, ExchangeCost(), 64)
    calm = step_cost([TeamMember(fast, 8)], GIGABIT, model, ExchangeCost(), 64)
    assert noisy.waiting > calm.waiting
    team = [TeamMember(fast, 8, deviation=0.1)]
    layer = LinearLayer(name="fc", inputs=1000, outputs=1000)
    division = Division(parts=(8,) * 8, shares=(1.0,) * 8)
    split = best_split([(layer, layer)], division, split=frozenset({"fc"}))
    assert split is not None
    # twice before and after a layer, forward and backward, and once at the end
    parted = step_cost(team, GIGABIT, model, ExchangeCost(split=split), 64)
    whole = step_cost(team, GIGABIT, model, ExchangeCost(), 64)
    assert parted.waiting == pytest.approx(math.sqrt(1 + 2 * split.changes) * whole.waiting)
    starved = step_cost([TeamMember(fast, 2, feed=8.0)], GIGABIT, model, ExchangeCost(), 64)
    assert starved.seconds == pytest.approx(4.0)
    assert starved.data == pytest.approx(4.0 - starved.compute - starved.exposed)


def test_asynchronous_workers_are_limited_by_the_servers_links() -> None:
    model = model_cost([LayerCost(parameter_bytes=125e6)])
    free = Wire(latency=0.0, bandwidth=125e6, both=125e6, message=0.0)
    curve = update_curve([(1, 1.0)])
    apart = ExchangeCost(kind="parameter_server", asynchronous=True, dedicated=True)
    one_each = [step_cost([TeamMember(curve, n)], free, model, apart, n) for n in (2, 30, 4096)]
    # a cycle is 1 s of computing and 1 s each way, and more where messages meet
    assert 0.5 < one_each[0].images_per_second < 2 / 3
    # the server takes one push per second, however many workers there are
    assert [c.images_per_second for c in one_each[1:]] == pytest.approx([1.0, 1.0], rel=0.05)
    assert [c.staleness for c in one_each] == [1, 29, 4095]


def test_a_wire_from_links_and_curves() -> None:
    joined = machines(host("a"), host("b"), host("c"), megabits=800)
    found = slowest_wire(joined, ["a", "b", "c"])
    assert found.bandwidth == 100e6
    assert slowest_wire(joined, ["a"]).bandwidth == math.inf
    true = Wire(latency=1e-4, bandwidth=50e6, both=50e6, message=3e-4)
    curve = AllReduceCurve(
        backend="mpi4py",
        hosts=("a", "b"),
        points=tuple(
            CurvePoint(bytes=n, seconds=exactly(allreduce_seconds(true, n, 2)))
            for n in (1024, 65536, 4 * 2**20, 2**26)
        ),
    )
    seen = fitted(dataclasses.replace(found, latency=1e-4), curve)
    for size, nodes in ((1000, 2), (1e6, 2), (1e8, 2)):
        assert allreduce_seconds(seen, size, nodes) == pytest.approx(
            allreduce_seconds(true, size, nodes), rel=1e-6
        )
    known = dataclasses.replace(joined, curves=(curve,))
    assert slowest_wire(known, ["a", "b"]).both == pytest.approx(50e6)
    with pytest.raises(ConfigError, match="no link between 'a' and 'b'"):
        slowest_wire(dataclasses.replace(joined, links=()), ["a", "b"])


@pytest.mark.parametrize("disturbed", range(6))
def test_one_disturbed_size_does_not_change_the_rate(disturbed: int) -> None:
    true = Wire(latency=1e-4, bandwidth=35e6, both=35e6, message=3e-4)
    sizes = (1024, 16384, 131072, 2**20, 2**22, 2**24)
    times = [allreduce_seconds(true, size, 4) for size in sizes]
    times[disturbed] = 1.25 * times[disturbed] + 0.002
    points = tuple(
        CurvePoint(bytes=size, seconds=exactly(time))
        for size, time in zip(sizes, times, strict=True)
    )
    curve = AllReduceCurve(backend="gloo", hosts=("a", "b", "c", "d"), points=points)
    assert fitted(true, curve).both == pytest.approx(35e6, rel=0.02)


def test_a_link_carries_one_way_what_it_carries_both_ways() -> None:
    slow, fast = exactly(25e6), exactly(35e6)
    found = wire(Link(latency=exactly(1e-4), forward=fast, backward=slow, both=fast))
    assert (found.bandwidth, found.both) == (35e6, 35e6)
    half = wire(Link(latency=exactly(1e-4), forward=fast, backward=fast, both=slow))
    assert (half.bandwidth, half.both) == (35e6, 25e6)


def test_a_described_link_is_slower_than_its_name() -> None:
    link = described_link(1e9, 2e-4)
    assert link.forward.samples == 0
    slow, usual, fast = (wire(link, level) for level in ("low", "median", "high"))
    assert slow.bandwidth < usual.bandwidth < fast.bandwidth < 125e6


def test_memory_of_a_node_among_others() -> None:
    footprint = Footprint(parameter_mb=200.0, activation_mb=1.0, optimizer_slots=2)
    node = NodePlan(strategy="threads", threads=2)
    whole = spread_mb(footprint, node, samples=32)
    assert spread_mb(footprint, node, samples=32, held=0.5) == whole - 100 * 4
    assert spread_mb(footprint, node, samples=16) == whole - 16 * 3
    assert spread_mb(footprint, node, samples=32, server_part=0.5) == whole + 100 * 4


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="at least 1"):
        ExchangeCost(kind="averaging", every=0)
    split = best_split(chains(), Division(parts=(16, 16), shares=(1.0, 1.0)))
    with pytest.raises(UnsupportedError, match="sums gradients"):
        ExchangeCost(kind="averaging", split=split)
    with pytest.raises(UnsupportedError, match="is not one of"):
        ExchangeCost(kind="pipeline")  # type: ignore[arg-type]
    assert host_model(host(), WorkloadFacts()).backward_part == pytest.approx(
        alexnet_like().backward_part
    )
