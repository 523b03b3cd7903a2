"""The time of one update, term by term.

time per step = compute + exposed communication + waiting for the slowest + data
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.compute import Portion, UpdateCurve, expected_maximum, shares
from paceline.cost.exchanges import (
    OVERLAPPING,
    ExchangeCost,
    agreement_bytes,
    agreement_seconds,
    queueing_rates,
    server_count,
    way_seconds,
)
from paceline.cost.model import ModelCost
from paceline.cost.overlap import BUCKET, buckets, exposed_seconds
from paceline.cost.split import Split
from paceline.cost.transfer import Wire, allreduce_bytes, allreduce_seconds


@dataclass(frozen=True)
class TeamMember:
    """`count` equal nodes of a team."""

    curve: UpdateCurve
    count: int = 1
    deviation: float = 0.0
    """Standard deviation of an update, in parts of its time."""
    feed: float | None = None
    """Samples per second that reading gives; None: no limit."""
    copying: float = math.inf
    """Bytes per second that a core reads and writes when it copies."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One update of the global batch; the terms add up to `seconds`."""

    batch: int
    compute: float
    """The nodes' mean time of computing."""
    exposed: float = 0.0
    """Communication that does not hide under backward."""
    waiting: float = 0.0
    """For the slowest: unequal shares, and chance."""
    data: float = 0.0
    communication: float = 0.0
    """All communication, hidden or not."""
    bytes_sent: float = 0.0
    """By the busiest node."""
    staleness: float = 0.0
    """Updates that a gradient is behind, on average."""
    portions: tuple[Portion, ...] = ()

    @property
    def seconds(self) -> float:
        """Time per update of the global batch."""
        return self.compute + self.exposed + self.waiting + self.data

    @property
    def images_per_second(self) -> float:
        """Samples per second over all nodes."""
        return self.batch / self.seconds


def step_cost(
    team: Sequence[TeamMember],
    wire: Wire,
    model: ModelCost,
    exchange: ExchangeCost,
    batch: int,
    *,
    bucket_bytes: float = BUCKET,
    serving: TeamMember | None = None,
) -> StepCost:
    """The cost of one update of `batch` samples by a team.

        compute   mean_i t_i(share_i), shares such that all are ready together
        waiting   max_i t_i - mean_i t_i + sqrt(m) z(N) cv max_i t_i      (`expected_maximum`)
        exposed   by the exchange; see `agreement_seconds` and `exposed_seconds`
        data      max(0, max_i share_i / feed_i - compute - exposed - waiting): feeding runs ahead

    Nodes wait for each other m times per update: once, and where layers are split at every
    change of hands forward and backward. Of m parts with independent chance each has
    cv / sqrt(m) of the whole's, and m of them are waited for.

    Nodes that get no sample stand by, but still take part in the exchange. The team are
    those that compute; servers on nodes of their own are not among them: `serving` is the
    slowest of those, where it is known.
    """
    nodes = sum(member.count for member in team)
    portions = shares([(member.curve, member.count) for member in team], batch)
    if exchange.asynchronous and not exchange.is_idle(nodes):
        return _asynchronous(team, wire, model, exchange, portions, batch)
    times = _times(team, model, exchange, portions)
    mean = sum(p.count * t for p, t in zip(portions, times, strict=True)) / nodes
    slowest = max(times)
    chance = expected_maximum(nodes) * max(member.deviation for member in team) * slowest
    if exchange.kind == "averaging":
        chance /= math.sqrt(exchange.every)
    chance *= math.sqrt(1 + 2 * _meetings(model, exchange))
    waiting = slowest - mean + chance
    communication, exposed, sent = _communication(
        team, wire, model, exchange, nodes, slowest, bucket_bytes
    )
    if exchange.kind == "parameter_server" and serving is not None:
        handled = handling_seconds(team, serving, model, exchange, nodes)
        communication, exposed = communication + handled, exposed + handled
    busy = mean + waiting + exposed
    data = max(0.0, _feeding(team, portions) - busy)
    return StepCost(
        batch=batch,
        compute=mean,
        exposed=exposed,
        waiting=waiting,
        data=data,
        communication=communication,
        bytes_sent=sent,
        portions=tuple(portions),
    )


def _times(
    team: Sequence[TeamMember],
    model: ModelCost,
    exchange: ExchangeCost,
    portions: Sequence[Portion],
) -> list[float]:
    """Seconds of computing per portion.

    Split layers cost the same arithmetic whether a node has 1/N of the rows or of the
    features, but the fixed part of an update, which touches every weight, shrinks to the
    weights that the node holds. Workers of parameter servers leave the optimizer to those.
    """
    times = []
    served = exchange.kind == "parameter_server" and exchange.dedicated
    for portion in portions:
        member = team[portion.kind]
        seconds = member.curve.seconds(portion.samples)
        if exchange.split is not None and portion.samples:
            seconds -= (1 - held_part(model, exchange.split)) * member.curve.fixed
        elif served and portion.samples:
            seconds -= min(member.curve.fixed, optimizer_seconds(model, member.copying))
        times.append(seconds)
    return times


def optimizer_seconds(model: ModelCost, copying: float) -> float:
    """What an optimizer takes: (3 + 2 k) n / c.

    Gradient, weight and k numbers are read, the last two written; memory is what it waits for.
    """
    return (3 + 2 * model.optimizer_slots) * model.parameter_bytes / copying


def handling_seconds(
    team: Sequence[TeamMember],
    serving: TeamMember,
    model: ModelCost,
    exchange: ExchangeCost,
    workers: int,
) -> float:
    """What workers and servers do with n bytes between computing and the wire.

        a worker   4 n / c              gradients into one vector, weights out of one
        a server   3 (W-1) n / (S c)    adding up W gradients
                 + 2 n / (S c)          a copy of the weights, for all workers
                 + optimizer / S        see `optimizer_seconds`

    c is what the slowest worker, or the slowest server, reads and writes per second.
    """
    size, servers = model.parameter_bytes, server_count(exchange, workers)
    own = 4 * size / min(member.copying for member in team)
    shared = (3 * (workers - 1) + 2) * size / serving.copying
    return own + (shared + optimizer_seconds(model, serving.copying)) / servers


def _communication(
    team: Sequence[TeamMember],
    wire: Wire,
    model: ModelCost,
    exchange: ExchangeCost,
    nodes: int,
    slowest: float,
    bucket_bytes: float,
) -> tuple[float, float, float]:
    """Seconds of communication, those of them that are exposed, and bytes sent.

    Gradients leave bucket by bucket while backward runs. What split layers pass on, the sums of
    layers that look across samples, and the weights that come back from servers, nothing hides.
    """
    if exchange.is_idle(nodes):
        return 0.0, 0.0, 0.0
    size = model.parameter_bytes
    if exchange.kind not in OVERLAPPING:
        seconds = agreement_seconds(exchange, wire, size, nodes) / exchange.every
        return seconds, seconds, agreement_bytes(exchange, size, nodes) / exchange.every
    split = exchange.split
    summed = split.summed if split is not None else {}
    fixed = max(member.curve.fixed for member in team)
    working = max(0.0, slowest - fixed)
    gradients = [
        (working * layer.backward, summed.get(layer.name, layer.parameter_bytes))
        for layer in reversed(model.layers)
    ]

    pulled = exchange.kind == "parameter_server"

    def seconds_of(bucket: float) -> float:
        if pulled:
            return way_seconds(exchange, wire, bucket, nodes)
        return agreement_seconds(exchange, wire, bucket, nodes)

    waiting = buckets(gradients, size=bucket_bytes)
    hideable = sum(seconds_of(bucket.size) for bucket in waiting)
    moved = agreement_bytes(exchange, sum(bucket.size for bucket in waiting), nodes)
    exposed = exposed_seconds(
        waiting,
        working * model.backward_part,
        seconds_of,
        slowdown=wire.slowdown,
        taken=wire.taken,
    )
    sums = [layer.sum_bytes for layer in model.layers if layer.sum_bytes]
    blocking = sum(2 * allreduce_seconds(wire, each, nodes) for each in sums)
    sent = moved + 2 * allreduce_bytes(sum(sums), nodes)
    if split is not None:
        rounds = 2 * split.changes * (wire.latency + (nodes - 1) * wire.message)
        blocking += rounds + split.moved / wire.both
        sent += split.moved
    if pulled:
        blocking += way_seconds(exchange, wire, size, nodes)
    return hideable + blocking, exposed + blocking, sent


def _meetings(model: ModelCost, exchange: ExchangeCost) -> int:
    """How often nodes wait for each other in a forward pass."""
    if exchange.kind not in OVERLAPPING:
        return 0
    sums = sum(1 for layer in model.layers if layer.sum_bytes)
    return sums + (exchange.split.changes if exchange.split is not None else 0)


def held_part(model: ModelCost, split: Split | None) -> float:
    """Part of all weights that the node with most of them holds."""
    if split is None:
        return 1.0
    return 1 - (split.weights - split.held) / max(split.weights, model.parameter_bytes)


def _feeding(team: Sequence[TeamMember], portions: Sequence[Portion]) -> float:
    times = [0.0]
    for portion in portions:
        feed = team[portion.kind].feed
        if feed:
            times.append(portion.samples / feed)
    return max(times)


def _asynchronous(
    team: Sequence[TeamMember],
    wire: Wire,
    model: ModelCost,
    exchange: ExchangeCost,
    portions: Sequence[Portion],
    batch: int,
) -> StepCost:
    """Workers that wait for nobody but the servers' links.

        Z_i       t_i + 2 (a + S o), away from the links
        a link    v / B seconds per update, v a server's bytes per update of one worker
        images/s  sum_i share_i X_i, the rates X of `queueing_rates` over 2 S links

    A gradient is as many updates behind as there are other workers.
    """
    size = model.parameter_bytes
    active = [portion for portion in portions if portion.samples]
    workers = sum(portion.count for portion in active)
    servers = server_count(exchange, workers)
    off_node = 1.0 if exchange.dedicated else (workers - 1) / workers
    demand = off_node * size / servers / wire.both
    times = []
    for portion in active:
        member = team[portion.kind]
        fed = portion.samples / member.feed if member.feed else 0.0
        times.append(max(member.curve.seconds(portion.samples), fed))
    rounds = 2 * (wire.latency + servers * wire.message)
    kinds = [(t + rounds, p.count) for t, p in zip(times, active, strict=True)]
    rates = queueing_rates(kinds, demand, 2 * servers)
    images = sum(rate * p.samples for rate, p in zip(rates, active, strict=True))
    compute = batch / sum(p.count * p.samples / t for p, t in zip(active, times, strict=True))
    return StepCost(
        batch=batch,
        compute=compute,
        exposed=max(0.0, batch / images - compute),
        communication=rounds + 2 * servers * demand,
        bytes_sent=agreement_bytes(exchange, size, workers),
        staleness=workers - 1.0,
        portions=tuple(portions),
    )
