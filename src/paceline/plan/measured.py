"""The plan that a training should end with on measured machines, and what a plan at hand takes.

Pure. Options and prices are those of a training (`plan.teams`, `plan.prices`); what a training has
to find out, machines.json tells before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

from paceline.cost.compute import host_curve
from paceline.cost.exchanges import ExchangeCost, Kind
from paceline.cost.model import host_model
from paceline.cost.step import StepCost, TeamMember
from paceline.cost.transfer import slowest_wire
from paceline.errors import ConfigError, StrategyError
from paceline.plan.candidates import MemoryFormat, Precision
from paceline.plan.explained import Considered, asked_lines, left_out, lines, why_not
from paceline.plan.prices import (
    TERMS,
    Factors,
    alone_rate,
    factor_of,
    member_of,
    named_exchange,
    node_memory,
    price,
    quickest,
    split_of,
    with_interval,
)
from paceline.plan.teams import Manner, TeamKnowledge, cost_of_way, plan_of_way, teams, ways
from paceline.schema import Config, ExchangeSettings, Plan, Rejected
from paceline.schema.machines import Level, Machines, MeasuredHost
from paceline.schema.support import SUMS


def everyone_of(config: Config, machines: Machines) -> Plan:
    """All measured machines with the local strategy that won on each, before anything is chosen."""
    if not machines.hosts:
        raise ConfigError("machines.json has no hosts: measure at least one")
    precision, memory_format = _numerics(machines.hosts)
    nodes = tuple(
        dataclasses.replace(host.node, host=_real_name(host), share=1.0) for host in machines.hosts
    )
    return Plan(
        nodes=nodes,
        exchange="allreduce" if config.exchange.kind == "auto" else config.exchange.kind,
        precision=cast(Precision, precision),
        memory_format=cast(MemoryFormat, memory_format),
        compile=config.numerics.compile,
        batch_size=machines.workload.batch(len(machines.hosts)),
    )


def _real_name(host: MeasuredHost) -> str:
    """Of the host; machines.json tells slots of one host apart by other names."""
    # A machine that measured itself calls its node by the plan's default name.
    named = host.node.host != "localhost" or host.name.startswith("localhost")
    return host.node.host if named else host.name


def _numerics(hosts: Sequence[MeasuredHost]) -> tuple[str, str]:
    """One precision and memory format for all: those with most speed behind them."""
    speeds: dict[tuple[str, str], float] = {}
    for host in hosts:
        curve, key = host_curve(host), (host.precision, host.memory_format)
        size = curve.points[-1][0]
        speeds[key] = speeds.get(key, 0.0) + size / curve.seconds(size)
    return max(speeds, key=lambda key: speeds[key])


def seen_of(
    config: Config,
    machines: Machines,
    factors: Factors,
    computing: Level = "median",
    wire: Level = "median",
) -> TeamKnowledge:
    """What machines.json tells, in the words of a training that has seen the same."""
    names = [host.name for host in machines.hosts]
    nodes = tuple(member_of(host, computing) for host in machines.hosts)
    batch = machines.workload.batch(len(names))
    speeds = [batch / node.curve.seconds(batch) for node in nodes]
    able = teams(speeds, [1.0] * len(names), range(len(names)))
    return TeamKnowledge(
        nodes=nodes,
        wire=slowest_wire(machines, names, wire),
        wires={
            members: slowest_wire(machines, [names[member] for member in members], wire)
            for members in able
        },
        model=host_model(_fastest(machines), machines.workload),
        chains=machines.workload.chains,
        batch=batch,
        bucket_bytes=config.exchange.bucket_mb * 2**20,
        factors=factors,
    )


def _fastest(machines: Machines) -> MeasuredHost:
    batch = machines.workload.batch(1)
    return min(machines.hosts, key=lambda host: host_curve(host).seconds(batch))


def considered(
    config: Config, machines: Machines, everyone: Plan, factors: Factors
) -> list[Considered]:
    """Every way that a training on these machines could take, the simplest first."""
    levels: tuple[Level, ...] = ("median", "low", "high")
    seen = {
        (computing, wire): seen_of(config, machines, factors, computing, wire)
        for computing in levels
        for wire in levels
    }
    usual = seen["median", "median"]
    count = len(machines.hosts)
    found = []
    for way in ways(config, everyone, usual, writers=range(count)):
        priced = with_interval(
            way.exchange,
            lambda computing, wire, way=way: cost_of_way(way, seen[computing, wire]),  # type: ignore[misc]
            alone=lambda level: max(
                alone_rate(node, usual.batch, factors) for node in seen[level, "median"].nodes
            ),
        )
        hosts = [machines.hosts[member] for member in way.members]
        memory = max(
            node_memory(
                usual.model,
                machines.workload,
                host.node,
                priced.cost,
                way.exchange,
                precision=host.precision,
            )
            for host in hosts
        )
        free = [host.free_mb for host in hosts if host.free_mb]  # 0 where nobody knows
        priced = dataclasses.replace(priced, memory_mb=memory)
        found.append(Considered(way=way, priced=priced, fits=not free or memory <= min(free)))
    return sorted(found, key=lambda each: (len(each.way.members), each.name.count(", ")))


def choose(
    config: Config, machines: Machines, factors: Factors | None = None
) -> tuple[Plan, list[str]]:
    """The plan for measured machines, and five lines that explain it to a person.

    The quickest way of those that a training tries; of those within 2% of it the one with fewest
    machines and the simplest exchange. An exchange that is asked for by name and is no plain sum is
    used by all machines, as `train` does.
    """
    factors = factors or {}
    everyone = everyone_of(config, machines)
    if config.exchange.kind not in ("auto", *SUMS):
        plan = _as_asked(config, machines, everyone, factors)
        return plan, asked_lines(config, plan)
    options = considered(config, machines, everyone, factors)
    able = [option for option in options if option.fits]
    if not able:
        least = min(options, key=lambda option: option.priced.memory_mb)
        raise StrategyError(
            f"no way to train fits: {least.name} needs {least.priced.memory_mb:,.0f} MB on a node,"
            " and less is free; lower workload.batch_size, or add machines"
        )
    chosen = quickest(able, lambda option: option.seconds)
    plan = plan_of_choice(everyone, chosen, factors)
    away = left_out(machines, options, chosen)
    plan = dataclasses.replace(
        plan,
        rejected=(
            *(Rejected(option=f"{name} too", reason=why) for name, why in away.items()),
            *(
                Rejected(
                    option=option.name,
                    images_per_second=option.priced.images_per_second,
                    reason=why_not(option, chosen),
                )
                for option in options
                if option is not chosen
            ),
        ),
    )
    return plan, lines(machines, plan, chosen, away)


def plan_of_choice(everyone: Plan, chosen: Considered, factors: Factors) -> Plan:
    """A way as plan.json: shares in whole samples such that all are ready together."""
    way, priced = chosen.way, chosen.priced
    speeds = [0.0] * len(everyone.nodes)
    for portion in priced.cost.portions:
        speeds[way.members[portion.kind]] = float(portion.samples)
    working = tuple(member for member in way.members if speeds[member] > 0)
    plan = plan_of_way(
        everyone,
        dataclasses.replace(way, members=working),
        Manner(everyone.precision, everyone.memory_format),
        speeds=speeds,
    )
    cost = priced.cost
    gain = "one machine alone" if len(working) == 1 else f"{priced.speedup:.2f}x the fastest alone"
    return dataclasses.replace(
        plan,
        reason=f"{chosen.name}: {cost.seconds:.3g} s per update, {gain}",
        predicted={
            "images_per_second": cost.images_per_second,
            "images_per_second_low": priced.low,
            "images_per_second_high": priced.high,
            "speedup": priced.speedup,
            **_predicted(cost, priced.memory_mb),
            "calibration": factor_of(factors, way.exchange, len(way.members)),
        },
    )


def _predicted(cost: StepCost, memory_mb: float) -> dict[str, float]:
    return {
        "images_per_second": cost.images_per_second,
        "update_seconds": cost.seconds,
        "bytes_per_update": cost.bytes_sent,
        "memory_mb": memory_mb,
        **{f"{term}_seconds": getattr(cost, term) for term in TERMS},
    }


# --- a plan at hand -------------------------------------------------------------


def foresee(
    config: Config,
    machines: Machines,
    plan: Plan,
    names: Sequence[str],
    factors: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """What one update of `plan` will take on machines that were measured.

    `names` are the nodes' names in `machines`, in the plan's order. Shares are the plan's:
    what the slowest node takes longer than with the best shares is waiting.
    """
    working = [
        (machines.host(name), node)
        for name, node in zip(names, plan.nodes, strict=True)
        if node.role == "worker" and node.share > 0
    ]
    there = dataclasses.replace(machines, hosts=tuple(host for host, _ in working))
    seen = dataclasses.replace(
        seen_of(config, there, factors or {}), batch=plan.batch_size, chains=()
    )
    members = tuple(range(len(working)))
    exchange = _exchange_of(config.exchange, plan, machines, seen)
    served = [member_of(machines.host(names[place])) for place in plan.servers]
    cost = price(
        seen.terms(members),
        exchange,
        bucket_bytes=(plan.bucket_mb or config.exchange.bucket_mb) * 2**20,
        serving=min(served, key=lambda member: member.copying, default=None),
    )
    cost = _with_shares(cost, seen.nodes, [node.share for _, node in working])
    memory = node_memory(
        seen.model, machines.workload, working[0][1], cost, exchange, precision=plan.precision
    )
    found = _predicted(cost, memory) | {
        "calibration": factor_of(factors or {}, exchange, len(working))
    }
    known = plan.predicted.get("bytes_per_update")
    return found if known is None else found | {"bytes_per_update": known}


def _exchange_of(
    settings: ExchangeSettings, plan: Plan, machines: Machines, seen: TeamKnowledge
) -> ExchangeCost:
    if plan.exchange not in SUMS:
        if len(plan.nodes) == 1:
            return ExchangeCost()
        asked = dataclasses.replace(settings, kind=plan.exchange)
        exchange = named_exchange(asked, len(plan.nodes))
        return dataclasses.replace(exchange, servers=len(plan.servers) or 1)
    split = None
    if plan.feature_layers:
        manual = dataclasses.replace(settings, partition="manual", layers=plan.feature_layers)
        terms = seen.terms(range(len(seen.nodes)))
        split = split_of(manual, dataclasses.replace(terms, chains=machines.workload.chains))
    return ExchangeCost(kind=cast(Kind, plan.exchange), split=split)


def _with_shares(cost: StepCost, team: Sequence[TeamMember], shares: Sequence[float]) -> StepCost:
    """The same step with the plan's own shares."""
    total = sum(shares)
    if not cost.portions or total <= 0:
        return cost
    own = [
        member.curve.seconds(cost.batch * share / total)
        for member, share in zip(team, shares, strict=True)
    ]
    best = [team[portion.kind].curve.seconds(portion.samples) for portion in cost.portions]
    longer = max(0.0, max(own) - max(best))
    return dataclasses.replace(cost, waiting=cost.waiting + longer)


def _as_asked(config: Config, machines: Machines, everyone: Plan, factors: Factors) -> Plan:
    """All machines with the exchange that was named; the last ones serve where it needs servers."""
    batch = everyone.batch_size
    speeds = [batch / host_curve(host).seconds(batch) for host in machines.hosts]
    nodes = tuple(
        dataclasses.replace(node, share=speed / max(speeds))
        for node, speed in zip(everyone.nodes, speeds, strict=True)
    )
    plan = dataclasses.replace(everyone, nodes=nodes).with_servers(config.exchange.servers)
    names = [host.name for host in machines.hosts]
    return dataclasses.replace(
        plan,
        reason=f"exchange.kind = {config.exchange.kind!r} was asked for",
        predicted=foresee(config, machines, plan, names, factors),
    )
