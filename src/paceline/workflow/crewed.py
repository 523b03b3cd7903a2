"""What may be tried over nodes, as far as is known of them, and how it is begun."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from paceline.errors import ConfigError, LostError, ProofError, StrategyError, UnsupportedError
from paceline.local.tiles import has_bf16
from paceline.plan.candidates import MemoryFormat, Precision
from paceline.plan.pilot import Option
from paceline.plan.teams import (
    HIDDEN,
    TeamKnowledge,
    Way,
    labels,
    members_of,
    options_over,
    plan_of_way,
    seconds_of_way,
    teams,
)
from paceline.schema import NodePlan, Plan, decode
from paceline.schema.legs import Leg
from paceline.schema.plain import checked
from paceline.workflow.connections import probe
from paceline.workflow.nodes import BEGINS_TOGETHER, FEWEST_TIMED, Node
from paceline.workflow.partitioning import partitioned
from paceline.workflow.runners import Home, Went
from paceline.workflow.together import Together

_ARRIVAL = {"node": {}, "speed": float, "writes": bool}
Entry = tuple[Way, tuple[Precision, MemoryFormat]]


class Crewed:
    """What may be tried over the nodes, as far as is known, and how it is begun."""

    def __init__(
        self, node: Node, home: Home, everyone: Plan, writers: Sequence[int] = (0,)
    ) -> None:
        """`writers`: nodes that see the run directory of the first."""
        self.node, self.home, self.everyone, self.writers = node, home, everyone, writers
        self._timed: set[int] = set()
        """Nodes whose speed was measured, alone or in a leg."""
        self._said: dict[int, float] = {}
        """What nodes have said of their speed; 0 where they could not tell."""
        self._given: set[str] = set()
        """Plans whose shares come from a training before."""
        self._entries: dict[str, Entry] = {}
        self.plans: dict[str, Plan] = {}
        self._split: dict[tuple[int, ...], tuple[tuple[str, ...], float]] = {}
        self._looked: set[tuple[int, ...]] = set()
        self._runners = 0
        count = len(everyone.nodes)
        size, seconds = probe(node.network)
        model = home.parts.build_model()
        weights = sum(w.numel() * w.element_size() for w in model.parameters() if w.requires_grad)
        self.seen = TeamKnowledge(
            speeds=tuple(each.share for each in everyone.nodes),
            # Of a network that joins nobody yet nothing is known: who comes is tried.
            wire=2 * (count - 1) / count * size / max(seconds, 1e-9) if count > 1 else math.inf,
            weights=float(weights),
            state=3.0 * weights,
            setup=0.0,  # until the first plan is built
        )
        self.options: list[Option] = []
        if home.config.exchange.partition == "manual":
            # Layers that cannot be split are a mistake, which is said before anything is trained.
            self._look_at(tuple(range(count)))
        self.refresh()

    @property
    def batch(self) -> int:
        return self.everyone.batch_size

    @property
    def _fair_speeds(self) -> Sequence[float]:
        """What shares go by: measured speeds, unless they are to stay as they were given."""
        if self.home.config.exchange.rebalance:
            return self.seen.speeds
        return [node.share for node in self.everyone.nodes]

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    def members(self, name: str) -> tuple[int, ...]:
        return self._entries[name][0].members

    def refresh(self) -> None:
        """Every option, with what is expected of it now."""
        self._hear_speeds()
        images = len(self.home.parts.dataset.sample_shape) == 3
        found = options_over(
            self.home.config,
            self._present,
            self.seen,
            images=images,
            split=self._split,
            writers=self.writers,
            rounds=self.home.config.train.device == "cuda" or has_bf16(),
        )
        options = []
        for option, way, numerics in found:
            options.append(option)
            self._entries[option.name] = (way, numerics)
            if way.name not in self.seen.measured and option.name not in self._given:
                layers = self._split.get(way.members, ((), 0.0))[0]
                self.plans[option.name] = plan_of_way(
                    self.everyone, way, numerics, speeds=self._fair_speeds, layers=layers
                )
            elif option.name not in self.plans:
                like = self.plans.get(way.name)
                self.plans[option.name] = self._like(like, option.name)
        # Teams follow speeds; one that has been tried stays an option when others are faster now.
        named = {option.name for option in options}
        options += [option for option in self.options if option.name not in named]
        self.options = [option for option in options if self._is_whole(option.name)]

    def take_in(self) -> list[str]:
        """Count nodes among the others that have come since; their hosts."""
        crew, came = self.node.crew, []
        for number, words in sorted(crew.arrivals().items()):
            try:
                told = checked(words, _ARRIVAL)
                node = decode(NodePlan, told["node"])
            except (ValueError, ConfigError) as error:
                self.home.view.say(f"warning: a node that came cannot be used: {error}")
                continue
            nodes, speeds = list(self.everyone.nodes), list(self.seen.speeds)
            # Until it is timed: by its cores, beside the first node's.
            speed = told["speed"] or speeds[0] * node.threads / self.everyone.nodes[0].threads
            nodes[number:] = [dataclasses.replace(node, share=1.0), *nodes[number + 1 :]]
            speeds[number:] = [speed, *speeds[number + 1 :]]
            self.everyone = dataclasses.replace(self.everyone, nodes=tuple(nodes))
            self.seen = dataclasses.replace(self.seen, speeds=tuple(speeds))
            self._said[number] = speed
            if 0 in self._timed and told["speed"]:
                self._timed.add(number)
            if told["writes"] and number not in self.writers:
                self.writers = (*self.writers, number)
            crew.take_in(number, labels(self.everyone)[number])
            came.append(crew.hosts[number])
        return came

    def _is_whole(self, name: str) -> bool:
        """Whether all nodes of an option are still there."""
        return not self.node.crew.gone.keys() & set(self.members(name))

    def without_lost(self, name: str) -> str:
        """The option that goes on after a loss: the same nodes and way, without who has gone."""
        gone = self.node.crew.gone
        way, numerics = self._entries[name]
        members = tuple(member for member in way.members if member not in gone)
        self._given.clear()
        self.refresh()
        if not members or (members[0] not in self.writers and members[0] != 0):
            members = (0, *members)
        exchange = way.exchange if len(members) > 1 else "allreduce"
        for option in self.options:
            other, same = self._entries[option.name]
            alike = (other.members, other.exchange, other.split) == (members, exchange, False)
            if alike and same == numerics:
                return option.name
        return self.options[0].name

    def _like(self, plan: Plan | None, name: str) -> Plan:
        """The plan of an option whose way has been tried with other numerics."""
        way, (precision, memory_format) = self._entries[name]
        if plan is None:
            tried = (self.plans[n] for n, (w, _) in self._entries.items() if w == way)
            plan = next(tried)
        return dataclasses.replace(plan, precision=precision, memory_format=memory_format)

    def _hear_speeds(self) -> None:
        """Who has found out its own speed, and that, once the first node's is known too."""
        for number in range(1, len(self.everyone.nodes)):
            if number not in self._said and number not in self._timed:
                said = self.node.crew.said_by(number, "speed")
                if said is not None:
                    self._said[number] = float(said)
        if 0 not in self._timed:
            return
        speeds = list(self.seen.speeds)
        for number, said in self._said.items():
            if said > 0 and number not in self._timed:
                speeds[number] = said
                self._timed.add(number)
        self.seen = dataclasses.replace(self.seen, speeds=tuple(speeds))

    @property
    def _present(self) -> Plan:
        """All nodes, those without a share that are not ready yet."""
        ready = {0, *self._timed, *self._said}
        together = self.node.crew.said_by(0, BEGINS_TOGETHER) is not None
        nodes = [
            node
            if (together or number in ready) and number not in self.node.crew.gone
            else dataclasses.replace(node, share=0.0)
            for number, node in enumerate(self.everyone.nodes)
        ]
        return dataclasses.replace(self.everyone, nodes=tuple(nodes))

    def look_at_layers(self) -> None:
        """Find out once for each team which layers could be split, and what that would send."""
        if self.home.config.exchange.partition == "none":
            return
        shares = [node.share for node in self._present.nodes]
        for members in teams(self.seen.speeds, shares, self.writers):
            if len(members) > 1 and members not in self._looked:
                self._look_at(members)

    def _look_at(self, members: tuple[int, ...]) -> None:
        self._looked.add(members)
        numerics: tuple[Precision, MemoryFormat] = ("fp32", "contiguous")
        whole = plan_of_way(self.everyone, Way(members=members), numerics, speeds=self._fair_speeds)
        split = partitioned(self.home.config, whole, self.home.parts)
        if split.feature_layers:
            sent = split.predicted["bytes_per_update"]
            self._split[members] = (split.feature_layers, sent)

    def first_runner(self, wanted: Plan | None) -> tuple[str, Together]:
        """What is wanted, where these nodes can train it; else the simplest."""
        simplest = self.options[0].name
        name = self._known(wanted) if wanted is not None else None
        if name is not None and self.members(name)[0] != 0:
            name = None  # where the first node has no part, the state comes from a leg where it has
        if name is not None and name != simplest:
            try:
                return name, self.make(name)
            except (LostError, ProofError, StrategyError, UnsupportedError) as error:
                self.home.view.say(f"{error}; training begins with {simplest} instead")
        return simplest, self.make(simplest)

    def _known(self, plan: Plan) -> str | None:
        """The option that a plan is, from now on with the plan's own shares; None if it is none."""
        if plan.feature_layers:
            self.look_at_layers()
            self.refresh()
        name = self._name_of(plan)
        if name is None:
            return None
        way, numerics = self._entries[name]
        self._given.add(name)
        shares = dict(zip(way.members, (node.share for node in plan.nodes), strict=True))
        speeds = [shares.get(number, 0.0) for number in range(len(self.everyone.nodes))]
        self.plans[name] = plan_of_way(
            self.everyone, way, numerics, speeds=speeds, layers=plan.feature_layers
        )
        return name

    def _name_of(self, plan: Plan) -> str | None:
        members, split = members_of(self.everyone, plan), bool(plan.feature_layers)
        numerics = (plan.precision, plan.memory_format)
        for name, (way, mine) in self._entries.items():
            same = (way.members, mine) == (members, numerics)
            alike = (way.exchange, way.split) == (plan.exchange, split)
            if same and (alike or len(way.members) == 1):
                return name
        return None

    def name_of(self, plan: Plan) -> str:
        """What a plan is called, be it none of the options."""
        return self._name_of(plan) or ", ".join(node.host for node in plan.nodes)

    def adopt(self, leg: Leg) -> None:
        """Make the plan of a leg that is repeated one of the plans."""
        members = members_of(self.everyone, leg.plan)
        if members is None:
            raise UnsupportedError(
                f"the run was trained with {leg.name}, and one of its hosts is not among these:"
                " name the same hosts in the same order, or use --again to plan anew"
            )
        way = Way(
            members=members,
            exchange=leg.plan.exchange,
            split=bool(leg.plan.feature_layers),
            name=leg.name,
        )
        self._entries[leg.name] = (way, (leg.plan.precision, leg.plan.memory_format))
        self.plans[leg.name] = leg.plan

    def make(self, name: str) -> Together:
        self._runners += 1
        runner = Together(
            self.node,
            self._runners,
            self.plans[name],
            self.members(name),
            started=self.home.began,
        )
        runner.open_seconds = self.home.open_seconds
        return runner

    def learn(self, leg: Leg, went: Went, factors: dict[str, float]) -> None:
        """What a leg has shown of the nodes and of the network."""
        if not leg.update_seconds or leg.name not in self._entries:
            return
        way, _ = self._entries[leg.name]
        seen, seconds = self.seen, leg.update_seconds
        extra = 1.0
        for trait in leg.name.removeprefix(way.name).split(", "):
            extra *= factors.get(trait, 1.0)
        measured = {**seen.measured, way.name: seconds / extra}
        setups = dict(seen.setups)
        if leg.role == "trial":
            setups[way.name] = leg.setup_seconds
        speeds, wire = list(seen.speeds), seen.wire
        if len(way.members) == 1:
            (member,) = way.members
            change = self.batch / seconds / speeds[member]
            self._timed.add(member)
            # Until others are measured, the first's speed and their cores tell what to expect.
            others = set() if member else set(range(len(speeds))) - self._timed
            speeds = [s * change if n == member or n in others else s for n, s in enumerate(speeds)]
        elif len(went.took) > FEWEST_TIMED:
            middles = [statistics.median(column) for column in zip(*went.took[1:], strict=True)]
            shares = [node.share for node in leg.plan.nodes]
            for member, share, middle in zip(way.members, shares, middles, strict=True):
                if share > 0 and middle > 0:
                    self._timed.add(member)
                    speeds[member] = share / sum(shares) * self.batch / middle
            if not way.split:
                sent = way.bytes_sent(seen, {})
                exposed = max(0.0, seconds - max(middles))
                wire = sent / max(1e-9, exposed + HIDDEN * max(middles))
                wire = max(wire, seen.wire) if exposed < 0.1 * seconds else wire
        self.seen = dataclasses.replace(
            seen, speeds=tuple(speeds), wire=wire, measured=measured, setups=setups
        )

    def expected_without_trial(self, way: Way) -> float:
        """Seconds of an update of a way: as timed, or as it is expected."""
        split_bytes = {members: sent for members, (_, sent) in self._split.items()}
        usual = seconds_of_way(way, self.seen, self.batch, split_bytes)
        return self.seen.measured.get(way.name, usual)
