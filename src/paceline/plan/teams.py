"""Which nodes train together and how they agree, as options of the pilot. Pure; no torch.

What an update of each is expected to take (`plan.prices`) comes of what is known so far: the speed
at which every node computes, the model, and what the network between them carries. A training knows
little when it begins, and learns from its legs; `paceline plan` knows what was measured before.

Nothing but the order of trials follows from it: each is tried before it is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from paceline.cost.compute import update_curve
from paceline.cost.exchanges import ExchangeCost
from paceline.cost.model import ModelCost
from paceline.cost.overlap import BUCKET
from paceline.cost.split import Chain
from paceline.cost.step import StepCost, TeamMember
from paceline.cost.transfer import Wire
from paceline.plan.candidates import MemoryFormat, Precision, structures, variants
from paceline.plan.hopes import HOPES
from paceline.plan.pilot import OBVIOUS, PROVING, Option
from paceline.plan.prices import Factors, Terms, best_bucket, exchanges, price
from paceline.schema import Config, ExchangeSettings, NodePlan, Plan
from paceline.schema.strategies import describe
from paceline.text import listed

PROOF_UPDATES = 3
"""Updates on a copy before a plan's first leg: two for the weights, one for BatchNorm."""
MOST_TEAMS = 6
"""Numbers of nodes that are tried together: of many nodes, all, one less, and halves."""
LISTED = 4
"""Hosts that a name lists; of more it gives the number."""


@dataclass(frozen=True, kw_only=True)
class TeamKnowledge:
    """What is known of the nodes and of what joins them."""

    nodes: tuple[TeamMember, ...]
    """How fast each computes."""
    wire: Wire
    """What joins all of them."""
    wires: Mapping[tuple[int, ...], Wire] = field(default_factory=dict)
    """What joins some of them, where that was measured apart."""
    model: ModelCost
    chains: tuple[Chain, ...] = ()
    """Linear layers that may be split, where that is known."""
    batch: int
    bucket_bytes: float = BUCKET
    """Size of buckets where a way says nothing else."""
    state: float = 0.0
    """Bytes that pass from leg to leg: weights and the optimizer's state."""
    setup: float = 0.0
    """Seconds to build a plan on a node."""
    factors: Factors = field(default_factory=dict)
    """Per exchange, what past runs took against what was predicted."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an update, by the name of the way, as it was last timed."""
    setups: Mapping[str, float] = field(default_factory=dict)
    """Seconds that taking over took, by the name of the way."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Samples per second that each node computes."""
        return tuple(self.batch / node.curve.seconds(self.batch) for node in self.nodes)

    def terms(self, members: Sequence[int], *, value_bytes: int = 4) -> Terms:
        """On what terms some of the nodes would train."""
        return Terms(
            team=tuple(self.nodes[member] for member in members),
            wire=self.wires.get(tuple(members), self.wire),
            model=self.model,
            batch=self.batch,
            chains=self.chains,
            value_bytes=value_bytes,
            factors=self.factors,
        )


def at_speed(speed: float) -> TeamMember:
    """A node of which nothing but its speed is known, in samples per second."""
    return TeamMember(update_curve([(1.0, 1.0 / speed)]))


@dataclass(frozen=True, kw_only=True)
class Way:
    """Some nodes, and how they agree."""

    members: tuple[int, ...]
    exchange: ExchangeCost = field(default_factory=ExchangeCost)
    bucket_mb: float | None = None
    """Megabytes of gradient that leave together, where that is not as usual."""
    name: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """Linear layers that are split over the nodes."""
        return self.exchange.split.layers if self.exchange.split is not None else ()


class Inside(NamedTuple):
    """How nodes use their own cores, where they are not all threads of one process."""

    strategy: str
    threads: int
    """Of each worker."""


class Manner(NamedTuple):
    """How the nodes of a way compute."""

    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    inside: Inside | None = None


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
    return listed(names)


def ways(
    config: Config, everyone: Plan, seen: TeamKnowledge, *, writers: Sequence[int] = (0,)
) -> list[Way]:
    """Every team, with every exchange that the configuration leaves open, simplest first.

    `writers`: see `teams`.
    """
    is_open = config.exchange.bucket_mb == ExchangeSettings().bucket_mb
    found = []
    for members in teams(seen.speeds, [node.share for node in everyone.nodes], writers):
        team, terms = team_name(everyone, members), seen.terms(members)
        for exchange in exchanges(config.exchange, terms):
            sizes: list[float | None] = [None]
            if is_open and (size := best_bucket(terms, exchange)) is not None:
                sizes.append(size / 2**20)
            for bucket_mb in sizes:
                name = _way_name(team, exchange, bucket_mb)
                found.append(
                    Way(members=members, exchange=exchange, bucket_mb=bucket_mb, name=name)
                )
    return found


def _way_name(team: str, exchange: ExchangeCost, bucket_mb: float | None = None) -> str:
    words = [team] + ([exchange.kind] if exchange.kind != "allreduce" else [])
    words += ["split layers"] if exchange.split is not None else []
    words += [f"buckets of {bucket_mb:g} MB"] if bucket_mb is not None else []
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


def cost_of_way(way: Way, seen: TeamKnowledge) -> StepCost:
    """What an update is expected to cost, by its parts."""
    bucket = seen.bucket_bytes if way.bucket_mb is None else way.bucket_mb * 2**20
    return price(seen.terms(way.members), way.exchange, bucket_bytes=bucket)


def seconds_of_way(way: Way, seen: TeamKnowledge, alike: Sequence[Way] = ()) -> float:
    """Seconds of an update: as it was last timed, or else as it is expected.

    Where the same nodes were timed in another way, only the difference of the prices counts: what
    one way took longer than its price, the others will too.
    """
    if way.name in seen.measured:
        return seen.measured[way.name]
    cost = cost_of_way(way, seen).seconds
    ratios = [
        seen.measured[other.name] / cost_of_way(other, seen).seconds
        for other in alike
        if other.members == way.members and other.name in seen.measured
    ]
    return cost * statistics.median(ratios) if ratios else cost


def going_on(
    mine: Way, lost: Collection[int], every: Sequence[Way], seen: TeamKnowledge, left: int
) -> Way | None:
    """The way that goes on at once after nodes were lost, of those that are left; None: of none.

    The same nodes and exchange without the lost ones, unless another team is obviously faster, by
    what is known of the nodes and of the network, and that pays for taking over in the updates that
    are left. Exchanges that were never timed wait for a trial, as ever; where all nodes of `mine`
    are there, so do teams.
    """
    members = tuple(member for member in mine.members if member not in lost)

    def is_known(way: Way) -> bool:
        usual = len(way.members) == 1 or way.exchange.kind == mine.exchange.kind
        is_plain = usual and not way.layers and way.bucket_mb is None
        return way.name in seen.measured or (is_plain and members != mine.members)

    known = [way for way in every if way.name == mine.name or is_known(way)]
    same = [way for way in known if way.name == mine.name]
    # Where the first of those that are left cannot write what all share, the first node joins them.
    for left_over in (members, (0, *members)):
        same += [way for way in known if way.members == left_over and is_known(way)]
    if not same:
        return min(known, key=lambda way: seconds_of_way(way, seen, every), default=None)
    took = seconds_of_way(same[0], seen, every)

    def brings(way: Way) -> float:
        saved = took - seconds_of_way(way, seen, every)
        return left * saved - setup_of_way(way, seen) if saved > OBVIOUS * took else 0.0

    best = max(known, key=brings, default=same[0])
    return best if brings(best) > 0 else same[0]


def rate_between(way: Way, seen: TeamKnowledge, seconds: float) -> float:
    """Bytes per second that the network carries if an update of a way takes so long.

    The price never rises with the rate: by bisection.
    """
    low, high = 0.0, 14.0
    while high - low > 0.005:
        middle = (low + high) / 2
        wire = dataclasses.replace(seen.wire, bandwidth=10**middle, both=10**middle)
        there = dataclasses.replace(seen, wire=wire, wires={})
        low, high = (middle, high) if cost_of_way(way, there).seconds > seconds else (low, middle)
    return float(10**high)


def setup_of_way(way: Way, seen: TeamKnowledge, inside: str = "") -> float:
    """What taking over is expected to take: building it, its proof, and the state's way.

    `inside`: how its nodes use their cores, by name.
    """
    if (name := setup_name(way, inside)) in seen.setups:
        return seen.setups[name]
    building = PROVING * seen.setup if inside else 0.0
    if way.members == (0,):
        return building or seen.setup
    passing = seen.state / seen.terms(way.members).wire.both
    if len(way.members) == 1:
        return max(building, seen.setup) + 2 * passing  # there and, when that was all, back
    proof = PROOF_UPDATES * cost_of_way(way, seen).seconds
    return max(building, 2 * seen.setup) + proof + passing


def setup_name(way: Way, inside: str) -> str:
    """By what the seconds of taking over are kept."""
    return f"{way.name}, {inside}" if inside else way.name


def node_inside(node: NodePlan, inside: Inside | None, batch: int) -> NodePlan:
    """A node that uses its cores so; as it is where it cannot.

    >>> node_inside(NodePlan(strategy="threads", threads=4), Inside("processes", 2), 32).processes
    2
    """
    if inside is not None:
        for each in structures(node.threads, batch, elementwise=True):
            if (each.strategy, each.threads) == inside:
                return dataclasses.replace(each, host=node.host, share=node.share, cores=node.cores)
    return node


def insides(everyone: Plan, members: Sequence[int]) -> list[Inside]:
    """Ways in which nodes may use their cores besides as threads of one process."""
    found = [
        Inside(each.strategy, each.threads)
        for member in members
        for each in structures(
            everyone.nodes[member].threads, everyone.batch_size, elementwise=True
        )
        if each.strategy in HOPES
    ]
    return list(dict.fromkeys(found))


def inside_name(everyone: Plan, inside: Inside | None) -> str:
    """The same words for all teams, so that what one has shown is known of the others.

    >>> pair = tuple(NodePlan(strategy="threads", threads=n) for n in (2, 4))
    >>> inside_name(Plan(nodes=pair[:1]), Inside("processes", 1))
    'processes 2x1'
    >>> inside_name(Plan(nodes=pair), Inside("processes", 1))
    'processes of 1 thread'
    """
    if inside is None:
        return ""
    used = [node_inside(node, inside, everyone.batch_size) for node in everyone.nodes]
    names = {describe(node) for node in used if node.strategy == inside.strategy}
    if len(names) == 1:
        return names.pop()
    return f"{inside.strategy} of {inside.threads} thread{'s' * (inside.threads > 1)}"


def options_over(
    config: Config,
    everyone: Plan,
    seen: TeamKnowledge,
    *,
    images: bool,
    writers: Sequence[int] = (0,),
    rounds: bool = True,
    divisible: bool = False,
    learned: Mapping[str, float] = MappingProxyType({}),
) -> list[tuple[Option, Way, Manner]]:
    """Every plan that may be tried over the nodes of `everyone`, the simplest first.

    `rounds`: whether bf16 is worth a trial where it is allowed; `divisible`: whether a node may
    divide its share among workers of its own; `learned`: factors from past trainings of these.
    """
    allowed = {config.numerics.precision, *(config.numerics.allow if rounds else ())}
    found = []
    every = ways(config, everyone, seen, writers=writers)
    for way in every:
        seconds = seconds_of_way(way, seen, every)
        # Layers are split only where a node is one rank with one copy of the model.
        own = insides(everyone, way.members) if divisible and not way.layers else []
        for inside, (precision, memory_format) in itertools.product(
            [None, *own], variants(config.numerics, images=images)
        ):
            if precision == "bf16" and precision not in allowed:
                continue
            within = inside_name(everyone, inside)
            hopes = {within: HOPES[inside.strategy]} if inside is not None else {}
            for trait, plain in ((memory_format, "contiguous"), (precision, "fp32")):
                if trait != plain:
                    hopes[trait] = HOPES[trait]
            factors = {trait: learned.get(trait, hope) for trait, hope in hopes.items()}
            nodes = [
                node_inside(everyone.nodes[n], inside, everyone.batch_size) for n in way.members
            ]
            option = Option(
                name=", ".join([way.name, *hopes]),
                factors={way.name: seconds, **factors},
                ranks=max((node.ranks for node in nodes if node.shares_memory), default=0),
                setup_seconds=setup_of_way(way, seen, within),
            )
            found.append((option, way, Manner(precision, memory_format, inside)))
    return sorted(
        found,
        key=lambda each: (len(each[1].members), each[1].members[0], each[0].name.count(", ")),
    )


def plan_of_way(everyone: Plan, way: Way, manner: Manner, *, speeds: Sequence[float]) -> Plan:
    """The plan of a way: its nodes, with shares in proportion to their speeds."""
    largest = max(speeds[member] for member in way.members)
    nodes = [
        dataclasses.replace(
            node_inside(everyone.nodes[member], manner.inside, everyone.batch_size),
            share=speeds[member] / largest,
        )
        for member in way.members
    ]
    return dataclasses.replace(
        everyone,
        nodes=tuple(nodes),
        exchange=way.exchange.kind,
        partition="feature" if way.layers else "none",
        feature_layers=way.layers,
        bucket_mb=way.bucket_mb,
        precision=manner.precision,
        memory_format=manner.memory_format,
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
