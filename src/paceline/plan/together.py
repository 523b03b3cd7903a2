"""The plan for hosts that are there: what was asked for, or what each one's race found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from paceline.errors import UnsupportedError
from paceline.plan.candidates import MemoryFormat, Precision
from paceline.plan.local import asked_node
from paceline.schema import Candidate, Config, NodePlan, Plan, Race, Rejected
from paceline.schema.support import Combination, refusal, strategy_name


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


def plan_from_races(config: Config, sites: Sequence[NodeSite], races: Mapping[int, Race]) -> Plan:
    """Each node its own fastest strategy, all with the same numerics: those best in sum."""
    exchange = _exchange(config)
    if len(sites) > 1:
        races = {number: _able(race, exchange, config) for number, race in races.items()}
    numerics = best_numerics(config, races)
    speeds: dict[int, float] = {}
    nodes: list[NodePlan] = []
    rejected: list[Rejected] = []
    for number, site in enumerate(sites):
        if number not in races:
            nodes.append(_placed(NodePlan(), site))
            continue
        chosen = _best(races[number], numerics)
        assert chosen is not None, "best_numerics takes only what ran on every node"
        speeds[number] = chosen.images_per_second or 0.0
        nodes.append(_placed(chosen.node, site))
        rejected += [
            Rejected(
                option=f"{site.host}: {entry.name}",
                images_per_second=entry.images_per_second,
                reason=entry.reason,
            )
            for entry in races[number].candidates
            if entry.name != chosen.name
        ]
    total = sum(speeds.values())
    batch = _batch(config, nodes, sites)
    return Plan(
        nodes=_with_shares(nodes, sites, speeds),
        exchange=exchange,
        precision=cast(Precision, numerics[0]),
        memory_format=cast(MemoryFormat, numerics[1]),
        compile=config.numerics.compile,
        batch_size=batch,
        reason=f"each host's fastest with {numerics[0]} and {numerics[1]}, which are best in sum",
        predicted={"images_per_second": total, "update_seconds": batch / total if total else 0.0},
        rejected=tuple(rejected),
    )


def best_numerics(config: Config, races: Mapping[int, Race]) -> tuple[str, str]:
    """The precision and memory format with which all nodes together are fastest."""
    allowed = (*config.numerics.allow, config.numerics.precision)
    totals: dict[tuple[str, str], float] = {}
    for race in races.values():
        for entry in race.candidates:
            numerics = (entry.precision, entry.memory_format)
            if not (entry.exact or entry.precision in allowed) or numerics in totals:
                continue
            best = [_best(each, numerics) for each in races.values()]
            if all(best):
                totals[numerics] = sum(each.images_per_second or 0.0 for each in best if each)
    return max(totals, key=lambda numerics: totals[numerics], default=("fp32", "contiguous"))


def race_batches(config: Config, sites: Sequence[NodeSite]) -> dict[int, int]:
    """What each node would compute per update if all were alike, or as its share says."""
    working = [number for number, site in enumerate(sites) if _works(site)]
    if config.workload.batch_per_worker is not None:
        return dict.fromkeys(working, config.workload.batch_per_worker)
    batch = config.workload.global_batch(1)
    shares = {number: 1.0 if (s := sites[number].share) is None else s for number in working}
    total = sum(shares.values())
    return {number: max(1, round(batch * shares[number] / total)) for number in working}


def _able(race: Race, exchange: str, config: Config) -> Race:
    """The race without what does not go with this exchange over several nodes."""
    compression = config.exchange.compression

    def why_not(entry: Candidate) -> str:
        strategy = strategy_name(entry.node)
        return refusal(Combination(strategy=strategy, exchange=exchange, compression=compression))

    able = tuple(entry for entry in race.candidates if not why_not(entry))
    if not any(entry.images_per_second for entry in able):
        asked = " or ".join(dict.fromkeys(strategy_name(entry.node) for entry in race.candidates))
        raise UnsupportedError(f"{asked} was raced, but {why_not(race.candidates[0])}")
    return dataclasses.replace(race, candidates=able)


def _works(site: NodeSite) -> bool:
    return not site.serves and site.share != 0


def _best(race: Race, numerics: tuple[str, str]) -> Candidate | None:
    """The race's own choice where its numerics fit, else the fastest that fits."""
    fitting = [
        entry
        for entry in race.candidates
        if entry.images_per_second and (entry.precision, entry.memory_format) == numerics
    ]
    chosen = [entry for entry in fitting if entry.chosen]
    return max(chosen or fitting, key=lambda entry: entry.images_per_second or 0, default=None)


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
