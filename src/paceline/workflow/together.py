"""A plan of some of the nodes, as the node that leads the training sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline import errors
from paceline.errors import DeadlineError, LostError, PacelineError, StorageError, WorkerError
from paceline.schema import Plan, encode
from paceline.training.handover import Handover
from paceline.training.loop import Outcome, Trainer
from paceline.workflow.nodes import Node
from paceline.workflow.runners import Went

END_SECONDS = 10.0
"""How long the first node waits at the end for those who have not read that it is the end."""
LOOK_SECONDS = 0.2
"""How often the first node looks whether a leg that it has no part in has ended."""
_CONSEQUENCES = ("DeadlineError", "LostError", "WorkerError", "RuntimeError")
"""How a node fails whose fault it mostly is not: another one has left it waiting."""


class Together:
    """A plan of some of the nodes, as a runner of legs on the first node."""

    open_seconds = 0.0
    """What opening the data took, for the summary."""

    def __init__(
        self, node: Node, number: int, plan: Plan, members: Sequence[int], *, started: float
    ) -> None:
        self._node, self.number, self.members = node, number, tuple(members)
        self.plan = plan
        # Ranks of a node have one piece of memory, for one plan at a time.
        self.is_kept = not any(each.shares_memory for each in plan.nodes)
        self._is_open = True
        self._turns = 0
        self._wishes_stop = False
        self._trainer: Trainer | None = None

        def build() -> None:
            if self.takes_part:
                self._trainer = node.enter(number, plan, members, started=started)

        known = node.crew.known_of(members)
        self._do("enter", build, plan=encode(plan), members=list(members), known=known)

    @property
    def takes_part(self) -> bool:
        """Whether the first node itself is one of those of the leg."""
        return self.members[0] == 0

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def begin(self) -> None:
        """Begin a training that has no state yet."""
        self.trainer.check_goal()
        self._take_over(None, new=True)

    def take_over(self, handover: Handover | None) -> None:
        """Go on from the state that another leg has left."""
        self._take_over(handover, new=False)

    def _take_over(self, handover: Handover | None, *, new: bool) -> None:
        turn, members = self._next_turn(), list(self.members)
        self._do(
            "take_over",
            lambda: self._node.take_over(self.number, members, handover, turn=turn, new=new),
            members=members,
            turn=turn,
            new=new,
        )

    def _next_turn(self) -> int:
        """A number that no other handover of the training has."""
        self._turns += 1
        return 1000 * self.number + self._turns

    def go(self, until: int, patience: float | None) -> Went:
        words: dict[str, Any] = {"until": until, "patience": patience}
        if self.takes_part:
            went = self._do("go", lambda: self._node.go(self.number, until, patience), **words)
            assert isinstance(went, Went)
            return went
        return Went.told(self._do("go", self._wait, **words))

    def _wait(self) -> None:
        """Sleep while the others train; a wish to stop goes to them."""
        crew, told = self._node.crew, False
        with self._node.recorder.span("stand_by"):
            while not all(
                crew.has_answered(member) or member in crew.gone for member in self.members
            ):
                if self._wishes_stop and not told:
                    crew.ask_to_stop()
                    told = True
                time.sleep(LOOK_SECONDS)

    def divide(self, plan: Plan) -> None:
        """Go on with the shares of a plan that is the same otherwise."""
        self.plan = plan
        shares = [node.share for node in plan.nodes]

        def own() -> None:
            if self.takes_part:
                self._node.divide(self.number, shares)

        self._do("divide", own, shares=shares)

    def hand_over(self) -> Handover:
        turn, members = self._next_turn(), list(self.members)
        found = self._do(
            "hand_over",
            lambda: self._node.hand_over(self.number, members, turn),
            members=members,
            turn=turn,
        )
        assert isinstance(found, Handover)
        return found

    def finish(self, more: Mapping[str, Any], received: int | None) -> Outcome:
        opened = self.open_seconds
        words: dict[str, Any] = {"open_seconds": opened, "more": dict(more), "received": received}
        if self.takes_part:
            outcome = self._do(
                "finish", lambda: self._node.finish(self.number, opened, more, received), **words
            )
            assert isinstance(outcome, Outcome)
            return outcome
        found = dict(self._do("finish", self._wait, **words))
        return Outcome(summary=found["summary"], exit_code=found["exit_code"])

    def request_stop(self) -> None:
        """Called from a signal handler."""
        self._wishes_stop = True
        if self._trainer is not None:
            self._trainer.team.request_stop()

    def close(self) -> None:
        """Give back what all nodes hold of it."""
        if self._is_open:
            self._is_open = False
            self._do("leave", lambda: self._node.leave(self.number))

    @property
    def _others(self) -> list[int]:
        """Members besides the first node, as far as they are still there."""
        return [each for each in self.members if each and each not in self._node.crew.gone]

    def _do(self, do: str, own: Callable[[], Any], **words: Any) -> Any:
        """Let all members carry out an order, this node too; what came of it on the first."""
        crew, others = self._node.crew, self._others
        if do != "leave" and (lost := [each for each in self.members if each in crew.gone]):
            self._give_up()
            raise LostError("; ".join(crew.gone[each] for each in lost))
        if others:
            crew.order(do, others, number=self.number, **words)
        failure: Exception | None = None
        result = None
        try:
            result = own()
        except Exception as error:
            failure = error
            self._is_open = False
            # Whoever waits for this node hears that it has left.
            self._node.abandon(self.number)
            if isinstance(error, StorageError):
                raise  # the training ends: over MPI the others would be waited for in vain
        answers, lost = self._answers(others)
        if lost and not (failure is None and do in ("hand_over", "finish", "leave")):
            self._give_up()
            raise LostError("; ".join(crew.gone[each] for each in lost))
        refusals = [(other, answer) for other, answer in answers if "refused" in answer]
        if failure is None and not refusals:
            received = [answer["did"].get("received") for _, answer in answers]
            for number in (each for each in received if each is not None):
                self._node.signals.received = self._node.signals.received or number
            return result if result is not None or not answers else answers[0][1]["did"]
        self._give_up()
        raise self._cause(failure, refusals)

    def _answers(self, others: Sequence[int]) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
        """What the others have made of the newest order, and who of them was lost meanwhile."""
        crew = self._node.crew
        answers, lost = [], []
        for other in others:
            try:
                answers.append((other, crew.answer_of(other, self._node.deadline)))
            except (LostError, DeadlineError) as error:
                # One that hangs past the deadline is as good as gone.
                crew.gone.setdefault(other, str(error))
                lost.append(other)
        return answers, lost

    def _give_up(self) -> None:
        """Whatever a member still holds of this plan is given back."""
        self._is_open = False
        self._node.abandon(self.number)
        with contextlib.suppress(PacelineError):
            others = self._others
            self._node.crew.order("leave", others, number=self.number)
            self._answers(others)

    def _cause(
        self, failure: Exception | None, refusals: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> Exception:
        """What was first wrong: a node that was left waiting says less than one that failed."""
        self._node.blamed = None
        if failure is not None and type(failure).__name__ not in _CONSEQUENCES:
            return failure
        own = [each for each in refusals if each[1].get("kind") not in _CONSEQUENCES]
        if not own and failure is not None:
            return failure
        other, answer = (own or refusals)[0]
        self._node.blamed = other
        kind = getattr(errors, str(answer.get("kind")), WorkerError)
        text, host = str(answer["refused"]), self._node.crew.hosts[other]
        if not (isinstance(kind, type) and issubclass(kind, PacelineError)):
            return WorkerError(f"{host} failed with {answer.get('kind')}: {text}")
        return kind(text)


def dismiss(node: Node) -> None:
    """Let the other nodes go: the training has ended."""
    others = [each for each in range(1, len(node.crew.hosts)) if each not in node.crew.gone]
    with contextlib.suppress(PacelineError):
        node.crew.order("end", others)
        for other in others:
            node.crew.answer_of(other, END_SECONDS)
