"""Plans from measured machines, and what a plan at hand will take. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from paceline.cost.exchanges import ExchangeCost, Kind
from paceline.cost.model import ModelCost, host_model
from paceline.cost.partition import choose_modes
from paceline.cost.step import StepCost, TeamMember, step_cost
from paceline.cost.transfer import Wire, slowest_wire
from paceline.plan.candidates import MemoryFormat, Precision
from paceline.plan.nodes import NodeChoice
from paceline.plan.options import factor_of, member_of, node_memory, scaled
from paceline.plan.rules import BUCKETS
from paceline.schema import Config, ExchangeSettings, NodePlan, Plan, Rejected
from paceline.schema.machines import Machines, MeasuredHost

RUNNABLE = ("allreduce", "partition", "ring", "reduce_broadcast")
"""What is chosen from where nobody asks for a certain exchange: exact, and no node idle."""
TERMS = ("compute", "exposed", "bubble", "waiting", "data")


def kinds_of(settings: ExchangeSettings, *, split: bool = True) -> tuple[str, ...]:
    """Exchanges that a configuration leaves to choose from; `split`: layers may be split."""
    kinds = RUNNABLE if settings.kind == "auto" else (settings.kind, "partition")
    partition = split and settings.partition != "none" and settings.kind in ("auto", "allreduce")
    return tuple(kind for kind in kinds if kind != "partition" or partition)


def buckets_of(settings: ExchangeSettings) -> tuple[float, ...]:
    """Sizes of buckets to choose from: that which was asked for, else several."""
    if settings.bucket_mb != ExchangeSettings().bucket_mb:
        return (settings.bucket_mb * 2**20,)
    return BUCKETS


def allowed_by(settings: ExchangeSettings) -> tuple[str, ...]:
    """What is not exact but was asked for by its name."""
    if settings.kind == "averaging":
        return ("averaging",)
    return ("async",) if settings.kind == "parameter_server" and settings.mode == "async" else ()


def plan_from_choice(
    config: Config,
    machines: Machines,
    choice: NodeChoice,
    calibration: Mapping[str, float] | None = None,
) -> Plan:
    """The choice as plan.json, its nodes in the order of machines.json, servers last."""
    order = {host.name: place for place, host in enumerate(machines.hosts)}
    nodes = sorted(choice.nodes, key=lambda node: order[node.host])
    left_out = dict(choice.left_out)
    if choice.exchange.kind == "parameter_server" and len(choice.option.hosts) > 1:
        serving = choice.option.hosts[-choice.exchange.servers :]
        nodes += [NodePlan(host=name, role="server", share=0.0) for name in serving]
        left_out = {name: why for name, why in left_out.items() if name not in serving}
    names = {host.name: host.node.host for host in machines.hosts}
    precision, memory_format = _numerics([machines.host(node.host) for node in nodes])
    predicted = dict(choice.predicted)
    predicted["bytes_per_update"] = predicted.pop("bytes_sent")
    predicted["calibration"] = factor_of(
        calibration or {}, choice.exchange, len(choice.option.hosts)
    )
    away = [Rejected(option=f"{name} too", reason=why) for name, why in left_out.items()]
    return Plan(
        nodes=tuple(dataclasses.replace(n, host=_real_name(names, n.host)) for n in nodes),
        exchange=choice.exchange.kind,
        partition=cast(Literal["none", "feature"], choice.partition_name),
        feature_layers=choice.feature_layers,
        bucket_mb=choice.bucket_bytes / 2**20 if len(nodes) > 1 else None,
        precision=cast(Precision, precision),
        memory_format=cast(MemoryFormat, memory_format),
        compile=config.numerics.compile,
        batch_size=choice.batch_size,
        reason=choice.reason,
        predicted=predicted,
        rejected=(*away, *choice.rejected),
    )


def _real_name(names: Mapping[str, str], name: str) -> str:
    """Of the host; machines.json tells slots of one host apart by other names."""
    real = names[name]
    # A machine that measured itself calls its node by the plan's default name.
    return name if real == "localhost" and not name.startswith(real) else real


def _numerics(hosts: Sequence[MeasuredHost]) -> tuple[str, str]:
    """One precision and memory format for all: those with most speed behind them."""
    speeds: dict[tuple[str, str], float] = {}
    for host in hosts:
        largest = host.updates[-1]
        key = (host.precision, host.memory_format)
        rate = largest.batch_size / largest.seconds.median
        speeds[key] = speeds.get(key, 0.0) + rate
    return max(speeds, key=lambda key: speeds[key])


def foresee(
    config: Config,
    machines: Machines,
    plan: Plan,
    names: Sequence[str],
    calibration: Mapping[str, float] | None = None,
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
    model = host_model(working[0][0], machines.workload.optimizer_slots)
    wire = slowest_wire(machines, [host.name for host, _ in working])
    count = len(working)
    exchange = _exchange(config.exchange, plan, model, wire, count)
    team = [member_of(host) for host, _ in working]
    served = [member_of(machines.host(names[place])) for place in plan.servers]
    cost = step_cost(
        team,
        wire,
        model,
        exchange,
        plan.batch_size,
        bucket_bytes=(plan.bucket_mb or config.exchange.bucket_mb) * 2**20,
        serving=min(served, key=lambda member: member.copying, default=None),
    )
    factor = factor_of(calibration or {}, exchange, count)
    cost = scaled(_with_shares(cost, team, [node.share for _, node in working]), factor)
    memory = node_memory(
        model,
        machines.workload,
        working[0][1],
        precision=plan.precision,
        nodes=count,
        cost=cost,
        exchange=exchange,
    )
    return {
        "images_per_second": cost.images_per_second,
        "update_seconds": cost.seconds,
        "bytes_per_update": plan.predicted.get("bytes_per_update", cost.bytes_sent),
        "memory_mb": memory,
        "calibration": factor,
        **{f"{term}_seconds": getattr(cost, term) for term in TERMS},
    }


def _exchange(
    settings: ExchangeSettings, plan: Plan, model: ModelCost, wire: Wire, nodes: int
) -> ExchangeCost:
    modes: tuple[str, ...] = ()
    if plan.partition == "feature" and nodes > 1:
        best = choose_modes(model, wire, nodes, plan.batch_size)
        modes = tuple(
            "batch"
            if layer.name not in plan.feature_layers
            else (mode if mode != "batch" else "column")
            for layer, mode in zip(model.layers, best, strict=True)
        )
    kind = "allreduce" if modes else plan.exchange
    return ExchangeCost(
        kind=cast(Kind, kind),
        servers=len(plan.servers) or settings.servers,
        asynchronous=kind == "parameter_server" and settings.mode == "async",
        every=settings.every if kind == "averaging" else 1,
        partition=modes if any(mode != "batch" for mode in modes) else (),
    )


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
