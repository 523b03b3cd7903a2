"""One node of a training in legs over several: what it has for all legs, and what it does in each.

The first node leads: it asks the pilot, and tells the others what comes next (`exchange.crew`). All
carry out the same orders; nodes that a leg does not need sleep until the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.exchange.crew import Crew
from paceline.exchange.losses import Losses
from paceline.exchange.network import Network
from paceline.exchange.opening import open_watch_store
from paceline.launch.node import node_context
from paceline.local.board import Board
from paceline.local.cores import pin, set_threads, visible_cores
from paceline.observe.recorder import Recorder
from paceline.plan.pilot import typical
from paceline.run import RunDirectory
from paceline.schema import Config, Plan, RankContext, decode
from paceline.signals import StopSignals
from paceline.training.assemble import Task
from paceline.training.handover import Handover
from paceline.training.loop import Outcome, Trainer
from paceline.training.parts import Parts
from paceline.training.progress import SilentView, View, make_view
from paceline.training.proof import prove
from paceline.training.shares import fairer_shares
from paceline.training.watching import heard
from paceline.workflow.connections import Connections, probe
from paceline.workflow.node_ranks import NodeRanks, RankLeg, Result
from paceline.workflow.runners import Went

BEGINS_TOGETHER = "begins together"
"""What the first node says where it knows what to begin with: nobody needs to time anything."""
LOOK_SECONDS = 0.1
"""Between two looks whether a node was lost."""
_ARRIVAL_LOOKS = 5
"""Of those, one looks whether a node has come."""
FEWEST_TIMED = 3
"""Updates that tell the speeds of nodes at the end of a leg."""


@dataclass(kw_only=True)
class Node:
    """What a node's process has for the whole training."""

    config: Config
    run: RunDirectory
    context: RankContext
    """Its place among all nodes."""
    network: Network
    crew: Crew
    board: Board
    parts: Parts
    recorder: Recorder
    view: View = field(default_factory=SilentView)
    silent: bool = True
    """Show no progress, whoever is the first of a leg."""
    blamed: int | None = None
    """On the first node: another one by whose fault the last order failed."""
    salvaged: Handover | None = None
    """The state before an update that a lost node has broken off, as far as it is all here."""
    last_update: float = 0.0
    """When the last update before that had ended (perf_counter)."""
    signals: StopSignals = field(init=False)
    ranks: NodeRanks = field(init=False)
    _losses: Losses = field(init=False)
    _connections: Connections = field(init=False)
    _closed: threading.Event = field(default_factory=threading.Event)
    _held: dict[int, _Held] = field(default_factory=dict)
    _pinned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._pinned = visible_cores()
        self.ranks = NodeRanks(
            run=self.run, context=self.context, cores=self._pinned, deadline=self.deadline
        )
        self.signals = StopSignals(self.request_stop)
        self._losses = Losses(self.run.path, self.context.node)
        self._connections = Connections(self.context, self.network, self.crew, self.deadline)
        threading.Thread(target=self._watch_losses, name="paceline-losses", daemon=True).start()

    def _watch_losses(self) -> None:
        """Hear from the launcher who was lost, and end what would wait for it."""
        looks = 0
        while not self._closed.wait(LOOK_SECONDS):
            looks += 1
            if self.context.is_first and looks % _ARRIVAL_LOOKS == 0:
                self._watch_arrivals()
            self.ranks.watch(self.board)
            for lost, why in self._losses.fresh_words():
                self.crew.gone[lost] = why
                self._connections.end_waits_for(lost)

    def _watch_arrivals(self) -> None:
        """End the leg soon where a node has come since: the pilot decides what it is good for."""
        with contextlib.suppress(PacelineError):
            if self.crew.has_arrivals():
                for held in list(self._held.values()):
                    held.trainer.is_wanted = True

    @property
    def deadline(self) -> float:
        return self.config.train.deadline

    def request_stop(self) -> None:
        """Called from a signal handler: the leg that is under way, if any, ends."""
        for held in self._held.values():
            held.trainer.team.request_stop()

    # --- orders: every member of a leg carries them out, in the same order ------

    def enter(self, number: int, plan: Plan, members: Sequence[int], *, started: float) -> Trainer:
        """Build a plan's strategy, and prove it, for the leg of these nodes."""
        place = list(members).index(self.context.node)
        context = node_context(plan, dataclasses.replace(self.context, node=place))
        with contextlib.ExitStack() as stack:
            network = ranks = None
            if len(members) > 1:
                network = self._connections.open(members, f"leg-{number}")
                stack.callback(self._connections.close, network)
            if plan.nodes[place].shares_memory:
                ranks = self.ranks.begin(plan, context, started=started)
                stack.callback(ranks.close)
            self._pin(cores := self.ranks.cores if ranks is None else ranks.cores)
            task = Task(
                config=self.config,
                plan=plan,
                run=self.run,
                context=context,
                board=self.board if ranks is None else ranks.board,
                arena=None if ranks is None else ranks.arena,
                network=network,
                view=self._view(context),
                in_legs=True,
                process_is_new=False,
            )

            def build() -> _Held:
                listening = stack.enter_context(contextlib.ExitStack())
                listening.enter_context(heard(task, self.recorder))
                prove(task, self.parts, self.recorder)
                trainer = Trainer(task, self.parts, self.recorder, started=started)
                stack.callback(trainer.strategy.close)
                if trainer.job.exchange is not None:
                    stack.callback(trainer.job.exchange.close)
                stack.callback(trainer.team.close)
                return _Held(
                    trainer=trainer,
                    threads=torch.get_num_threads(),
                    cores=cores,
                    ranks=ranks,
                    listening=listening,
                )

            held = build() if ranks is None else ranks.join("leg", build)
            held.stack = stack.pop_all()
            self._held[number] = held
            return held.trainer

    def _pin(self, cores: tuple[int, ...]) -> None:
        """Compute on these cores: all of the node's, or a rank's part of them."""
        if cores != self._pinned:
            pin(cores)
            self._pinned = cores

    def _view(self, context: RankContext) -> View:
        """The first node shows; where it has no part in a leg, the first of those that have."""
        if not context.is_first:
            return SilentView()
        return self.view if self.context.is_first else make_view(silent=self.silent)

    def take_over(
        self,
        number: int,
        members: Sequence[int],
        handover: Handover | None = None,
        *,
        turn: int,
        new: bool = False,
    ) -> None:
        """Go on where another leg has left off: from the first node's state, `new` from none."""
        held = self._held.get(number)
        if members[0] != 0 and not new:
            handover = self._pass(0, members[0], handover, turn)
        if held is None:  # this node leads, and has no part in the leg
            return
        trainer = held.trainer
        held.listen(self.recorder)
        self._pin(held.cores)
        set_threads(held.threads)
        if not new and trainer.task.network is not None:
            handover = Handover.spread(handover, trainer.task.network)
        assert new or handover is not None, "only the first node has a state to hand over"
        rest = None if held.ranks is None or handover is None else held.ranks.store(handover)
        held.do(
            "take_over",
            trainer.resume if handover is None else lambda: trainer.take_over(handover),
            rest=rest,
        )
        trainer.begin()
        held.is_under_way = True

    def _pass(
        self, source: int, target: int, handover: Handover | None, turn: int
    ) -> Handover | None:
        """The state from one node to another, over a connection for that alone."""
        if self.context.node not in (source, target):
            return None
        pair = self._connections.open((source, target), f"state-{turn}")
        try:
            return Handover.spread(handover if self.context.node == source else None, pair)
        finally:
            self._connections.close(pair)

    def go(self, number: int, until: int, patience: float | None) -> Went:
        """Train up to an update."""
        held = self._held[number]
        trainer = held.trainer
        words = {"until": until, "patience": patience}
        times = held.do("go", lambda: trainer.run_leg(until, patience), **words)
        took = trainer.team.took
        return Went(
            times=tuple(times),
            update=trainer.position.update,
            updates=trainer.updates,
            finished=trainer.is_finished,
            took=tuple(map(tuple, took)),
            # The first update warms up.
            fairer=tuple(fairer_shares(trainer.shares, took[1:], FEWEST_TIMED) or ()),
        )

    def divide(self, number: int, shares: Sequence[float]) -> None:
        """Divide batches otherwise from now on."""
        held, parts = self._held[number], list(shares)
        held.do("divide", lambda: held.trainer.divide(parts), shares=parts)

    def hand_over(self, number: int, members: Sequence[int], turn: int) -> Handover | None:
        """The state between two updates, whole on the first node, wherever the leg was."""
        held, found = self._held.get(number), None
        if held is not None:
            found = held.do("hand_over", held.trainer.hand_over)
            if held.ranks is not None and held.trainer.team.is_first:
                found = held.ranks.copied(found)
            held.is_under_way = False
            held.rest()
        return found if members[0] == 0 else self._pass(members[0], 0, found, turn)

    def finish(
        self, number: int, open_seconds: float, more: Mapping[str, Any], received: int | None
    ) -> Outcome:
        held = self._held[number]
        words = {"open_seconds": open_seconds, "more": dict(more), "received": received}
        return held.do("finish", lambda: held.trainer.end(open_seconds, more, received), **words)

    def time_alone(self, plan: Plan) -> float | None:
        """Samples per second of this node by itself, on a copy; None where it cannot be told.

        What the others do meanwhile does not wait for it.
        """
        observe = dataclasses.replace(self.config.observe, tensorboard=False)
        task = Task(
            config=dataclasses.replace(self.config, observe=observe),
            plan=plan,
            run=self.run,
            context=RankContext(),
            board=self.board,
            rehearsal=True,
            process_is_new=False,
        )
        trainer = Trainer(task, self.parts, Recorder(), started=time.perf_counter())
        try:
            times = trainer.run_leg(FEWEST_TIMED + 1)
        finally:
            trainer.strategy.close()
        middle = typical(times)[0]
        return plan.batch_size / middle if middle else None

    def leave(self, number: int) -> None:
        """Give back what a plan holds, if it still does."""
        held = self._held.pop(number, None)
        if held is not None:
            held.close()

    def abandon(self, number: int) -> None:
        """Leave a plan that has failed: keep the state if it is whole, and let nobody wait."""
        held = self._held.get(number)
        if held is None:
            return
        if held.is_under_way and held.ranks is None:  # ranks hold parts of the optimizer's state
            self.salvaged, self.last_update = held.trainer.salvage(), held.trainer.last_update
        held.abort()
        with contextlib.suppress(PacelineError, RuntimeError):
            self.leave(number)

    def close(self) -> None:
        self._closed.set()
        for number in list(self._held):
            with contextlib.suppress(PacelineError, RuntimeError):
                self.leave(number)
        self.ranks.end()


@dataclass(kw_only=True)
class _Held:
    """A plan that is built on this node."""

    trainer: Trainer
    threads: int
    cores: tuple[int, ...]
    """That this process computes on."""
    ranks: RankLeg | None
    """The other ranks of the node, where the plan has any here."""
    listening: contextlib.ExitStack | None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_under_way: bool = False
    """It has the newest state: it has taken over, and not handed over since."""

    def do(self, do: str, own: Callable[[], Result], **words: Any) -> Result:
        """What this rank does, and the node's other ranks with it."""
        return own() if self.ranks is None else self.ranks.do(do, own, **words)

    def listen(self, recorder: Recorder) -> None:
        """Its waits are recorded and watched from now on; all nodes of the leg call it."""
        if self.listening is None:
            self.listening = contextlib.ExitStack()
            self.listening.enter_context(heard(self.trainer.task, recorder))

    def rest(self) -> None:
        if self.listening is not None:
            self.listening.close()
            self.listening = None

    def abort(self) -> None:
        """End whatever waits for other nodes of it."""
        network = self.trainer.task.network
        if network is not None:
            network.abort()

    def close(self) -> None:
        self.rest()
        self.stack.close()


def follow(node: Node, alone: Plan, arrival: dict[str, Any] | None = None) -> int:
    """Carry out what the first node says, asleep in between, until the training ends.

    `alone`: the part of a batch that this node may take, by which it finds out its own speed.
    `arrival`: what a node says of itself that comes while the others train.
    """
    if arrival is None:
        probe(node.network)
    node.crew.on_stop(
        lambda: open_watch_store(node.context, deadline=node.deadline, serves=False),
        node.request_stop,
    )
    with node.signals.installed():
        if arrival is not None:
            with node.recorder.span("stand_by"):
                known = node.crew.said_by(0, speed_of(alone.nodes[0].host))
                node.crew.arrive({**arrival, "speed": known or _own_speed(node, alone)})
        elif node.crew.said_by(0, BEGINS_TOGETHER) is None:
            with node.recorder.span("stand_by"):
                node.crew.say("speed", _own_speed(node, alone))
        while True:
            with node.recorder.span("stand_by"):
                node.board.enter("stand by")
                order = node.crew.next_order()
            if order["do"] == "end":
                node.crew.answer(did={})
                return 0
            try:
                did = _carry_out(node, order["do"], order["words"])
            except Exception as error:
                # Others of the leg may wait for this node: they hear that it has left.
                node.abandon(order["words"].get("number"))
                node.crew.answer(refused=str(error), kind=type(error).__name__)
            else:
                node.crew.answer(did=did | {"received": node.signals.received})


def speed_of(host: str) -> str:
    """By what the first node says how fast a host was that it has lost."""
    return f"speed of {host}"


def _own_speed(node: Node, alone: Plan) -> float:
    """How fast this node is by itself; 0 where it cannot be told."""
    # Legs show in time what is wrong here, and say it.
    with contextlib.suppress(Exception):
        return node.time_alone(alone) or 0.0
    return 0.0


def _carry_out(node: Node, do: str, words: dict[str, Any]) -> dict[str, Any]:
    """What came of an order, as far as it can be told in words: a state stays where it is."""
    if do == "enter":
        words = dict(words)
        node.crew.learn(words.pop("known"))
        plan = decode(Plan, words.pop("plan"))
        node.enter(plan=plan, started=time.perf_counter(), **words)
        return {}
    if do == "stand_by":
        return node.ranks.stand_by(words["ranks"][str(node.context.node)], words["weights_mb"])
    if do not in ORDERS:
        raise WorkerError(f"the first node orders {do!r}, which is none of: {', '.join(ORDERS)}")
    result = getattr(node, do)(**words)
    return dataclasses.asdict(result) if isinstance(result, Went | Outcome) else {}


ORDERS = ("take_over", "go", "divide", "hand_over", "finish", "leave")
"""What a node can be told to do besides `enter` and `stand_by`: methods of `Node`."""
