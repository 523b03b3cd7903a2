"""What may be tried over nodes, as far as is known of them, and how it is begun."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from torch import nn

from paceline.cost.exchanges import ExchangeCost, Kind
from paceline.cost.model import LOOKS_ACROSS, LayerCost, ModelCost, model_cost
from paceline.cost.transfer import Wire
from paceline.errors import (
    ConfigError,
    DeadlineError,
    LostError,
    ProofError,
    StrategyError,
    UnsupportedError,
)
from paceline.local.tiles import has_bf16
from paceline.plan.pilot import OBVIOUS, Option
from paceline.plan.teams import (
    Manner,
    TeamKnowledge,
    Way,
    at_speed,
    going_on,
    inside_name,
    labels,
    members_of,
    options_over,
    plan_of_way,
    rate_between,
    seconds_of_way,
    setup_name,
)
from paceline.schema import NodePlan, Plan, decode
from paceline.schema.legs import Leg
from paceline.schema.plain import checked
from paceline.workflow.alone import can_divide
from paceline.workflow.calibration import calibration
from paceline.workflow.connections import probe
from paceline.workflow.nodes import BEGINS_TOGETHER, FEWEST_TIMED, Node, speed_of
from paceline.workflow.partitioning import splittable
from paceline.workflow.runners import Home, Went
from paceline.workflow.together import Together

_ARRIVAL = {"node": {}, "speed": float, "writes": bool}
_UNKNOWN = Wire(latency=0.0, bandwidth=math.inf, both=math.inf, message=0.0)
"""Of a network that joins nobody yet nothing is known: who comes is tried."""
Entry = tuple[Way, Manner]


class Crewed:
    """What may be tried over the nodes, as far as is known, and how it is begun."""

    def __init__(
        self,
        node: Node,
        home: Home,
        everyone: Plan,
        writers: Sequence[int] = (0,),
        learned: Mapping[str, float] | None = None,
    ) -> None:
        """`writers`: nodes that see the run directory of the first.

        `learned`: factors of traits from past trainings of these nodes.
        """
        self.node, self.home, self.everyone, self.writers = node, home, everyone, writers
        self._timed: set[int] = set()
        """Nodes whose speed was measured, alone or in a leg."""
        self._said: dict[int, float] = {}
        """What nodes have said of their speed; 0 where they could not tell."""
        self._given: set[str] = set()
        """Plans whose shares do not follow from speeds: of a training before, or of their legs."""
        self._entries: dict[str, Entry] = {}
        self.plans: dict[str, Plan] = {}
        self._has_looked = False
        self._runners = 0
        built = home.parts.build_model()
        self._learned = dict(learned or {})
        self._divisible = (
            home.parts.elementwise
            and home.config.train.device != "cuda"
            and can_divide(home.config, built)
        )
        model = model_of(
            built,
            local_batch_norm="local_batch_norm" in home.config.numerics.allow,
        )
        self.seen = TeamKnowledge(
            nodes=tuple(at_speed(each.share or 1.0) for each in everyone.nodes),
            wire=probe(node.network) if len(everyone.nodes) > 1 else _UNKNOWN,
            model=model,
            batch=everyone.batch_size,
            bucket_bytes=home.config.exchange.bucket_mb * 2**20,
            state=3.0 * model.parameter_bytes,
            setup=0.0,  # until the first plan is built
            factors=calibration(),
        )
        self.options: list[Option] = []
        if home.config.exchange.partition == "manual":
            # Layers that cannot be split are a mistake, which is said before anything is trained.
            self.look_at_layers()
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

    def seconds_of(self, name: str) -> float:
        """Seconds of an update of an option, timed or expected."""
        return seconds_of_way(self._entries[name][0], self.seen)

    def seconds_without(self, member: int) -> float:
        """The same of the best one that does not need a node."""
        ways = (way for way, _ in self._entries.values() if member not in way.members)
        return min(seconds_of_way(way, self.seen) for way in ways)

    def refresh(self) -> None:
        """Every option, with what is expected of it now."""
        self._hear_speeds()
        images = len(self.home.parts.dataset.sample_shape) == 3
        found = options_over(
            self.home.config,
            self._present,
            self.seen,
            images=images,
            writers=self.writers,
            rounds=self.home.config.train.device == "cuda" or has_bf16(),
            divisible=self._divisible,
            learned=self._learned,
        )
        options = []
        for option, way, manner in found:
            options.append(option)
            self._entries[option.name] = (way, manner)
            if way.name not in self.seen.measured and option.name not in self._given:
                self.plans[option.name] = plan_of_way(
                    self.everyone, way, manner, speeds=self._fair_speeds
                )
            elif option.name not in self.plans:
                self.plans[option.name] = self._like(option.name)
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
            self.seen = dataclasses.replace(self.seen, nodes=tuple(map(at_speed, speeds)))
            self._said[number] = speed
            if 0 in self._timed and told["speed"]:
                self._timed.add(number)
            if told["writes"] and number not in self.writers:
                self.writers = (*self.writers, number)
            crew.take_in(number, labels(self.everyone)[number])
            came.append(crew.hosts[number])
        return came

    def stand_by(self, wanted: Mapping[int, int]) -> tuple[bool, dict[int, str]]:
        """Have these nodes so many ranks: whether all are ready, and why who cannot have any."""
        node, weights_mb = self.node, self.seen.model.parameter_bytes / 1e6
        answers: dict[int, Mapping[str, Any]] = {}
        others = [number for number in wanted if number and number not in node.crew.gone]
        if others:
            ranks = {str(number): count for number, count in wanted.items()}
            node.crew.order("stand_by", others, ranks=ranks, weights_mb=weights_mb)
        if 0 in wanted:
            answers[0] = node.ranks.stand_by(wanted[0], weights_mb)
        for other in others:
            # One that was lost is noticed where it is needed.
            with contextlib.suppress(LostError, DeadlineError):
                told = node.crew.answer_of(other, node.deadline)
                answers[other] = told.get("did") or {"ready": False, "why": told.get("refused")}
        cannot = {n: str(answer["why"]) for n, answer in answers.items() if answer.get("why")}
        ready = all(answer.get("ready") for n, answer in answers.items() if n not in cannot)
        return ready, cannot

    def _is_whole(self, name: str) -> bool:
        """Whether all nodes of an option are still there."""
        return not self.node.crew.gone.keys() & set(self.members(name))

    def without_lost(
        self, name: str, out: Collection[str], factors: Mapping[str, float], left: int
    ) -> str:
        """The option that goes on after a loss, as `plan.teams.going_on` has it.

        `out`: options that failed; `factors`: what this training has learned of traits, which
        stays true; `left`: updates.
        """
        ways = {way.name for way, _ in self._entries.values()}
        self._learned |= {trait: each for trait, each in factors.items() if trait not in ways}
        gone = self.node.crew.gone.keys()
        for number in gone & self._timed:  # one that comes back need not find it out again
            self.node.crew.say(speed_of(self.everyone.nodes[number].host), self.seen.speeds[number])
        mine, manner = self._entries[name]
        self._given.clear()
        self.refresh()
        found, names = [], {}
        for option in self.options:
            way, same = self._entries[option.name]
            if same == manner and option.name not in out:
                found.append(way)
                names[way.name] = option.name
        best = going_on(mine, gone, found, self.seen, left)
        return names[best.name] if best is not None else self.options[0].name

    def _like(self, name: str) -> Plan:
        """The plan of an option whose way has been tried in another manner."""
        way, manner = self._entries[name]
        tried = (self.plans[n] for n, (w, _) in self._entries.items() if w == way)
        plan = self.plans.get(way.name) or next(tried)
        return self._with_shares_of(plan, way, manner)

    def _with_shares_of(self, plan: Plan, way: Way, manner: Manner) -> Plan:
        """A way with the shares of a plan of the same nodes."""
        shares = dict(zip(way.members, (node.share for node in plan.nodes), strict=True))
        speeds = [shares.get(number, 0.0) for number in range(len(self.everyone.nodes))]
        return plan_of_way(self.everyone, way, manner, speeds=speeds)

    def _hear_speeds(self) -> None:
        """Who has found out its own speed, and that, once the first node's is known too."""
        for number in range(1, len(self.everyone.nodes)):
            if number not in self._said and number not in self._timed:
                said = self.node.crew.said_by(number, "speed")
                if said is not None:
                    self._said[number] = said
        if 0 not in self._timed:
            return
        speeds = list(self.seen.speeds)
        for number, said in self._said.items():
            if said > 0 and number not in self._timed:
                speeds[number] = said
                self._timed.add(number)
        self.seen = dataclasses.replace(self.seen, nodes=tuple(map(at_speed, speeds)))

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
        """Find out once which layers could be split."""
        if not self._has_looked:
            self._has_looked = True
            chains = splittable(self.home.config, self.everyone, self.home.parts)
            self.seen = dataclasses.replace(self.seen, chains=chains)

    def first_runner(self, wanted: Plan | None) -> tuple[str, Together]:
        """What is wanted, where these nodes can train it; else the simplest."""
        simplest = self.options[0].name
        if wanted is not None:  # ranks are started while the training goes on already
            plain = [
                node if not node.shares_memory else self._plain_node(node) for node in wanted.nodes
            ]
            wanted = dataclasses.replace(wanted, nodes=tuple(plain))
        name = self._known(wanted) if wanted is not None else None
        if name is not None and self.members(name)[0] != 0:
            name = None  # where the first node has no part, the state comes from a leg where it has
        if name is not None and name != simplest:
            try:
                return name, self.make(name)
            except (LostError, ProofError, StrategyError, UnsupportedError) as error:
                self.home.view.say(f"{error}; training begins with {simplest} instead")
        return simplest, self.make(simplest)

    def _plain_node(self, node: NodePlan) -> NodePlan:
        """A node of a plan, with all of its cores as threads of one process."""
        for each in self.everyone.nodes:
            if (each.host, each.cores) == (node.host, node.cores):
                return dataclasses.replace(each, share=node.share)
        return node

    def _known(self, plan: Plan) -> str | None:
        """The option that a plan is, from now on with the plan's own shares; None if it is none."""
        if plan.feature_layers:
            self.look_at_layers()
            self.refresh()
        name = self._name_of(plan)
        if name is None:
            return None
        way, manner = self._entries[name]
        self._given.add(name)
        self.plans[name] = self._with_shares_of(plan, way, manner)
        return name

    def _name_of(self, plan: Plan) -> str | None:
        members, split = members_of(self.everyone, plan), bool(plan.feature_layers)
        numerics = (plan.precision, plan.memory_format)
        inside = [dataclasses.replace(node, share=1.0) for node in plan.nodes]
        usual = self.home.config.exchange.bucket_mb
        size = plan.bucket_mb or usual
        for name, (way, mine) in self._entries.items():
            nodes = [dataclasses.replace(node, share=1.0) for node in self.plans[name].nodes]
            same = (way.members, mine[:2], nodes) == (members, numerics, inside)
            alike = (way.exchange.kind, bool(way.layers)) == (plan.exchange, split)
            if same and ((alike and (way.bucket_mb or usual) == size) or len(way.members) == 1):
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
            exchange=ExchangeCost(kind=cast(Kind, leg.plan.exchange)),
            bucket_mb=leg.plan.bucket_mb,
            name=leg.name,
        )
        self._entries[leg.name] = (way, Manner(leg.plan.precision, leg.plan.memory_format))
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

    def settle(self, name: str, plan: Plan) -> None:
        """From now on this is the plan of an option: its shares are those that its legs showed."""
        self.plans[name] = plan
        self._given.add(name)

    def learn(self, leg: Leg, went: Went, factors: dict[str, float], *, is_fair: bool) -> None:
        """What a leg has shown of the nodes and of the network.

        Where it was not fair, nodes have other speeds than was known: its own time says little, and
        so do those of all teams.
        """
        if not leg.update_seconds or leg.name not in self._entries:
            return
        way, manner = self._entries[leg.name]
        seen, seconds = self.seen, leg.update_seconds
        extra = 1.0  # what its manner multiplies the seconds of the plain way by
        for trait in leg.name.removeprefix(way.name).split(", "):
            extra *= factors.get(trait, 1.0)
        measured = {**seen.measured, way.name: seconds / extra}
        setups = dict(seen.setups)
        if leg.role == "trial":
            setups[setup_name(way, inside_name(self.everyone, manner.inside))] = leg.setup_seconds
        speeds = list(seen.speeds)
        if len(way.members) == 1:
            (member,) = way.members
            change = extra * self.batch / seconds / speeds[member]
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
                    speeds[member] = extra * share / sum(shares) * self.batch / middle
            if is_fair:
                actual = tuple(at_speed(speed / extra) for speed in speeds)
                there = dataclasses.replace(seen, nodes=actual)
                seen = self._with_rate(there, way, seconds, is_hidden=seconds < 1.1 * max(middles))
        if not is_fair:
            alone = {w.name: w.members[0] for w, _ in self._entries.values() if len(w.members) == 1}
            measured = {
                name: took
                for name, took in seen.measured.items()
                if name in alone
                and math.isclose(self.batch / took, speeds[alone[name]], rel_tol=OBVIOUS)
            }
        self.seen = dataclasses.replace(
            seen, nodes=tuple(map(at_speed, speeds)), measured=measured, setups=setups
        )

    def _with_rate(
        self, seen: TeamKnowledge, way: Way, seconds: float, *, is_hidden: bool
    ) -> TeamKnowledge:
        """What the network carries, by what a leg took; `is_hidden`: nobody waited for it."""
        carried = rate_between(way, seen, seconds)
        if is_hidden:
            carried = max(carried, seen.wire.both)
        wire = dataclasses.replace(seen.wire, bandwidth=carried, both=carried)
        return dataclasses.replace(seen, wire=wire)


def model_of(model: nn.Module, *, local_batch_norm: bool) -> ModelCost:
    """A model as prices see it before any layer of it was timed."""
    layers = []
    for name, module in model.named_modules():
        own = [weight for weight in module.parameters(recurse=False) if weight.requires_grad]
        size = float(sum(weight.numel() * weight.element_size() for weight in own))
        kind = type(module).__name__
        sums = size if kind.startswith(LOOKS_ACROSS) and not local_batch_norm else 0.0
        if own:
            layers.append(LayerCost(name=name, kind=kind, parameter_bytes=size, sum_bytes=sums))
    return model_cost(layers or [LayerCost()])
