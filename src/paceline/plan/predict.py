"""The buyer's guide: what more machines would give, and whether they are worth it. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import ModelCost, host_model
from paceline.cost.step import StepCost, TeamMember
from paceline.cost.transfer import wire
from paceline.plan.advice import Case, Gain, advise
from paceline.plan.answer import BreakEven, Prediction, Question, Row
from paceline.plan.prices import (
    TERMS,
    Priced,
    Terms,
    alone_rate,
    cause,
    exchanges,
    member_of,
    node_memory,
    price,
    quickest,
    with_interval,
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
        self.model: ModelCost = host_model(host, facts)

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
        return tuple(
            member_of(self.host, level, speed=speed, count=count)
            for speed, count in self.speeds(nodes).items()
        )

    def alone(self, level: Level, batch: int) -> float:
        """Images per second of the fastest node by itself."""
        return alone_rate(self.team(1, level)[0], batch, self.calibration)

    def options(self, nodes: int, link: Link, batch: int | None = None) -> list[Priced]:
        """What `train` may choose from with so many nodes, over a link, at a batch."""
        samples, own = batch or self.facts.batch(nodes), batch or self.facts.batch(1)

        def terms(computing: Level, network: Level) -> Terms:
            return Terms(
                team=self.team(nodes, computing),
                wire=wire(link, network),
                model=self.model,
                batch=samples,
                chains=self.facts.chains,
                factors=self.calibration,
            )

        usual = terms("median", "median")
        return [
            self._priced(exchange, terms, own)
            for exchange in exchanges(self.question.exchange, usual) or [ExchangeCost()]
        ]

    def _priced(
        self, exchange: ExchangeCost, terms: Callable[[Level, Level], Terms], own: int
    ) -> Priced:
        def cost_at(computing: Level, network: Level) -> StepCost:
            return price(terms(computing, network), exchange)

        found = with_interval(exchange, cost_at, alone=lambda level: self.alone(level, own))
        memory = node_memory(
            self.model,
            self.facts,
            self.host.node,
            found.cost,
            exchange,
            precision=self.host.precision,
        )
        return dataclasses.replace(found, memory_mb=memory)

    def fits(self, option: Priced) -> bool:
        return not self.host.free_mb or option.memory_mb <= self.host.free_mb

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (lives as long as one question)
    def gain(self, nodes: int) -> Gain | None:
        """Of the best exchange that fits; None where none does."""
        found = [each for each in self.options(nodes, self.question.link) if self.fits(each)]
        if not found:
            return None
        top = max(found, key=lambda each: each.images_per_second)
        return Gain(top.speedup, top.speedup_low, top.speedup_high)

    def speedup(self, nodes: int, link: Link, batch: int | None = None) -> float:
        """Of the best exchange."""
        return max(each.speedup for each in self.options(nodes, link, batch))

    def row(self, nodes: int, option: Priced) -> Row:
        facts, cost, price = self.facts, option.cost, self.question.price
        per_epoch = math.ceil(facts.samples / cost.batch)
        steps = facts.steps or facts.epochs * per_epoch
        epoch, end = per_epoch * cost.seconds, steps * cost.seconds
        hourly = None if price is None else nodes * price / 3600
        return Row(
            nodes=nodes,
            exchange="alone" if nodes == 1 else option.exchange.name,
            exact=option.exchange.exact,
            batch=cost.batch,
            images_per_second=option.images_per_second,
            low=option.low,
            high=option.high,
            speedup=option.speedup,
            speedup_low=option.speedup_low,
            speedup_high=option.speedup_high,
            efficiency=option.speedup / self.capacity(nodes),
            step_seconds=cost.seconds,
            terms={name: getattr(cost, name) for name in TERMS},
            bytes_sent=cost.bytes_sent,
            memory_mb=option.memory_mb,
            fits=self.fits(option),
            idle=sum(p.count for p in cost.portions if not p.samples),
            staleness=cost.staleness,
            epoch_seconds=epoch,
            end_seconds=end,
            epoch_cost=None if hourly is None else hourly * epoch,
            end_cost=None if hourly is None else hourly * end,
            reason="" if nodes == 1 else cause(option.exchange, cost),
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
    several = [row for row in rows if row.nodes > 1 and row.fits]
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
    two = [row for row in rows if row.nodes == 2 and row.fits]
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
    ordered = sorted(rows, key=lambda row: (row.nodes, -row.images_per_second))
    return quickest(ordered, lambda row: 1 / row.images_per_second)


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
            f"not possible: every way needs at least {need:,.0f} MB per node, of"
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
    if any(not row.exact for row in rows):
        found.append(
            f"{guide.question.exchange.kind} was asked for and gives other weights than one"
            " machine: images per second are not accuracy"
        )
    if guide.question.link.forward.samples == 0:
        found.append("the link was described, not measured: its interval covers what software took")
    return [*found, *guide.host.warnings]
