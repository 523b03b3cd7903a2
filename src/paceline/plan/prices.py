"""What one update costs, and how sure that is. Pure.

The same price for a training that measures while it trains (`plan.teams`), for `paceline plan`
(`plan.measured`) and for `paceline forecast` (`plan.predict`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.cost.compute import deviation, host_curve, shares
from paceline.cost.exchanges import ExchangeCost, Kind, server_count
from paceline.cost.memory import Footprint, spread_mb
from paceline.cost.model import ModelCost
from paceline.cost.overlap import BUCKET
from paceline.cost.split import Chain, Division, Split, best_split
from paceline.cost.step import StepCost, TeamMember, held_part, step_cost
from paceline.cost.transfer import Wire
from paceline.schema import ExchangeSettings, NodePlan
from paceline.schema.calibration import calibration_name
from paceline.schema.machines import Level, MeasuredHost, WorkloadFacts
from paceline.schema.support import SUMS

SAME = 0.02
"""Differences below this are no differences: fewer machines and the simpler exchange win."""
BUCKETS = (2**20, 25 * 2**20, 100 * 2**20)
"""Sizes of buckets that are considered beside the usual one."""
TERMS = ("compute", "exposed", "waiting", "data")
"""What the seconds of an update are made of."""
CORNERS: tuple[tuple[Level, Level], ...] = (
    ("low", "low"),
    ("low", "high"),
    ("high", "low"),
    ("high", "high"),
)
"""(computing, wire) at the ends of their spread; an interval spans what these give."""
Factors = Mapping[str, float]
"""Per exchange, what past runs took against what was predicted."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms some nodes exchange: everything about an update but its way to agree."""

    team: tuple[TeamMember, ...]
    wire: Wire
    model: ModelCost
    batch: int
    chains: tuple[Chain, ...] = ()
    """Linear layers that may be split."""
    value_bytes: int = 4
    """Of one activation."""
    factors: Factors = dataclasses.field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return sum(member.count for member in self.team)


def exchanges(settings: ExchangeSettings, terms: Terms) -> list[ExchangeCost]:
    """Every way to agree that a configuration leaves open, the simplest first.

    What a configuration names is not explored; what it does not name gives the weights of one
    machine. None where layers are to be split that these nodes cannot split.
    """
    if terms.nodes <= 1:
        return [ExchangeCost()]
    if settings.kind not in ("auto", *SUMS):
        return [named_exchange(settings, terms.nodes)]
    kinds: Sequence[Kind] = SUMS if settings.kind == "auto" else (settings.kind,)  # type: ignore[assignment]
    found = [ExchangeCost(kind=kind) for kind in kinds] if settings.partition != "manual" else []
    split = split_of(settings, terms)
    if split is not None:
        found.append(ExchangeCost(kind=kinds[0], split=split))
    return found


def named_exchange(settings: ExchangeSettings, nodes: int) -> ExchangeCost:
    """The exchange that a configuration names and that is no plain sum."""
    return ExchangeCost(
        kind=settings.kind,  # type: ignore[arg-type]
        servers=max(1, min(settings.servers, nodes - 1)),
        asynchronous=settings.kind == "parameter_server" and settings.mode == "async",
        every=settings.every if settings.kind == "averaging" else 1,
    )


def split_of(settings: ExchangeSettings, terms: Terms) -> Split | None:
    """The layers that these nodes would split; None where none are."""
    if settings.partition == "none" or not terms.chains:
        return None
    kinds = [(member.curve, member.count) for member in terms.team]
    parts = [n for p in shares(kinds, terms.batch) for n in [p.samples] * p.count]
    division = Division(
        parts=tuple(parts), shares=tuple(map(float, parts)), value_bytes=terms.value_bytes
    )
    forced = frozenset(settings.layers) if settings.partition == "manual" else None
    return best_split(terms.chains, division, split=forced)


def price(
    terms: Terms,
    exchange: ExchangeCost,
    *,
    bucket_bytes: float = BUCKET,
    serving: TeamMember | None = None,
) -> StepCost:
    """What an update takes; past runs of the exchange have their say."""
    team = terms.team
    if exchange.kind == "parameter_server" and exchange.dedicated and serving is None:
        team, serving = _workers(team, exchange), team[-1]
    cost = step_cost(
        team,
        terms.wire,
        terms.model,
        exchange,
        terms.batch,
        bucket_bytes=bucket_bytes,
        serving=serving,
    )
    factor = factor_of(terms.factors, exchange, terms.nodes)
    if factor == 1.0:
        return cost
    longer = {term: factor * getattr(cost, term) for term in (*TERMS, "communication")}
    return dataclasses.replace(cost, **longer)


def _workers(team: Sequence[TeamMember], exchange: ExchangeCost) -> tuple[TeamMember, ...]:
    """Those of a team that compute: without the last ones, which serve instead."""
    left = sum(member.count for member in team) - exchange.servers
    found = []
    for member in team:
        if left > 0:
            found.append(dataclasses.replace(member, count=min(left, member.count)))
            left -= found[-1].count
    return tuple(found)


def factor_of(factors: Factors, exchange: ExchangeCost, nodes: int) -> float:
    """What past runs of this exchange took against what was predicted.

    Where there are none, what runs of one machine took: all exchanges compute alike, and a
    factor for some of the options alone would tilt the comparison. Else 1.
    """
    name = calibration_name(
        exchange.kind,
        nodes=nodes,
        partition=exchange.split is not None,
        asynchronous=exchange.asynchronous,
    )
    return factors.get(name, factors.get("alone", 1.0))


def best_bucket(terms: Terms, exchange: ExchangeCost) -> float | None:
    """Another size of buckets that makes an all-reduce clearly faster; None where there is none."""
    if exchange.kind != "allreduce" or terms.nodes < 2:
        return None
    seconds = {
        size: price(terms, exchange, bucket_bytes=size).seconds for size in (BUCKET, *BUCKETS)
    }
    least = min(BUCKETS, key=lambda size: seconds[size])
    return least if seconds[least] < (1 - SAME) * seconds[BUCKET] else None


Entry = TypeVar("Entry")


def quickest(entries: Sequence[Entry], seconds: Callable[[Entry], float]) -> Entry:
    """The one that takes least; of those within 2% of it, the first of the list."""
    least = min(map(seconds, entries))
    return next(entry for entry in entries if seconds(entry) <= least * (1 + SAME))


@dataclass(frozen=True, kw_only=True)
class Priced:
    """One way for some nodes to train, what it costs, and how sure that is."""

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

    @property
    def images_per_second(self) -> float:
        """Samples per second over all nodes."""
        return self.cost.images_per_second


def with_interval(
    exchange: ExchangeCost,
    cost_at: Callable[[Level, Level], StepCost],
    *,
    alone: Callable[[Level], float],
) -> Priced:
    """A cost at the medians, and its interval from the corners of what was measured.

    `alone(level)` is what the fastest node reaches by itself: a speedup compares both at the
    same level of computing, whose noise they share.
    """
    cost = cost_at("median", "median")
    images, speedups = [cost.images_per_second], [cost.images_per_second / alone("median")]
    for computing, wire in CORNERS:
        corner = cost_at(computing, wire).images_per_second
        images.append(corner)
        speedups.append(corner / alone(computing))
    return Priced(
        exchange=exchange,
        cost=cost,
        low=min(images),
        high=max(images),
        speedup=speedups[0],
        speedup_low=min(speedups),
        speedup_high=max(speedups),
    )


def member_of(
    host: MeasuredHost, level: Level = "median", *, speed: float = 1.0, count: int = 1
) -> TeamMember:
    """Nodes like a measured host, or `speed` times as fast."""
    feed = host.feed.median if host.feed else None
    copying = host.memory_bandwidth.median if host.memory_bandwidth else math.inf
    return TeamMember(
        curve=host_curve(host, level).slower(1 / speed),
        count=count,
        deviation=deviation(host),
        feed=feed * speed if feed else None,
        copying=speed * copying,
    )


def alone_rate(member: TeamMember, batch: int, factors: Factors) -> float:
    """Images per second of a node by itself."""
    seconds = member.curve.seconds(batch)
    if member.feed:
        seconds = max(seconds, batch / member.feed)
    return batch / seconds / factors.get("alone", 1.0)


def node_memory(
    model: ModelCost,
    facts: WorkloadFacts,
    node: NodePlan,
    cost: StepCost,
    exchange: ExchangeCost,
    *,
    precision: str,
) -> float:
    """MB that the node with the largest share needs; see `spread_mb`."""
    samples = max((portion.samples for portion in cost.portions), default=cost.batch)
    server = 0.0
    if exchange.kind == "parameter_server" and not exchange.dedicated:
        server = 1.0 / server_count(exchange, sum(portion.count for portion in cost.portions))
    footprint = Footprint(
        parameter_mb=model.parameter_bytes / 1e6,
        activation_mb=(model.activation_bytes + facts.sample_bytes) / 1e6,
        optimizer_slots=facts.optimizer_slots,
    )
    return spread_mb(
        footprint,
        node,
        samples=samples,
        precision=precision,
        held=held_part(model, exchange.split),
        server_part=server,
    )


def cause(exchange: ExchangeCost, cost: StepCost) -> str:
    """What an update's time goes to, beside computing, in a few words."""
    if not exchange.exact:
        kind = "gradients are stale" if exchange.asynchronous else "weights drift apart"
        return f"not exact: {kind}"
    terms = {
        f"{cost.bytes_sent / 1e6:,.3g} MB per node and update on the wire": cost.exposed,
        "the nodes wait for the slowest": cost.waiting,
        "nodes wait for data": cost.data,
    }
    worst = max(terms, key=lambda name: terms[name])
    if terms[worst] <= SAME * cost.seconds:
        return "computing alone takes as long"
    return f"{worst}: {terms[worst] / cost.seconds:.0%} of the time"
