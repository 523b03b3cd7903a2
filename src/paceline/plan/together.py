"""The first plan for hosts that are there: what was asked for, or threads on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.plan.local import asked_node, asked_plan
from paceline.schema import Config, NodePlan, Plan
from paceline.schema.support import SUMS


@dataclass(frozen=True, kw_only=True)
class NodeSite:
    """Where a node will run, as far as planning must know."""

    host: str
    usable: int
    """Cores' worth of threads that make sense there."""
    cores: tuple[int, ...] = ()
    """Cores that it is kept to; all that it sees when empty."""
    share: float | None = None
    """Given by hand; None: in proportion to its speed."""
    serves: bool = False
    """Holds parameters and computes nothing."""


def plan_as_asked(config: Config, sites: Sequence[NodeSite], *, elementwise: bool = True) -> Plan:
    """The same strategy on every node, with each node's own number of cores."""
    nodes = [
        _placed(asked_node(config.local, site.usable, elementwise=elementwise), site)
        for site in sites
    ]
    numerics = config.numerics
    return Plan(
        nodes=_with_shares(nodes, sites, {}),
        exchange=_exchange(config),
        precision="fp32" if numerics.precision == "auto" else numerics.precision,
        memory_format=(
            "contiguous" if numerics.memory_format == "auto" else numerics.memory_format
        ),
        compile=numerics.compile,
        batch_size=_batch(config, nodes, sites),
        reason=f"local.strategy = {config.local.strategy!r} was asked for",
    )


def first_plan(config: Config, sites: Sequence[NodeSite], *, elementwise: bool = True) -> Plan:
    """What hosts begin with of which nothing else is known; the same for every way to start them.

    As was asked for, or threads on all cores of every node. Shares are given by hand, or go by the
    cores that a node can use, until they follow what is measured.
    """
    if config.local.strategy != "auto":
        return plan_as_asked(config, sites, elementwise=elementwise)
    nodes = [plain_node(site.host, 1 if site.serves else site.usable, site.cores) for site in sites]
    plan = asked_plan(config, nodes[0], "nothing is known of these hosts yet: threads on each")
    return dataclasses.replace(
        plan,
        nodes=_with_shares(nodes, sites, dict(enumerate(float(site.usable) for site in sites))),
        exchange=_exchange(config),
        batch_size=_batch(config, nodes, sites),
    )


def trains_in_legs(config: Config, plan: Plan, *, more: bool = False) -> bool:
    """Whether the pilot may choose which nodes train and how: nothing that it decides was named.

    Exchanges that give other weights than one process stay as they were asked for, and a model is
    compiled once. The first node leads, so it must have a share. `more`: others may come.
    """
    settings = config.exchange
    free = config.local.strategy == "auto" and settings.kind in ("auto", *SUMS)
    plain = settings.compression == "none" and not config.numerics.compile
    return free and plain and (more or len(plan.nodes) > 1) and plan.nodes[0].share > 0


def plain_node(host: str, usable: int, cores: tuple[int, ...] = ()) -> NodePlan:
    """What a node does of which nothing is known: all of its cores as threads of one process."""
    if usable > 1:
        return NodePlan(host=host, strategy="threads", threads=usable, cores=cores)
    return NodePlan(host=host, cores=cores)


def _works(site: NodeSite) -> bool:
    return not site.serves and site.share != 0


def _placed(node: NodePlan, site: NodeSite) -> NodePlan:
    return dataclasses.replace(node, host=site.host, cores=site.cores)


def _with_shares(
    nodes: Sequence[NodePlan], sites: Sequence[NodeSite], speeds: Mapping[int, float]
) -> tuple[NodePlan, ...]:
    """By hand, else in proportion to speed, else equal; the largest is 1."""
    shares = []
    for number, site in enumerate(sites):
        if site.serves:
            shares.append(0.0)
        elif site.share is not None:
            shares.append(site.share)
        else:
            shares.append(speeds.get(number, 0.0) if speeds else 1.0)
    largest = max(shares) or 1.0
    return tuple(
        dataclasses.replace(node, share=share / largest)
        for node, share in zip(nodes, shares, strict=True)
    )


def _batch(config: Config, nodes: Sequence[NodePlan], sites: Sequence[NodeSite]) -> int:
    workers = sum(n.workers for n, site in zip(nodes, sites, strict=True) if _works(site))
    return config.workload.global_batch(workers)


def _exchange(config: Config) -> str:
    return "allreduce" if config.exchange.kind == "auto" else config.exchange.kind
