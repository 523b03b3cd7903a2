"""Which nodes train together and how they agree, as options of the pilot. Pure; no torch.

What an update of each is expected to take comes of what is known so far: the speed at which every
node computes, and what the network between them carries.

    seconds = computing + what of the exchange the backward pass does not hide

Nothing but the order of trials follows from it: each is tried before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.plan.candidates import MemoryFormat, Precision, variants
from paceline.plan.hopes import HOPES
from paceline.plan.pilot import Option
from paceline.schema import Config, Plan
from paceline.schema.support import SUMS

HIDDEN = 0.6
"""Part of the computing under which gradients travel: the backward pass is about two thirds."""
PROOF_UPDATES = 3
"""Updates on a copy before a plan's first leg: two for the weights, one for BatchNorm."""
MOST_TEAMS = 6
"""Numbers of nodes that are tried together: of many nodes, all, one less, and halves."""
LISTED = 4
"""Hosts that a name lists; of more it gives the number."""


@dataclass(frozen=True, kw_only=True)
class TeamKnowledge:
    """What is known of the nodes and of what joins them."""

    speeds: tuple[float, ...]
    """Samples per second that each node computes, relative to the others until it is measured."""
    wire: float
    """Bytes per second that a node sends while all exchange."""
    weights: float
    """Bytes of the gradients of one update."""
    state: float
    """Bytes that pass from leg to leg: weights and the optimizer's state."""
    setup: float
    """Seconds to build a plan on a node."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an update, by the name of the way, as it was last timed."""
    setups: Mapping[str, float] = field(default_factory=dict)
    """Seconds that taking over took, by the name of the way."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Some nodes, and how they agree."""

    members: tuple[int, ...]
    exchange: str = "allreduce"
    split: bool = False
    """Linear layers are split over the nodes."""
    name: str = ""

    def bytes_sent(
        self, seen: TeamKnowledge, split_bytes: Mapping[tuple[int, ...], float]
    ) -> float:
        """What the node that sends most sends per update."""
        count = len(self.members)
        if self.split:
            return split_bytes[self.members]
        if self.exchange == "reduce_broadcast":  # the first node has the others' and its own turn
            return 2 * (count - 1) * seen.weights
        return 2 * (count - 1) / count * seen.weights


def labels(everyone: Plan) -> list[str]:
    """A name for every node: its host's, with a number where a host has several."""
    hosts = [node.host for node in everyone.nodes]
    return [
        host if hosts.count(host) == 1 else f"{host}-{hosts[:number].count(host)}"
        for number, host in enumerate(hosts)
    ]


def team_name(everyone: Plan, members: Sequence[int]) -> str:
    """Some nodes in words.

    >>> from paceline.schema import NodePlan
    >>> plan = Plan(nodes=tuple(NodePlan(host=name) for name in "abc"))
    >>> team_name(plan, [0]), team_name(plan, [0, 2]), team_name(plan, [0, 1, 2])
    ('a alone', 'a and c', 'a, b and c')
    """
    names = [labels(everyone)[member] for member in members]
    if len(names) == 1:
        return f"{names[0]} alone"
    if len(names) > LISTED:
        return f"{len(names)} of {len(everyone.nodes)} hosts"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def ways(
    config: Config,
    everyone: Plan,
    speeds: Sequence[float],
    *,
    splittable: Sequence[tuple[int, ...]] = (),
    writers: Sequence[int] = (0,),
) -> list[Way]:
    """Every team, with every exact exchange that the configuration leaves open, simplest first.

    `splittable`: teams for which some layers can be split; `writers`: see `teams`.
    """
    settings = config.exchange
    kinds = SUMS if settings.kind == "auto" else (settings.kind,)
    found = []
    for members in teams(speeds, [node.share for node in everyone.nodes], writers):
        team = team_name(everyone, members)
        if len(members) == 1:
            found.append(Way(members=members, name=team))
            continue
        if settings.partition != "manual":
            found += [
                Way(members=members, exchange=kind, name=_way_name(team, kind, split=False))
                for kind in kinds
            ]
        if members in splittable:
            kind = kinds[0]
            name = _way_name(team, kind, split=True)
            found.append(Way(members=members, exchange=kind, split=True, name=name))
    return found


def _way_name(team: str, kind: str, *, split: bool) -> str:
    words = [team] + ([kind] if kind != "allreduce" else []) + (["split layers"] if split else [])
    return ", ".join(words)


def teams(
    speeds: Sequence[float], shares: Sequence[float], writers: Sequence[int] = (0,)
) -> list[tuple[int, ...]]:
    """The first node alone, and the fastest one, two, ... of all; those with a share of 0 rest.

    The first of a team writes what all share. Only `writers` can: a team that would begin with
    another node has the first node too.

    >>> teams([1.0, 1.0, 3.0], [1.0, 1.0, 1.0])
    [(0,), (0, 2), (0, 1, 2)]
    >>> teams([1.0, 1.0, 3.0], [1.0, 1.0, 1.0], writers=(0, 1, 2))
    [(0,), (2,), (0, 2), (0, 1, 2)]
    """
    able = [number for number, share in enumerate(shares) if share > 0]
    fastest = sorted(able, key=lambda number: -speeds[number])
    counts: Sequence[int] = range(1, len(able) + 1)
    if len(counts) > MOST_TEAMS:
        halves = {len(able) // 2**power for power in range(1, MOST_TEAMS - 2)}
        counts = sorted({1, len(able) - 1, len(able), *halves})
    found: list[tuple[int, ...]] = [(0,)]
    for count in counts:
        members = tuple(sorted(fastest[:count]))
        if members[0] not in writers:
            members = (0, *members)
        if members not in found:
            found.append(members)
    return found


def seconds_of_way(
    way: Way, seen: TeamKnowledge, batch: int, split_bytes: Mapping[tuple[int, ...], float]
) -> float:
    """What an update is expected to take."""
    computing = batch / sum(seen.speeds[member] for member in way.members)
    if len(way.members) == 1:
        return computing
    sending = way.bytes_sent(seen, split_bytes) / seen.wire
    return computing + max(0.0, sending - HIDDEN * computing)


def setup_of_way(
    way: Way, seen: TeamKnowledge, batch: int, split_bytes: Mapping[tuple[int, ...], float]
) -> float:
    """What taking over is expected to take: building it, its proof, and the state's way."""
    if way.name in seen.setups:
        return seen.setups[way.name]
    if way.members == (0,):
        return seen.setup
    if len(way.members) == 1:
        return seen.setup + 2 * seen.state / seen.wire  # there and, when that was all, back
    update = seconds_of_way(way, seen, batch, split_bytes)
    return 2 * seen.setup + PROOF_UPDATES * update + seen.state / seen.wire


def options_over(
    config: Config,
    everyone: Plan,
    seen: TeamKnowledge,
    *,
    images: bool,
    split: Mapping[tuple[int, ...], tuple[tuple[str, ...], float]],
    writers: Sequence[int] = (0,),
    rounds: bool = True,
) -> list[tuple[Option, Way, tuple[Precision, MemoryFormat]]]:
    """Every plan that may be tried over the nodes of `everyone`, the simplest first.

    `split`: for teams whose layers can be split, which, and the bytes that are then sent. `rounds`:
    whether bf16 is worth a trial where it is allowed.
    """
    allowed = {config.numerics.precision, *(config.numerics.allow if rounds else ())}
    split_bytes = {members: sent for members, (_, sent) in split.items()}
    found = []
    for way in ways(config, everyone, seen.speeds, splittable=tuple(split), writers=writers):
        usual = seconds_of_way(way, seen, everyone.batch_size, split_bytes)
        setup = setup_of_way(way, seen, everyone.batch_size, split_bytes)
        for precision, memory_format in variants(config.numerics, images=images):
            if precision == "bf16" and precision not in allowed:
                continue
            factors = {way.name: seen.measured.get(way.name, usual)}
            words = [way.name]
            for trait, plain in ((memory_format, "contiguous"), (precision, "fp32")):
                if trait != plain:
                    factors[trait] = HOPES[trait]
                    words.append(trait)
            option = Option(name=", ".join(words), factors=factors, setup_seconds=setup)
            found.append((option, way, (precision, memory_format)))
    return sorted(
        found,
        key=lambda each: (len(each[1].members), each[1].members[0], each[0].name.count(", ")),
    )


def plan_of_way(
    everyone: Plan,
    way: Way,
    numerics: tuple[Precision, MemoryFormat],
    *,
    speeds: Sequence[float],
    layers: tuple[str, ...] = (),
) -> Plan:
    """The plan of a way: its nodes, with shares in proportion to their speeds."""
    largest = max(speeds[member] for member in way.members)
    nodes = [
        dataclasses.replace(everyone.nodes[member], share=speeds[member] / largest)
        for member in way.members
    ]
    precision, memory_format = numerics
    return dataclasses.replace(
        everyone,
        nodes=tuple(nodes),
        exchange=way.exchange,
        partition="feature" if way.split else "none",
        feature_layers=layers if way.split else (),
        precision=precision,
        memory_format=memory_format,
        reason="",
        predicted={},
        rejected=(),
    )


def members_of(everyone: Plan, plan: Plan) -> tuple[int, ...] | None:
    """Which nodes a plan means; None where it has one that is not there."""
    found: list[int] = []
    for node in plan.nodes:
        same = (
            number
            for number, other in enumerate(everyone.nodes)
            if number not in found and (other.host, other.cores) == (node.host, node.cores)
        )
        number = next(same, None)
        if number is None:
            return None
        found.append(number)
    return tuple(found) or None
