"""Leg after leg over nodes: the pilot decides, shares follow what is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import LostError, PacelineError, ProofError
from paceline.exchange.losses import leave_patience
from paceline.launch.joining import AGAIN_SECONDS
from paceline.observe.samples import process_began
from paceline.plan.pilot import Decision, learned, timed_updates
from paceline.plan.suspicion import patience
from paceline.plan.teams import Way, cost_of_way, labels, seconds_of_way
from paceline.schema import write_json
from paceline.schema.legs import Leg
from paceline.text import listed, rate
from paceline.training.shares import describe_shares
from paceline.workflow.crewed import Crewed
from paceline.workflow.legs import LegsRequest, LegTraining, write_legs
from paceline.workflow.runners import Runner, Went
from paceline.workflow.together import Together

if TYPE_CHECKING:
    from paceline.training.loop import Outcome

AGAIN = 2
"""How often a trial is repeated with fairer shares before it is judged as it is."""


class HostsTraining(LegTraining):
    """Leg after leg over nodes."""

    def __init__(self, asked: LegsRequest, first: tuple[str, Runner], crewed: Crewed) -> None:
        super().__init__(asked, first)
        self.crewed = crewed
        self.plans = crewed.plans
        self._fairer: tuple[float, ...] = ()
        self._repeats: dict[str, int] = {}
        self._left_out = ""
        self._gone: set[int] = set()
        """Nodes of which it is known that they were lost."""
        self._came: list[str] = []
        """Hosts that have come since the last leg began."""
        self._lost_since: float | None = None
        """When the last update before a loss had ended, until training goes on."""
        self._wants_ranks = False
        self._back: float | None = None
        """Seconds until a host that comes back would train again."""
        for leg in asked.script:
            crewed.adopt(leg)

    def _make(self, name: str) -> Runner:
        return self.crewed.make(name)

    # --- ranks of nodes -----------------------------------------------------------

    def _await_ranks(self) -> None:
        """Every node waits for its own before it builds a plan with them."""

    def _ready_ranks(self) -> int:
        """How many ranks every node has that may be tried with some; 0 while one is not ready."""
        return self._have_ranks() if self._wants_ranks else 0

    def _start_ranks_if_they_fit(self) -> None:
        self._wants_ranks = True
        self._have_ranks()

    def _have_ranks(self) -> int:
        """Let nodes start their ranks, if they have not; plans of those that cannot are out."""
        wanted: dict[int, int] = {}
        for option in self.known.options:
            if option.ranks and option.name not in self.known.out:
                nodes = self.plans[option.name].nodes
                for member, node in zip(self.crewed.members(option.name), nodes, strict=True):
                    if node.shares_memory:
                        wanted[member] = max(wanted.get(member, 0), node.ranks)
        ready, cannot = self.crewed.stand_by(wanted)
        for member, why in cannot.items():
            reason = f"{labels(self.crewed.everyone)[member]} {why}"
            with_it = [
                option.name
                for option in self.known.options
                if option.ranks and self._has_ranks_on(option.name, member)
            ]
            self._leave_out(with_it, reason)
            self._say_if_verbose(f"{', '.join(with_it)}: {reason}")
        return max(wanted.values(), default=0) if ready else 0

    def _has_ranks_on(self, name: str, member: int) -> bool:
        """Whether a node of an option has ranks of its own."""
        members = self.crewed.members(name)
        nodes = dict(zip(members, self.plans[name].nodes, strict=True))
        return member in nodes and nodes[member].shares_memory

    # --- nodes that were lost -----------------------------------------------------

    def _one_leg(self) -> bool:
        try:
            return super()._one_leg()
        except LostError as error:  # between two legs
            self._go_on_without(Decision.keep(self._running), error, time.perf_counter())
            return False

    def _put_out(self, decision: Decision, error: Exception, began: float) -> None:
        if isinstance(error, LostError):
            self._go_on_without(decision, error, began)
        else:
            super()._put_out(decision, error, began)

    def _go_on_without(self, decision: Decision, error: LostError, began: float) -> None:
        """The leg has ended with a node; the next one has the others, from the newest state."""
        node, name = self.crewed.node, decision.name
        self._close_runners()
        self._spare.clear()
        self._runner, self._running = None, ""
        if node.salvaged is not None:
            self._handover, node.salvaged = node.salvaged, None
        else:
            self._recover()
        since = node.last_update if began < node.last_update else began
        self._lost_since = min(since, self._lost_since or since)
        position = self._handover.state.position.update if self._handover is not None else 0
        first = min(self.known.position, position)
        members = self.crewed.members(name)
        hosts = labels(self.crewed.everyone)
        leg = Leg(
            name=name,
            plan=self.plans[name],
            first=first,
            updates=position - first,
            role=decision.role,
            best=decision.best,
            began=decision.reason,
            ended=str(error),
            left=tuple(hosts[each] for each in members if each in node.crew.gone),
            began_at=began - self._home.began,
            seconds=max(0.0, since - began),
        )
        self._add(leg, position=position)
        self._begin_anew(name)

    def _begin_anew(self, name: str) -> None:
        """Go on with those who are left, by what is known of them; `name`: what trained so far."""
        self._gone = set(self.crewed.node.crew.gone)
        # Legs that are repeated have that node: from here on they are found anew.
        self._asked = dataclasses.replace(self._asked, script=())
        # What has failed with a node that was lost may work when it is back.
        out = {
            each: why
            for each, why in self.known.out.items()
            if not self._gone & set(self.crewed.members(each))
        }
        left = self.known.updates - self.known.position
        start = self.crewed.without_lost(name, out, learned(self.known), left)
        self.known = dataclasses.replace(
            self.known,
            since=len(self.known.legs),
            options=self.crewed.options,
            start=start,
            out=out,
        )
        self._fairer, self._left_out = (), ""
        self._repeats.clear()

    def _lose_idle(self) -> None:
        """Nodes were lost that the last leg did not need: the training goes on as it is."""
        gone = dict(self.crewed.node.crew.gone)
        fresh = [each for each in gone if each not in self._gone]
        self._gone &= gone.keys()
        if not fresh:
            return
        if self._runner is not None and set(self.crewed.members(self._running)) & set(fresh):
            self._runner.hand_over()  # raises that they are lost, and keeps the state
        hosts = labels(self.crewed.everyone)
        if self.known.legs:
            left = tuple(hosts[each] for each in fresh)
            self._correct_last(left=left)
        text = f"{'; '.join(gone[each] for each in fresh)}; training did not need it just then"
        self._home.view.say(text)
        self._home.recorder.note("lost", text)
        for name in [each for each in self._spare if set(self.crewed.members(each)) & set(fresh)]:
            with contextlib.suppress(PacelineError):
                self._spare.pop(name).close()
        self._begin_anew(self._running)

    def _enter(self, decision: Decision) -> None:
        if self._handover is not None:
            super()._enter(decision)
            return
        # Lost before anything was saved or handed over: from the beginning.
        runner = self.crewed.make(decision.name)
        self._runner, self._running = runner, decision.name
        runner.begin()

    def _go(self, decision: Decision) -> Went:
        if self._lost_since is not None:
            self._tell_of_loss(decision)
        self._say_patience(decision.name)
        return super()._go(decision)

    def _say_patience(self, name: str) -> None:
        """Tell the launcher how long each of the others is worth waiting for."""
        crewed, config = self.crewed, self._home.config
        with_it = crewed.seconds_of(name)
        handover = statistics.median(
            [leg.setup_seconds for leg in self.known.legs if leg.setup_seconds]
            or [crewed.seen.setup]
        )
        if self._back is None:  # what it took here, and until it is asked
            self._back = AGAIN_SECONDS + time.time() - process_began()
        leave_patience(
            self._home.run.path,
            {
                member: patience(
                    with_it=with_it,
                    without=crewed.seconds_without(member),
                    handover=handover,
                    back=self._back,
                    limit=config.train.silence,
                )
                for member in crewed.members(name)
                if member
            },
        )

    def _tell_of_loss(self, decision: Decision) -> None:
        """One line, and in legs.jsonl, once it is known what a loss has cost."""
        assert self._lost_since is not None
        seconds, self._lost_since = time.perf_counter() - self._lost_since, None
        last = self._correct_last(lost_seconds=seconds)
        write_legs(self._home.run, [*self._asked.earlier, *self.known.legs])
        text = f"{last.ended}; training goes on with {decision.name} from update"
        text += f" {self.known.position}, {seconds:.1f} s later"
        self._home.view.say(text)
        self._home.recorder.note("lost", text)

    def _finish(self) -> Outcome:
        while True:
            try:
                if self._runner is None:
                    self._enter(Decision.keep(self.crewed.options[0].name))
                return super()._finish()
            except LostError as error:
                self._go_on_without(Decision.keep(self._running), error, time.perf_counter())

    def _decide(self) -> Decision:
        if self._asked.script:
            return super()._decide()
        last = self.known.legs[-1] if self.known.legs else None
        if last is not None and last.role != "first":
            self.crewed.look_at_layers()
        came = []
        while True:
            self._lose_idle()
            came += self.crewed.take_in()
            self.crewed.refresh()
            if self.crewed.node.crew.gone.keys() <= self._gone:
                break  # else one was lost just now, and options that need it are gone
        last = self.known.legs[-1] if self.known.legs else None
        self.known = dataclasses.replace(self.known, options=self.crewed.options)
        for host in came:
            text = f"{host} has come, before update {self.known.position + 1}"
            self._home.view.say(text)
            self._home.recorder.note("came", text)
        self._came += came
        if self._fairer and last is not None and self._running == last.name:
            self._divide(last)
            return self._once_more(last)
        decision = super()._decide()
        before = (*self._asked.earlier, *self.known.legs)
        if not self.known.recent and before and before[-1].left:
            decision = dataclasses.replace(decision, reason="hosts have gone")
        self._say_left_out(decision)
        return decision

    def _add(self, leg: Leg, **changes: Any) -> None:
        leg, self._came = dataclasses.replace(leg, came=tuple(self._came)), []
        super()._add(leg, **changes)

    def _correct_last(self, **changes: Any) -> Leg:
        """Say otherwise of the last leg what was found out since."""
        last = dataclasses.replace(self.known.legs[-1], **changes)
        self.known = dataclasses.replace(self.known, legs=(*self.known.legs[:-1], last))
        return last

    def _scripted(self) -> Decision:
        position, script = self.known.position, self._asked.script
        leg = next((each for each in script if each.first + each.updates > position), script[-1])
        if self.plans[leg.name] != leg.plan:
            self.plans[leg.name] = leg.plan
            for name, runner in (*self._spare.items(), (self._running, self._runner)):
                if name == leg.name and isinstance(runner, Together):
                    runner.divide(leg.plan)
        return super()._scripted()

    def _fails_too(self, name: str, error: Exception, reason: str) -> dict[str, str]:
        """Where a batch cannot be divided, every team; where a node fails, every team it is in."""
        crewed = self.crewed
        out, blamed = {name: reason}, crewed.node.blamed
        teams = {other: crewed.members(other) for other in self.plans}
        if isinstance(error, ProofError):
            if self._is_of_division():
                out |= {other: reason for other, members in teams.items() if len(members) > 1}
        elif any(node.shares_memory for node in self.plans[name].nodes):
            pass  # a rank of a node has failed: the node itself is as good as before
        elif blamed is not None:
            out |= {other: reason for other, members in teams.items() if blamed in members}
        return out

    def _divide(self, leg: Leg) -> None:
        """Let the plan that runs go on with fairer shares."""
        shares, self._fairer = self._fairer, ()
        largest = max(shares)
        plan = self.plans[leg.name]
        nodes = tuple(
            dataclasses.replace(node, share=share / largest)
            for node, share in zip(plan.nodes, shares, strict=True)
        )
        plan = dataclasses.replace(plan, nodes=nodes)
        self.crewed.settle(leg.name, plan)
        assert isinstance(self._runner, Together)
        self._runner.divide(plan)
        if leg.role != "trial":
            text = describe_shares(plan, shares)
            self._home.view.say(text)
            self._home.recorder.note("shares", text)
            write_json(self._home.run.plan, plan)

    def _once_more(self, leg: Leg) -> Decision:
        """A leg with shares that did not fit says little: it goes on with others."""
        updates = timed_updates(self.known, leg.best)
        if leg.role == "trial":
            self._repeats[leg.name] = self._repeats.get(leg.name, 0) + 1
            updates = leg.updates
        return Decision(
            name=leg.name,
            updates=max(1, min(updates, self.known.updates - self.known.position)),
            role="trial" if leg.role == "trial" else "keep",
            best=leg.best,
            reason="shares follow the measured speeds",
        )

    def _note(
        self, decision: Decision, went: Went, began: float, setup: float, *, first: int
    ) -> None:
        super()._note(decision, went, began, setup, first=first)
        node = self.crewed.node
        self.signals.received = self.signals.received or node.signals.received
        if self._asked.script:
            return
        leg = self.known.legs[-1]
        may_follow = self._home.config.exchange.rebalance
        judged = leg.role == "trial" and self._repeats.get(leg.name, 0) >= AGAIN
        self._fairer = went.fairer if may_follow and not judged else ()
        self.crewed.learn(leg, went, learned(self.known), is_fair=not self._fairer)
        if self._fairer:
            self._correct_last(update_seconds=None, error=None)

    # --- what is said -----------------------------------------------------------

    def _say_left_out(self, decision: Decision) -> None:
        """One line, once, where training goes on without some of the hosts."""
        crewed, everyone = self.crewed, self.crewed.everyone
        used = set(crewed.members(decision.name))
        gone = crewed.node.crew.gone
        wanted = [n for n, node in enumerate(everyone.nodes) if node.share > 0 and n not in gone]
        out = [labels(everyone)[number] for number in wanted if number not in used]
        last = self.known.legs[-1] if self.known.legs else None
        settled = last is not None and last.role != "first" and decision.role == "keep"
        if not out or not settled or last is None or last.name != decision.name:
            return
        if self._left_out == decision.name:
            return
        self._left_out = decision.name
        ways = [way for way, _ in map(crewed.entry, self.plans) if set(way.members) >= set(wanted)]
        if ways:
            way = min(ways, key=lambda way: seconds_of_way(way, crewed.seen))
            self._home.view.say(left_out_sentence(crewed, way, out, last))


def left_out_sentence(crewed: Crewed, way: Way, out: Sequence[str], leg: Leg) -> str:
    """Who stands by, what training would be like with them, and why."""
    seen, batch = crewed.seen, crewed.batch
    tried = way.name in seen.measured
    with_them = batch / seconds_of_way(way, seen)
    without = batch / (leg.update_seconds or 1.0)
    cost, carried = cost_of_way(way, seen), 8 * seen.wire.both / 1e6
    why = "there is too little for each to compute"
    if cost.exposed > cost.waiting:
        why = f"{cost.bytes_sent / 1e6:.3g} MB per update over {carried:,.0f} Mbit/s"
        if cost.bytes_sent / seen.wire.both < cost.exposed / 2:  # it is the messages, not bytes
            why = f"agreeing takes {1000 * cost.exposed:.3g} ms per update"
    names, one = listed(out), len(out) == 1
    if with_them > without and not tried:
        return (
            f"{names} {'stands' if one else 'stand'} by: with {'it' if one else 'them'}"
            f" {rate(with_them)} images/s are expected, without {rate(without)}, but finding out"
            " costs more than it may bring in the updates that are left"
        )
    expected = "" if tried else " expected"
    return (
        f"{names} {'was' if one else 'were'} left out: with {'it' if one else 'them'}"
        f" {rate(with_them)} images/s{expected}, without {rate(without)}, because {why}"
    )
