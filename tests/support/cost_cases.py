"""Made-up machines and models, and strategies that draw them."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.cost.compute import UpdateCurve, update_curve
from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import LayerCost, ModelCost, model_cost
from paceline.cost.step import TeamMember
from paceline.cost.transfer import Wire
from paceline.schema import NodePlan
from paceline.schema.machines import (
    Layer,
    LinearLayer,
    Link,
    Machines,
    Measured,
    MeasuredHost,
    UpdateTime,
    WorkloadFacts,
    exactly,
)

MEGABYTE = 1e6


def figure(value: float, spread: float = 0.0) -> Measured:
    return Measured(
        median=value, low=value * (1 - spread / 2), high=value * (1 + spread / 2), samples=9
    )


def alexnet_like() -> ModelCost:
    """Few weights with most of the time, then many weights with little of it."""
    return model_cost(
        [
            LayerCost(
                name="conv", kind="Conv2d", forward=0.30, backward=0.50,
                parameter_bytes=10 * MEGABYTE, output_bytes=36_864,
            ),
            LayerCost(
                name="fc1", kind="Linear", forward=0.05, backward=0.06,
                parameter_bytes=151 * MEGABYTE, output_bytes=16_384,
            ),
            LayerCost(
                name="relu", kind="ReLU", forward=0.005, backward=0.005,
                output_bytes=16_384,
            ),
            LayerCost(
                name="fc2", kind="Linear", forward=0.03, backward=0.04,
                parameter_bytes=67 * MEGABYTE, output_bytes=16_384,
            ),
            LayerCost(
                name="fc3", kind="Linear", forward=0.005, backward=0.005,
                parameter_bytes=0.05 * MEGABYTE, output_bytes=12,
            ),
        ]
    )  # fmt: skip


def chains(parameters: float = 1.0) -> tuple[tuple[LinearLayer, ...], ...]:
    """The linear layers of `alexnet_like`, with a part of their weights."""
    sizes = (("fc1", 9216, 4096), ("fc2", 4096, 4096), ("fc3", 4096, 3))
    part = parameters**0.5
    return (
        tuple(
            LinearLayer(name=name, inputs=max(3, int(part * i)), outputs=max(3, int(part * o)))
            for name, i, o in sizes
        ),
    )


def host(
    name: str = "a",
    *,
    slower: float = 1.0,
    spread: float = 0.0,
    memory_mb: float = 0.0,
    parameters: float = 1.0,
) -> MeasuredHost:
    """100 ms per update of 128 samples, 10 of them whatever the batch."""
    sizes = (8, 32, 128)
    model = alexnet_like()
    return MeasuredHost(
        name=name,
        usable_cores=2,
        visible_cores=2,
        free_mb=memory_mb,
        node=NodePlan(host=name, strategy="threads", threads=2),
        updates=tuple(
            UpdateTime(batch_size=b, seconds=figure(slower * (0.01 + 0.09 * b / 128), spread))
            for b in sizes
        ),
        layers=tuple(
            Layer(
                name=layer.name,
                kind=layer.kind,
                forward=figure(0.1 * layer.forward * slower),
                backward=figure(0.1 * layer.backward * slower),
                parameter_bytes=int(layer.parameter_bytes * parameters),
                activation_bytes=int(layer.output_bytes),
            )
            for layer in model.layers
        ),
        layer_batch=128,
    )


def machines(
    *hosts: MeasuredHost,
    megabits: float = 1000.0,
    latency: float = 2e-4,
    spread: float = 0.0,
    parameters: float = 1.0,
) -> Machines:
    rate = figure(megabits * 1e6 / 8, spread)
    return Machines(
        workload=WorkloadFacts(
            name="test", batch_size=128, samples=12_800, epochs=2, chains=chains(parameters)
        ),
        hosts=hosts or (host(),),
        links=(Link(latency=exactly(latency), forward=rate),),
    )


times = st.floats(1e-4, 10.0)
curves = st.lists(
    st.tuples(st.integers(1, 512), times), min_size=1, max_size=4, unique_by=lambda p: p[0]
).map(update_curve)
wires = st.builds(
    lambda latency, rate, hindered: Wire(
        latency=latency, bandwidth=rate, both=rate, slowdown=hindered[0], taken=hindered[1]
    ),
    st.floats(0, 0.1),
    st.floats(1e4, 1e11),
    st.sampled_from([(1.0, 0.0), (1.0, 0.3), (2.0, 0.5), (1.0, 1.0)]),
)
layers = st.builds(
    LayerCost,
    kind=st.sampled_from(["Linear", "ReLU", "Conv2d", "BatchNorm2d"]),
    forward=st.floats(0, 1),
    backward=st.floats(0, 1),
    parameter_bytes=st.floats(0, 1e8),
    output_bytes=st.floats(1, 1e6),
)
models = st.lists(layers, min_size=1, max_size=6).map(model_cost)
synchronous = st.sampled_from(
    [
        ExchangeCost(),
        ExchangeCost(kind="ring"),
        ExchangeCost(kind="reduce_broadcast"),
        ExchangeCost(kind="parameter_server", servers=2, dedicated=False),
        ExchangeCost(kind="parameter_server", servers=2),
        ExchangeCost(kind="averaging", every=8),
    ]
)
exchanges = synchronous | st.just(
    ExchangeCost(kind="parameter_server", servers=2, asynchronous=True)
)


def member(curve: UpdateCurve, count: int, deviation: float = 0.0) -> TeamMember:
    return TeamMember(curve=curve, count=count, deviation=deviation)


members = st.builds(member, curves, st.integers(1, 6), st.sampled_from([0.0, 0.05]))
teams = st.lists(members, min_size=1, max_size=3)
