"""Which machines train together, how much each takes, and how they agree. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.compute import Portion, UpdateCurve, host_curve
from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import ModelCost, host_model
from paceline.cost.step import StepCost, TeamMember
from paceline.cost.transfer import slowest_wire
from paceline.errors import ConfigError, StrategyError
from paceline.plan.options import (
    Option,
    Setting,
    cause,
    evaluate,
    exchanges,
    factor_of,
    member_of,
    node_memory,
)
from paceline.plan.rules import BUCKETS, Factors, Rules
from paceline.schema import NodePlan, Rejected
from paceline.schema.machines import Level, Machines, MeasuredHost, WorkloadFacts
from paceline.text import rate

SAME = 0.02
"""Differences below this are no differences: fewer machines and the simpler exchange win."""
NOT_ASKED = "not among the exchanges to choose from"
EVERY_COUNT = 32
"""Up to so many machines every number of them is considered; above, powers of two and all."""


@dataclass(frozen=True, kw_only=True)
class NodeChoice:
    """The pieces of a plan that joining machines decides."""

    nodes: tuple[NodePlan, ...]
    """Those that train, each with its host and its part of the batch."""
    samples: tuple[int, ...]
    """Samples of every global batch, per node."""
    batch_size: int
    exchange: ExchangeCost
    partition: dict[str, str]
    """Per layer with weights: `batch` or `feature`."""
    bucket_bytes: float
    left_out: dict[str, str]
    """Machines that do not train, and why."""
    rejected: tuple[Rejected, ...]
    """Every other option with its predicted time in the reason."""
    predicted: dict[str, float]
    reason: str
    option: Option
    plain_bytes: float
    """What all-reducing every gradient would send per node and update."""

    @property
    def partition_name(self) -> str:
        """What plan.json calls it."""
        return "feature" if self.feature_layers else "none"

    @property
    def feature_layers(self) -> tuple[str, ...]:
        """Names of the layers that are split by feature."""
        return tuple(name for name, mode in self.partition.items() if mode == "feature")


class _Chooser:
    """Hosts in order of speed; teams are the fastest so many of them."""

    def __init__(
        self, machines: Machines, facts: WorkloadFacts, rules: Rules, calibration: Factors
    ) -> None:
        if not machines.hosts:
            raise ConfigError("machines.json has no hosts: measure at least one")
        self.machines, self.facts = machines, facts
        self.rules, self.calibration = rules, calibration
        batch = facts.batch(1)
        self.hosts = sorted(machines.hosts, key=lambda h: host_curve(h).seconds(batch))
        if not self.hosts[0].layers:
            raise ConfigError(
                f"host {self.hosts[0].name!r} has no per-layer profile: measure it again"
            )
        self.model: ModelCost = host_model(self.hosts[0], facts.optimizer_slots)

    def counts(self) -> list[int]:
        """How many of the fastest are tried together."""
        most = len(self.hosts)
        if most <= EVERY_COUNT:
            return list(range(1, most + 1))
        return [*range(1, 9), *(2**k for k in range(4, most.bit_length()) if 2**k < most), most]

    def members(self, team: Sequence[MeasuredHost], level: Level) -> tuple[TeamMember, ...]:
        return tuple(member_of(host, level) for host in team)

    def alone(self, level: Level) -> float:
        """Images per second of the fastest machine by itself."""
        batch = self.facts.batch(1)
        curve: UpdateCurve = host_curve(self.hosts[0], level)
        feed = self.hosts[0].feed
        seconds = max(curve.seconds(batch), batch / feed.median if feed else 0.0)
        return batch / seconds / self.calibration.get("alone", 1.0)

    def options(self, count: int) -> list[Option]:
        """Every exchange for the fastest `count` machines."""
        team = self.hosts[:count]
        names = [host.name for host in team]
        batch = self.facts.batch(count)
        levels: tuple[Level, ...] = ("median", "low", "high")
        wires = {level: slowest_wire(self.machines, names, level) for level in levels}
        members = {level: self.members(team, level) for level in levels}

        def setting(computing: Level, network: Level) -> Setting:
            return Setting(members[computing], wires[network])

        def memory(cost: StepCost, exchange: ExchangeCost) -> float:
            return node_memory(
                self.model,
                self.facts,
                team[0].node,
                precision=team[0].precision,
                nodes=count,
                cost=cost,
                exchange=exchange,
            )

        found, sizes = [], self.rules.buckets
        for usual in exchanges(self.model, wires["median"], count, batch):
            exchange = self.rules.as_asked(usual, count)
            tries = [
                evaluate(
                    self.model,
                    exchange,
                    batch,
                    setting,
                    alone=self.alone,
                    memory=memory,
                    bucket_bytes=size,
                    factor=factor_of(self.calibration, exchange, count),
                )
                for size in (sizes if exchange.kind == "allreduce" and count > 1 else sizes[:1])
            ]
            quickest = max(option.images_per_second for option in tries)
            # The usual bucket unless another one is truly better.
            option = next(o for o in tries if o.images_per_second >= quickest * (1 - SAME))
            found.append(dataclasses.replace(option, hosts=tuple(names)))
        return found

    def fits(self, option: Option) -> bool:
        """Whether every machine of the team has room; 0 MB free means that nobody knows."""
        free = [h.free_mb for h in self.hosts[: len(option.hosts)] if h.free_mb]
        return not free or option.memory_mb <= min(free)

    def may_take(self, option: Option) -> bool:
        """Whether it can be run, is allowed, and has room."""
        return self.rules.runs(option) and self.rules.allows(option) and self.fits(option)


def choose_nodes(
    machines: Machines,
    facts: WorkloadFacts | None = None,
    *,
    allow: Sequence[str] = (),
    kinds: Sequence[str] | None = None,
    buckets: Sequence[float] = BUCKETS,
    every: int | None = None,
    servers: int | None = None,
    calibration: Factors | None = None,
) -> NodeChoice:
    """Shares, exchange, partition, and which machines to leave out.

    The fastest 1, 2, ... machines are considered with every exchange; the option with most
    images per second is taken, and of those within 2% the one with fewest machines and the
    simplest exchange. What gives other weights than one machine is taken only if `allow`
    names it: "async" or "averaging". `facts` replaces what machines.json says of the workload.
    `kinds` limits the exchanges to those that can be run here: names as in the configuration,
    and "partition" for layers split by feature; all when left out. Others are still
    predicted, and rejected. `buckets` are the sizes to choose from, the usual one first;
    `every` and `servers` replace what is usual for averaging and parameter servers.
    """
    rules = Rules(allow, kinds, buckets, every, servers)
    chooser = _Chooser(machines, facts or machines.workload, rules, calibration or {})
    options = [option for count in chooser.counts() for option in chooser.options(count)]
    allowed = [option for option in options if chooser.may_take(option)]
    if not allowed:
        least = min(options, key=lambda option: option.memory_mb)
        raise StrategyError(
            f"no way to train fits: {_name(least)} needs {least.memory_mb:,.0f} MB on a node, and"
            " less is free; lower workload.batch_size, or add machines"
        )
    fastest = max(option.images_per_second for option in allowed)
    chosen = next(o for o in allowed if o.images_per_second >= fastest * (1 - SAME))
    return _choice(chooser, options, chosen)


def every_choice(
    machines: Machines, *, count: int, buckets: Sequence[float] = BUCKETS
) -> list[NodeChoice]:
    """Every way for the fastest `count` machines, each as if it had been chosen.

    For comparing predictions with measurements: nothing is calibrated, nothing ruled out.
    """
    chooser = _Chooser(machines, machines.workload, Rules(buckets=buckets), {})
    options = chooser.options(count)
    return [_choice(chooser, options, option) for option in options]


def _name(option: Option) -> str:
    if len(option.hosts) == 1:
        return f"{option.hosts[0]} alone"
    listed = ", ".join(option.hosts[:4]) + (", ..." if len(option.hosts) > 4 else "")
    return f"{option.exchange.name} on {len(option.hosts)} machines ({listed})"


def _choice(chooser: _Chooser, options: Sequence[Option], chosen: Option) -> NodeChoice:
    samples = _samples(chosen, chooser)
    working = [(h, n) for h, n in zip(chooser.hosts, samples, strict=False) if n]
    batch = chosen.cost.batch
    modes = chosen.exchange.partition or ("batch",) * len(chooser.model.layers)
    cost = chosen.cost
    return NodeChoice(
        nodes=tuple(
            dataclasses.replace(host.node, host=host.name, share=count / batch)
            for host, count in working
        ),
        samples=tuple(count for _, count in working),
        batch_size=batch,
        exchange=chosen.exchange,
        partition={
            layer.name: "batch" if mode == "batch" else "feature"
            for layer, mode in zip(chooser.model.layers, modes, strict=True)
            if layer.parameter_bytes
        },
        bucket_bytes=chosen.bucket_bytes,
        left_out=_left_out(chooser, options, chosen, [host.name for host, _ in working]),
        rejected=tuple(
            Rejected(
                option=_name(option),
                images_per_second=option.images_per_second,
                reason=_why_not(chooser, option, chosen),
            )
            for option in options
            if option is not chosen
        ),
        predicted={
            "images_per_second": chosen.images_per_second,
            "images_per_second_low": chosen.low,
            "images_per_second_high": chosen.high,
            "update_seconds": cost.seconds,
            "speedup": chosen.speedup,
            "bytes_sent": cost.bytes_sent,
            "memory_mb": chosen.memory_mb,
            **{
                f"{term}_seconds": getattr(cost, term)
                for term in ("compute", "exposed", "bubble", "waiting", "data")
            },
        },
        reason=f"{_name(chosen)}: {cost.seconds:.3g} s per update, {_ratio(chosen.speedup)}",
        option=chosen,
        plain_bytes=2 * (len(chosen.hosts) - 1) / len(chosen.hosts) * chooser.model.parameter_bytes,
    )


def _samples(option: Option, chooser: _Chooser) -> list[int]:
    """Samples per host, in the chooser's order; a pipeline's nodes all see the whole batch."""
    if not option.cost.portions:
        return [option.cost.batch] * len(option.hosts)
    found = [0] * len(option.hosts)
    portion: Portion
    for portion in option.cost.portions:
        found[portion.kind] = portion.samples
    return found


def _ratio(speedup: float) -> str:
    return "one machine alone" if speedup == 1 else f"{speedup:.2f}x the fastest alone"


def _why_not(chooser: _Chooser, option: Option, chosen: Option) -> str:
    time = f"{option.cost.seconds:.3g} s per update of {option.cost.batch}"
    if not chooser.fits(option):
        return f"{time}; needs {option.memory_mb:,.0f} MB on a node, more than is free"
    if not chooser.rules.runs(option):
        return f"{time}; {cause(option, chooser.model)}; {NOT_ASKED}"
    if not chooser.rules.allows(option):
        word = "async" if option.exchange.asynchronous else option.exchange.kind
        return f"{time}; {cause(option, chooser.model)}; taken only if {word!r} is allowed"
    ratio = chosen.images_per_second / option.images_per_second
    if abs(ratio - 1) <= SAME:
        return f"{time}; as fast, but with more machines or a less simple exchange"
    if len(option.hosts) == 1:
        return f"{time}; {ratio:.2f}x slower: one machine has less to compute with"
    return f"{time}; {ratio:.2f}x slower, because {cause(option, chooser.model)}"


def _left_out(
    chooser: _Chooser,
    options: Sequence[Option],
    chosen: Option,
    used: Sequence[str],
) -> dict[str, str]:
    """Per machine that does not train, what would happen with it."""
    found = {}
    for host in chooser.hosts:
        if host.name in used:
            continue
        teams = [o for o in options if host.name in o.hosts and len(o.hosts) > 1]
        valid = [option for option in teams if chooser.may_take(option)] or teams
        if not valid or host.name in chosen.hosts:
            found[host.name] = "so slow that no sample of a batch is left for it"
            continue
        with_it = max(valid, key=lambda option: option.images_per_second)
        change = with_it.images_per_second / chosen.images_per_second
        found[host.name] = (
            f"with it {rate(with_it.images_per_second)} images/s instead of"
            f" {rate(chosen.images_per_second)} ({change:.2f}x), because"
            f" {cause(with_it, chooser.model)}"
        )
    return found


def explain_nodes(choice: NodeChoice) -> str:
    """Five lines for a person who has never done this."""
    names = [node.host for node in choice.nodes]
    total = len(names) + len(choice.left_out)
    machine = "machine" if total == 1 else "machines"
    lines = [f"Machines: {', '.join(names)} ({len(names)} of {total} {machine})."]
    lines.append(_shares_line(choice))
    lines.append(_exchange_line(choice))
    cost, option = choice.option.cost, choice.option
    parts = {
        "computing": cost.compute,
        "waiting for the network": cost.exposed,
        "waiting for each other": cost.waiting + cost.bubble,
        "waiting for data": cost.data,
    }
    where = ", ".join(
        f"{seconds / cost.seconds:.0%} {name}"
        for name, seconds in parts.items()
        if seconds >= 0.005 * cost.seconds
    )
    gain = ""
    if len(names) > 1:
        gain = (
            f", {option.speedup:.2f}x {names[0]} alone ({option.speedup_low:.2f} to"
            f" {option.speedup_high:.2f})"
        )
    lines.append(
        f"Expected: {rate(option.images_per_second)} images/s{gain}; time goes to {where}."
    )
    lines.append(_others_line(choice))
    return "\n".join(lines)


def _shares_line(choice: NodeChoice) -> str:
    if len(choice.nodes) == 1:
        return f"Share: all {choice.batch_size} samples of an update go to {choice.nodes[0].host}."
    if choice.exchange.kind == "pipeline":
        return "Share: each machine holds some of the layers; every sample passes all of them."
    pairs = list(zip(choice.nodes, choice.samples, strict=True))
    listed = ", ".join(f"{node.host} takes {count}" for node, count in pairs[:6])
    more = ", ..." if len(pairs) > 6 else ""
    why = "they are equally fast" if len(set(choice.samples)) == 1 else "so all are ready together"
    return f"Share: of {choice.batch_size} samples per update {listed}{more}: {why}."


def _exchange_line(choice: NodeChoice) -> str:
    if len(choice.nodes) == 1:
        return "Exchange: none is needed on one machine."
    sent = choice.option.cost.bytes_sent / 1e6
    text = f"Exchange: {choice.exchange.name}, {sent:,.3g} MB per machine and update"
    split = [name for name, mode in choice.partition.items() if mode == "feature"]
    if split:
        return (
            f"{text} instead of {choice.plain_bytes / 1e6:,.3g}, because {', '.join(split)} are"
            " divided between machines."
        )
    return f"{text}."


def _others_line(choice: NodeChoice) -> str:
    if choice.left_out:
        name, why = next(iter(choice.left_out.items()))
        rest = len(choice.left_out) - 1
        more = f" (and {rest} more)" if rest else ""
        return f"Left out: {name}{more}: {why}."
    if not choice.rejected:
        return "Nothing else was possible."
    words = ("not exact", NOT_ASKED)
    near = [r for r in choice.rejected if not any(word in r.reason for word in words)]
    other = max(near or choice.rejected, key=lambda r: r.images_per_second or 0.0)
    return f"Next best: {other.option}: {other.reason}."
