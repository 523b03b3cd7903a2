"""The ways in which a team of nodes could train, each with its cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.cost.compute import deviation, host_curve
from paceline.cost.exchanges import ExchangeCost, server_count
from paceline.cost.memory import Footprint, spread_mb
from paceline.cost.model import ModelCost
from paceline.cost.overlap import BUCKET
from paceline.cost.partition import choose_modes, held_part
from paceline.cost.pipeline import cut
from paceline.cost.step import StepCost, TeamMember, step_cost
from paceline.cost.transfer import Wire
from paceline.schema import NodePlan
from paceline.schema.calibration import calibration_name
from paceline.schema.machines import Level, MeasuredHost, WorkloadFacts

WORKERS_PER_SERVER = 4
"""How many workers a parameter server serves in the options that are considered."""
AVERAGE_EVERY = 16
"""Local steps between two averages in the options that are considered."""
WEIGHING_RATE = 125e6
"""Bytes per second at which latencies are weighed against bytes when layers are split."""
MAX_PIPELINE = 16
"""Nodes up to which a pipeline over nodes is considered."""
CORNERS: tuple[tuple[Level, Level], ...] = (
    ("low", "low"),
    ("low", "high"),
    ("high", "low"),
    ("high", "high"),
)
"""(computing, wire) at the ends of their spread; an interval spans what these give."""


@dataclass(frozen=True)
class Setting:
    """A team at one level of what was measured."""

    team: tuple[TeamMember, ...]
    wire: Wire


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way for a team to train, and what it costs."""

    exchange: ExchangeCost
    cost: StepCost
    low: float
    high: float
    """Images per second at the ends of the interval."""
    speedup: float = 1.0
    speedup_low: float = 1.0
    speedup_high: float = 1.0
    """Against the fastest node alone."""
    memory_mb: float = 0.0
    """Of the node that needs most."""
    bucket_bytes: float = BUCKET
    hosts: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        """True when it gives the weights of one machine."""
        return self.exchange.exact

    @property
    def images_per_second(self) -> float:
        """Samples per second over all nodes."""
        return self.cost.images_per_second


def member_of(host: MeasuredHost, level: Level = "median") -> TeamMember:
    """A measured host as a member of a team."""
    return TeamMember(
        curve=host_curve(host, level),
        deviation=deviation(host),
        feed=host.feed.median if host.feed else None,
        copying=copying_rate(host),
    )


def copying_rate(host: MeasuredHost) -> float:
    """Bytes per second that a core of it reads and writes; without limit where nobody knows."""
    return host.memory_bandwidth.median if host.memory_bandwidth else math.inf


def exchanges(model: ModelCost, wire: Wire, nodes: int, batch: int) -> list[ExchangeCost]:
    """What is worth considering for a team, simple ones first."""
    if nodes <= 1:
        return [ExchangeCost()]
    servers = math.ceil(nodes / (WORKERS_PER_SERVER + 1))
    found = [ExchangeCost()]
    # At one rate, so that a faster link never loses a good partition; the caller compares
    # whole steps.
    modes = choose_modes(model, replace(wire, both=WEIGHING_RATE), nodes, batch)
    if any(mode != "batch" for mode in modes):
        found.append(ExchangeCost(partition=modes))
    found += [
        ExchangeCost(kind="ring"),
        ExchangeCost(kind="reduce_broadcast"),
        ExchangeCost(kind="parameter_server", servers=servers),
        ExchangeCost(kind="parameter_server", servers=servers, asynchronous=True),
        ExchangeCost(kind="averaging", every=AVERAGE_EVERY),
    ]
    if nodes <= min(MAX_PIPELINE, len(model.layers)):
        found.append(ExchangeCost(kind="pipeline"))
    return found


def evaluate(
    model: ModelCost,
    exchange: ExchangeCost,
    batch: int,
    setting: Callable[[Level, Level], Setting],
    *,
    alone: Callable[[Level], float],
    memory: Callable[[StepCost, ExchangeCost], float] = lambda cost, exchange: 0.0,
    bucket_bytes: float = BUCKET,
    factor: float = 1.0,
) -> Option:
    """An option's cost at the medians, and its interval from the corners of the spread.

    `alone(level)` is what the fastest node reaches by itself: a speedup compares both at
    the same level of computing, whose noise they share. `factor` is what past runs took,
    against what was predicted for them (see `calibration_name`).
    """

    def cost_at(computing: Level, wire: Level) -> StepCost:
        found = setting(computing, wire)
        cost = step_cost(
            workers(found.team, exchange),
            found.wire,
            model,
            exchange,
            batch,
            bucket_bytes=bucket_bytes,
            serving=found.team[-1] if exchange.dedicated else None,
        )
        return scaled(cost, factor)

    cost = cost_at("median", "median")
    middle = cost.images_per_second
    speedup = middle / alone("median")
    images, speedups = [middle], [speedup]
    for computing, wire in CORNERS:
        corner = cost_at(computing, wire).images_per_second
        images.append(corner)
        speedups.append(corner / alone(computing))
    return Option(
        exchange=exchange,
        cost=cost,
        low=min(images),
        high=max(images),
        speedup=speedup,
        speedup_low=min(speedups),
        speedup_high=max(speedups),
        memory_mb=memory(cost, exchange),
        bucket_bytes=bucket_bytes,
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """A step that takes `factor` times as long, in all its terms."""
    if factor == 1.0:
        return cost
    terms = ("compute", "exposed", "bubble", "waiting", "data", "communication")
    return replace(cost, **{term: factor * getattr(cost, term) for term in terms})


def factor_of(calibration: Mapping[str, float], exchange: ExchangeCost, nodes: int) -> float:
    """What past runs of this exchange took against what was predicted.

    Where there are none, what runs of one machine took: all exchanges compute alike, and a
    factor for some of the options alone would tilt the comparison. Else 1.
    """
    name = calibration_name(
        exchange.kind,
        nodes=nodes,
        partition=bool(exchange.partition),
        asynchronous=exchange.asynchronous,
    )
    return calibration.get(name, calibration.get("alone", 1.0))


def workers(team: Sequence[TeamMember], exchange: ExchangeCost) -> tuple[TeamMember, ...]:
    """Those of a team that compute: without the slowest ones, where they serve instead."""
    if exchange.kind != "parameter_server" or not exchange.dedicated:
        return tuple(team)
    left = sum(member.count for member in team) - exchange.servers
    found = []
    for member in team:  # the fastest first
        if left > 0:
            found.append(replace(member, count=min(left, member.count)))
            left -= found[-1].count
    return tuple(found)


def footprint(model: ModelCost, facts: WorkloadFacts) -> Footprint:
    """What the model takes in memory."""
    return Footprint(
        parameter_mb=model.parameter_bytes / 1e6,
        activation_mb=(model.activation_bytes + facts.sample_bytes) / 1e6,
        optimizer_slots=facts.optimizer_slots,
        batch_mb=0.0,
    )


def node_memory(
    model: ModelCost,
    facts: WorkloadFacts,
    node: NodePlan,
    *,
    precision: str,
    nodes: int,
    cost: StepCost,
    exchange: ExchangeCost,
) -> float:
    """MB that the node with the largest share needs; see `spread_mb`."""
    if exchange.kind == "pipeline" and nodes > 1:
        stages = cut(model, (1.0,) * nodes)
        part = max(stage.parameter_bytes for stage in stages) / (model.parameter_bytes or 1.0)
        # In GPipe a stage holds all micro-batches of its own layers.
        samples, held = math.ceil(cost.batch / nodes), part
    else:
        samples = max((portion.samples for portion in cost.portions), default=cost.batch)
        held = 1.0
        if exchange.partition:
            held = held_part(model, exchange.partition, samples / cost.batch)
    server = 0.0
    if exchange.kind == "parameter_server" and not exchange.dedicated:
        server = 1.0 / server_count(exchange, nodes)
    return spread_mb(
        footprint(model, facts),
        node,
        samples=samples,
        precision=precision,
        held=held,
        server_part=server,
    )


def cause(option: Option, model: ModelCost) -> str:
    """What an option's time goes to, beside computing, in a few words."""
    cost = option.cost
    if not option.exact:
        kind = "gradients are stale" if option.exchange.asynchronous else "weights drift apart"
        return f"not exact: {kind}"
    terms = {
        f"{cost.bytes_sent / 1e6:,.3g} MB per node and update on the wire": cost.exposed,
        "the nodes wait for the slowest": cost.waiting,
        "stages stand idle": cost.bubble,
        "nodes wait for data": cost.data,
    }
    worst = max(terms, key=lambda name: terms[name])
    if terms[worst] <= 0.02 * cost.seconds:
        return "computing alone takes as long"
    return f"{worst}: {terms[worst] / cost.seconds:.0%} of the time"


def best(options: Sequence[Option], *, same: float = 0.0) -> Option:
    """The fastest; of those within `same` of it, the first of the list."""
    fastest = max(option.images_per_second for option in options)
    return next(o for o in options if o.images_per_second >= fastest * (1 - same))
