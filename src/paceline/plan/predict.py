"""The buyer's guide: what more machines would give, and whether they are worth it. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from paceline.cost.compute import deviation, host_curve
from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import ModelCost, host_model
from paceline.cost.step import StepCost, TeamMember
from paceline.cost.transfer import wire
from paceline.errors import ConfigError
from paceline.plan.advice import Case, Gain, advise
from paceline.plan.answer import BreakEven, Prediction, Question, Row
from paceline.plan.options import (
    Option,
    Setting,
    best,
    cause,
    copying_rate,
    evaluate,
    exchanges,
    factor_of,
    node_memory,
)
from paceline.schema.machines import Level, Link, MeasuredHost, WorkloadFacts

WORTH = 1.1
"""A speedup below this is not worth another machine."""
SLOWEST_LINK, FASTEST_LINK = 1e4, 1e13
"""Bits per second between which a break-even is looked for."""
LARGEST_BATCH = 2**20


class _Guide:
    """One host, one workload, one question; every number of nodes is asked of it."""

    def __init__(
        self,
        host: MeasuredHost,
        facts: WorkloadFacts,
        question: Question,
        calibration: Mapping[str, float],
    ) -> None:
        self.host, self.facts, self.question = host, facts, question
        self.calibration = calibration
        self.model: ModelCost = host_model(host, facts.optimizer_slots)
        if not host.layers:
            raise ConfigError(f"host {host.name!r} has no per-layer profile: measure it again")
        self.spread, self.copying = deviation(host), copying_rate(host)

    def speeds(self, nodes: int) -> dict[float, int]:
        """How many nodes there are of each speed, the fastest first."""
        mix = self.question.mix
        whole, rest = divmod(nodes, len(mix))
        found: dict[float, int] = {}
        for place, speed in enumerate(mix):
            found[speed] = found.get(speed, 0) + whole + (1 if place < rest else 0)
        return {speed: found[speed] for speed in sorted(found, reverse=True) if found[speed]}

    def capacity(self, nodes: int) -> float:
        """What all nodes' speeds add up to, in units of the fastest."""
        speeds = self.speeds(nodes)
        return sum(speed * count for speed, count in speeds.items()) / max(speeds)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (lives as long as one question)
    def team(self, nodes: int, level: Level) -> tuple[TeamMember, ...]:
        curve = host_curve(self.host, level)
        feed = self.host.feed.median if self.host.feed else None
        return tuple(
            TeamMember(
                curve=curve.slower(1 / speed),
                count=count,
                deviation=self.spread,
                feed=feed * speed if feed else None,
                copying=speed * self.copying,
            )
            for speed, count in self.speeds(nodes).items()
        )

    def alone(self, level: Level, batch: int) -> float:
        """Images per second of the fastest node by itself."""
        member = self.team(1, level)[0]
        seconds = member.curve.seconds(batch)
        if member.feed:
            seconds = max(seconds, batch / member.feed)
        return batch / seconds / self.calibration.get("alone", 1.0)

    def options(self, nodes: int, link: Link, batch: int | None = None) -> list[Option]:
        """Every exchange for so many nodes, over a link, at a batch."""
        samples = batch or self.facts.batch(nodes)
        own = batch or self.facts.batch(1)
        wires = {level: wire(link, level) for level in ("median", "low", "high")}

        def setting(computing: Level, network: Level) -> Setting:
            return Setting(self.team(nodes, computing), wires[network])

        def memory(cost: StepCost, exchange: ExchangeCost) -> float:
            return node_memory(
                self.model,
                self.facts,
                self.host.node,
                precision=self.host.precision,
                nodes=nodes,
                cost=cost,
                exchange=exchange,
            )

        return [
            evaluate(
                self.model,
                exchange,
                samples,
                setting,
                alone=lambda level: self.alone(level, own),
                memory=memory,
                factor=factor_of(self.calibration, exchange, nodes),
            )
            for exchange in exchanges(self.model, wires["median"], nodes, samples)
        ]

    def fits(self, option: Option) -> bool:
        return not self.host.free_mb or option.memory_mb <= self.host.free_mb

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (lives as long as one question)
    def gain(self, nodes: int) -> Gain | None:
        """Of the best exact exchange that fits; None where none does."""
        found = [o for o in self.options(nodes, self.question.link) if o.exact and self.fits(o)]
        if not found:
            return None
        top = best(found)
        return Gain(top.speedup, top.speedup_low, top.speedup_high)

    def speedup(self, nodes: int, link: Link, batch: int | None = None) -> float:
        """Of the best exact exchange."""
        return best([o for o in self.options(nodes, link, batch) if o.exact]).speedup

    def row(self, nodes: int, option: Option) -> Row:
        facts, cost, price = self.facts, option.cost, self.question.price
        per_epoch = math.ceil(facts.samples / cost.batch)
        steps = facts.steps or facts.epochs * per_epoch
        epoch, end = per_epoch * cost.seconds, steps * cost.seconds
        hourly = None if price is None else nodes * price / 3600
        names = ("compute", "exposed", "bubble", "waiting", "data")
        return Row(
            nodes=nodes,
            exchange="alone" if nodes == 1 else option.exchange.name,
            exact=option.exact,
            batch=cost.batch,
            images_per_second=option.images_per_second,
            low=option.low,
            high=option.high,
            speedup=option.speedup,
            speedup_low=option.speedup_low,
            speedup_high=option.speedup_high,
            efficiency=option.speedup / self.capacity(nodes),
            step_seconds=cost.seconds,
            terms={name: getattr(cost, name) for name in names},
            bytes_sent=cost.bytes_sent,
            memory_mb=option.memory_mb,
            fits=self.fits(option),
            idle=sum(p.count for p in cost.portions if not p.samples),
            staleness=cost.staleness,
            epoch_seconds=epoch,
            end_seconds=end,
            epoch_cost=None if hourly is None else hourly * epoch,
            end_cost=None if hourly is None else hourly * end,
            reason="" if nodes == 1 else cause(option, self.model),
        )


def predict(
    host: MeasuredHost,
    facts: WorkloadFacts,
    question: Question,
    calibration: Mapping[str, float] | None = None,
) -> Prediction:
    """What so many nodes like `host` would do with a workload.

    `calibration`: per exchange, what past runs took against what was predicted.
    """
    guide = _Guide(host, facts, question, calibration or {})
    counts = sorted(set(question.nodes))
    rows = [
        guide.row(nodes, option)
        for nodes in counts
        for option in guide.options(nodes, question.link)
    ]
    several = [row for row in rows if row.nodes > 1 and row.exact and row.fits]
    even = _break_even(guide, counts, several) if several else None
    worth, verdict = _verdict(guide, rows, several, even)
    if host.is_doubtful:
        worth, verdict = False, _unknown(host)
    return Prediction(
        workload=facts,
        host=host.name,
        question=question,
        rows=tuple(rows),
        break_even=even,
        worth_it=worth,
        verdict=verdict,
        answer=_answer(guide, rows),
        notes=tuple(_notes(guide, rows, counts)),
    )


def _unknown(host: MeasuredHost) -> str:
    return (
        f"not known: this machine was busy ({host.busy:.0%} of its cores used by other programs)"
        " while it was measured; measure again when it is quiet, with --again"
    )


def _answer(guide: _Guide, rows: Sequence[Row]) -> tuple[str, ...]:
    """For people who want to know whether to buy another machine."""
    if guide.host.is_doubtful:
        return (_unknown(guide.host),)
    question, facts = guide.question, guide.facts
    if max(question.nodes) < 2:
        return ()
    batch = facts.batch(1)
    steps = facts.steps or facts.epochs * math.ceil(facts.samples / batch)
    two = [row for row in rows if row.nodes == 2 and row.exact and row.fits]
    return advise(
        Case(
            gain=guide.gain,
            capacity=guide.capacity,
            alone_seconds=steps * batch / guide.alone("median", batch),
            most=max(question.nodes),
            second=question.mix[1 % len(question.mix)],
            cause=best_row(two).reason if two else "",
            hourly=question.price,
            purchase=question.purchase,
            currency=question.currency,
        ),
        worth=WORTH,
    )


def best_row(rows: Sequence[Row]) -> Row:
    """The one with most images per second; the fewest nodes of those within 2%."""
    fastest = max(row.images_per_second for row in rows)
    near = [row for row in rows if row.images_per_second >= 0.98 * fastest]
    return min(near, key=lambda row: (row.nodes, -row.images_per_second))


def _break_even(guide: _Guide, counts: Sequence[int], several: Sequence[Row]) -> BreakEven:
    top = best_row(several)
    link = guide.question.link
    # Where the best beats one node the smallest team is of interest, else the best there is.
    nodes = min(n for n in counts if n > 1) if top.speedup > 1 else top.nodes
    tried = sorted({*(n for n in counts if n > 1), *_powers(max(counts))})
    helping = next((n for n in tried if guide.speedup(n, link) > 1), None)
    return BreakEven(
        nodes=nodes,
        link_bits_per_second=_even_link(guide, nodes),
        batch=_even_batch(guide, nodes) if guide.facts.batch_per_worker is None else None,
        node_count=helping,
        fastest_nodes=top.nodes,
    )


def _powers(limit: int) -> list[int]:
    return [2**k for k in range(1, max(1, limit).bit_length()) if 2**k <= limit]


def _even_link(guide: _Guide, nodes: int) -> float | None:
    """Bits per second at which so many nodes are as fast as one, by bisection of the logarithm.

    The model is never slower with more bandwidth, so there is one such rate or none.
    """
    link = guide.question.link
    known = 8 * link.forward.median

    def helps(rate: float) -> bool:
        return guide.speedup(nodes, _scaled(link, rate / known)) > 1

    low, high = math.log10(SLOWEST_LINK), math.log10(FASTEST_LINK)
    if not helps(10**high):
        return None
    if helps(10**low):
        return 10**low
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if helps(10**middle) else (middle, high)
    return 10**high


def _scaled(link: Link, factor: float) -> Link:
    def times(figure: object) -> object:
        if figure is None:
            return None
        assert dataclasses.is_dataclass(figure)
        assert not isinstance(figure, type)
        values = {name: factor * getattr(figure, name) for name in ("median", "low", "high")}
        return dataclasses.replace(figure, **values)

    ways = {name: times(getattr(link, name)) for name in ("forward", "backward", "both")}
    return dataclasses.replace(link, **ways)  # type: ignore[arg-type]


def _even_batch(guide: _Guide, nodes: int) -> int | None:
    """The smallest batch at which so many nodes beat one, to a power of two and then exactly."""
    link = guide.question.link

    def helps(batch: int) -> bool:
        return guide.speedup(nodes, link, batch) > 1

    high = 1
    while not helps(high):
        high *= 2
        if high > LARGEST_BATCH:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if helps(middle) else (middle, high)
    return high


def _verdict(
    guide: _Guide, rows: Sequence[Row], several: Sequence[Row], even: BreakEven | None
) -> tuple[bool, str]:
    """One sentence: worth it, or not and what would make it so."""
    if even is None:
        if all(row.nodes == 1 for row in rows):
            return False, "one node was asked about: there is nothing to compare it with"
        need = min(row.memory_mb for row in rows if row.nodes > 1)
        return False, (
            f"not possible: every exact way needs at least {need:,.0f} MB per node, of"
            f" {guide.host.free_mb:,.0f} free; use nodes with more memory or a smaller batch"
        )
    top = best_row(several)
    text = (
        f"{top.nodes} nodes with {top.exchange} train {_times(top.speedup)} as fast as one"
        f" ({_times(top.speedup_low)} to {_times(top.speedup_high)}), {top.efficiency:.0%} of what"
        " they could do together"
    )
    if top.speedup >= WORTH and top.speedup_low > 1:
        return True, f"worth it: {text}{_money(rows, top)}"
    return False, f"not worth it: {text}; {_remedy(guide, top, even)}"


def _times(factor: float) -> str:
    return f"{factor:.2f}x" if factor >= 0.1 else f"{factor:.1g}x"


def _money(rows: Sequence[Row], top: Row) -> str:
    alone = next((row for row in rows if row.nodes == 1), None)
    if alone is None or not alone.epoch_cost or top.epoch_cost is None:
        return ""
    return f", at {top.epoch_cost / alone.epoch_cost:.2f}x the cost per epoch"


def _remedy(guide: _Guide, top: Row, even: BreakEven) -> str:
    """What would make it worth it, or why nothing would."""
    capacity = guide.capacity(max(guide.question.nodes))
    if capacity < WORTH:
        return (
            f"all nodes together have {capacity:.2f}x the speed of the fastest, so no link helps:"
            " use machines of similar speed"
        )
    ways = []
    link, known = even.link_bits_per_second, 8 * guide.question.link.forward.median
    if link is not None and link > 1.01 * known:
        ways.append(f"a link that carries at least {rate_text(link)}")
    batch = even.batch
    if batch is not None and batch > guide.facts.batch(even.nodes):
        ways.append(f"a batch of at least {batch:,}")
    if ways:
        return f"{even.nodes} nodes would begin to help with {' or '.join(ways)}"
    if top.speedup > 1:
        return f"the gain is below {WORTH - 1:.0%} or within the spread; {top.reason}"
    return f"no link and no batch would change that: {top.reason}"


def rate_text(bits_per_second: float) -> str:
    """A rate as people say it.

    >>> rate_text(2.5e8)
    '250 Mbit/s'
    """
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second:.3g} bit/s"


def _notes(guide: _Guide, rows: Sequence[Row], counts: Sequence[int]) -> list[str]:
    found = []
    sizes = [update.batch_size for update in guide.host.updates]
    smallest = min((row.batch / row.nodes for row in rows), default=0)
    if smallest < min(sizes):
        found.append(
            f"shares below {min(sizes)} samples are extrapolated: no smaller batch was measured"
        )
    idle = [row for row in rows if row.idle and row.exchange == "allreduce"]
    if idle:
        first = idle[0]
        found.append(
            f"from {first.nodes} nodes on a batch of {first.batch} leaves {first.idle}"
            " without a sample: raise workload.batch_size or use batch_per_worker"
        )
    inexact = [row for row in rows if not row.exact and row.fits]
    exact = [row for row in rows if row.exact and row.fits and row.nodes > 1]
    if inexact and exact:
        quick, plain = best_row(inexact), best_row(exact)
        if quick.speedup > max(1.0, 1.1 * plain.speedup):
            found.append(
                f"{quick.exchange} on {quick.nodes} nodes would reach {quick.speedup:.2f}x, but"
                " gives other weights: images per second are not accuracy"
            )
    if guide.question.link.forward.samples == 0:
        found.append("the link was described, not measured: its interval covers what software took")
    return [*found, *guide.host.warnings]
