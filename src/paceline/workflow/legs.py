"""A training on one machine as a sequence of legs: the pilot decides, runners make the updates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cost.memory import standby_mb
from paceline.errors import (
    DivergedError,
    PacelineError,
    ProofError,
    StorageError,
    UnsupportedError,
)
from paceline.local.memory import memory_is_short, resident_mb, shortage
from paceline.plan.pilot import (
    Decision,
    Knowledge,
    Option,
    next_leg,
    ratio,
    saved,
    seconds_of,
    spent,
    typical,
)
from paceline.run import RunDirectory
from paceline.schema import Plan, encode, read_json, write_json
from paceline.schema.legs import Leg, leg_text, merged
from paceline.schema.proof import Proof
from paceline.text import rate
from paceline.workflow.runners import Began, Here, Home, Runner, There, Went, wait_until_ready

if TYPE_CHECKING:
    from paceline.launch.standby import Standby
    from paceline.training.handover import Handover
    from paceline.training.loop import Outcome

PATIENCE = 2.0
"""A leg ends when its updates take this many times as long as the best plan's last took."""


@dataclass(frozen=True, kw_only=True)
class LegsRequest:
    """What a training in legs begins with."""

    home: Home
    options: Sequence[Option]
    """Plans that may be used, the simplest first."""
    plans: Mapping[str, Plan]
    """By their options' names."""
    begun: Began
    began: float
    """When this part of the training was asked for (perf_counter)."""
    built_seconds: float = 0.0
    """What building the first plan took."""
    earlier: Sequence[Leg] = ()
    """Legs of a training that is continued."""
    start: str | None = None
    """The plan that it begins with, where past trainings or the part before ended with it."""
    script: Sequence[Leg] = ()
    """The legs of a training that is repeated."""
    verbose: bool = False


class LegTraining:
    """Leg after leg, until nothing is left to train or a signal ends it."""

    def __init__(self, asked: LegsRequest, first: tuple[str, Runner]) -> None:
        """`first`: the runner that the training begins with, and the name of its plan."""
        from paceline.signals import StopSignals

        self._asked, self._home = asked, asked.home
        self.plans = dict(asked.plans)
        self._standby: Standby | None = None
        self._handover: Handover | None = None
        """The state before the leg that is under way."""
        self._runner: Runner | None = None
        self._running, self._runner = first
        self._spare: dict[str, Runner] = {}
        """A runner in this process that is kept while another plan is tried."""
        self.known = Knowledge(
            options=asked.options,
            updates=asked.begun.updates,
            position=asked.begun.update,
            budget=asked.home.config.pilot.budget,
            start=asked.start,
            rank_seconds=time.perf_counter() - asked.began,
            built_seconds=asked.built_seconds,
        )
        self.signals = StopSignals(self._request_stop)

    def run(self) -> Outcome:
        """Train; the outcome of the last leg is the training's."""
        try:
            with self.signals.installed():
                finished = self._asked.begun.finished
                while not finished and self.signals.received is None:
                    finished = self._one_leg()
            return self._finish()
        finally:
            self._close()

    def _finish(self) -> Outcome:
        if self._runner is None:  # the leg that was to be stopped has failed instead
            simplest = self.known.options[0].name
            self._enter(Decision(name=simplest, updates=0, role="keep", best=simplest))
        assert self._runner is not None
        return self._runner.finish(self._summary(), self.signals.received)

    def _close(self) -> None:
        """End the ranks that stand by, and give back what runners hold."""
        for runner in (*self._spare.values(), *([self._runner] if self._runner else [])):
            with contextlib.suppress(PacelineError):
                runner.close()
        self._end_ranks()

    def _one_leg(self) -> bool:
        """One more leg; True when the training is finished."""
        decision = self._decide()
        began, first, blamed = time.perf_counter(), self.known.position, self._running
        built = 0.0 if self.known.legs else self._asked.built_seconds
        self._home.recorder.note("leg", leg_text(decision.role, decision.name, decision.reason))
        try:
            if decision.name != self._running:
                with self._home.recorder.span("handover"):
                    self._leave(decision)
                    blamed = decision.name
                    self._enter(decision)
            setup = built + time.perf_counter() - began
            went = self._go(decision)
        except (DivergedError, StorageError):
            raise  # the training's own doing, whatever the plan
        except Exception as error:
            self._put_out(dataclasses.replace(decision, name=blamed), error, began)
            return False
        self._note(decision, went, began, setup, first=first)
        return went.finished

    def _decide(self) -> Decision:
        ready = self._ready_ranks()
        elapsed = time.perf_counter() - self._asked.began
        self.known = dataclasses.replace(self.known, ready=ready, elapsed=elapsed)
        if self._asked.script:
            return self._scripted()
        decision = next_leg(self.known)
        while decision.role == "trial" and not self._has_room(decision.name):
            decision = next_leg(self.known)
        if decision.ranks and self._standby is None:
            self._start_ranks_if_they_fit()
        elif decision.role == "keep":
            self._free_memory(decision)
        self._say_change(decision)
        return decision

    def _ready_ranks(self) -> int:
        """How many ranks stand by."""
        try:
            return self._standby.count if self._standby and self._standby.is_ready else 0
        except UnsupportedError as error:  # objects that cannot be opened in other processes
            self._end_ranks()
            self._stay_alone(error)
            return 0

    def _stay_alone(self, error: Exception) -> None:
        """Leave all plans out that need ranks."""
        self._leave_out([option.name for option in self.known.options if option.ranks], str(error))
        self._home.view.say(f"training stays in one process: {error}")

    def _leave_out(self, names: Sequence[str], reason: str) -> None:
        """Plans that will not be tried any more, and why."""
        out = {**self.known.out, **dict.fromkeys(names, reason)}
        self.known = dataclasses.replace(self.known, out=out)

    def _free_memory(self, decision: Decision) -> None:
        """Give back what only a trial needed; ranks stand by for as long as there is room."""
        for name in [each for each in self._spare if each != decision.name]:
            self._spare.pop(name).close()
        if not self.plans[decision.name].nodes[0].shares_memory and memory_is_short():
            self._end_ranks()

    def _start_ranks_if_they_fit(self) -> None:
        """Start the ranks, or leave all plans out that need them."""
        needed = standby_mb(self._most_ranks, own_mb=sum(resident_mb()), weights_mb=self._weights)
        names = [option.name for option in self.known.options if option.ranks]
        if not self._fits(needed, names):
            return
        try:
            self._start_ranks()
        except UnsupportedError as error:  # objects that cannot be sent to other processes
            self._stay_alone(error)

    def _has_room(self, name: str) -> bool:
        """Whether a plan can be tried in this process, beside the one that is kept meanwhile."""
        if self.plans[name].nodes[0].shares_memory or not isinstance(self._runner, Here):
            return True  # looked at when the ranks were started
        return self._fits(sum(resident_mb()), [name])

    def _fits(self, needed: float, names: Sequence[str]) -> bool:
        """Whether so many more MB are free; plans that need more are out."""
        if reason := shortage(needed):
            self._leave_out(names, reason)
            self._say_if_verbose(f"{', '.join(names)}: {reason}")
        return not reason

    @property
    def _most_ranks(self) -> int:
        return max(plan.nodes[0].ranks for plan in self.plans.values())

    @property
    def _weights(self) -> float:
        """Megabytes of the model's weights."""
        assert isinstance(self._runner, Here), "ranks are started while this process trains"
        return sum(weight.nbytes for weight in self._runner.model.parameters()) / 1e6

    def _scripted(self) -> Decision:
        """The next leg of the training that is repeated; its last plan goes on to the end."""
        position, last = self.known.position, self._asked.script[-1]
        made = (leg for leg in self._asked.script if leg.first + leg.updates > position)
        leg = next(made, last)
        end = leg.first + leg.updates if leg is not last else self.known.updates
        if self.plans[leg.name].nodes[0].shares_memory:
            self._await_ranks()
        return Decision(
            name=leg.name, updates=end - position, role="keep", best=leg.name, reason="repeated"
        )

    def _await_ranks(self) -> None:
        if self._standby is None:
            self._start_ranks()
        assert self._standby is not None
        wait_until_ready(self._standby)

    def _start_ranks(self) -> None:
        from paceline.launch.standby import Standby
        from paceline.training.given import parcel_of

        objects = parcel_of(self._home.given)
        self._standby = Standby(self._home.run, self._most_ranks, self._show, objects)

    def _end_ranks(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None

    def _show(self, answer: Mapping[str, Any]) -> None:
        """What a rank would show, here."""
        view, words = self._home.view, answer["with"]
        if answer["show"] == "advance":
            for images in words[0]:
                view.advance(images=images, loss=words[1])
        else:
            getattr(view, answer["show"])(*words)

    def _leave(self, decision: Decision) -> None:
        """Take the state from the plan that ran; keep its runner if going back is likely."""
        runner, name = self._runner, self._running
        if runner is None:
            return
        self._handover = runner.hand_over()
        self._runner, self._running = None, ""
        for other in [each for each in self._spare if each != decision.name]:
            self._spare.pop(other).close()
        if runner.is_kept and name == decision.best:
            self._spare[name] = runner
        else:
            runner.close()

    def _enter(self, decision: Decision) -> None:
        """Build a plan, or take it up again, and hand over to it."""
        runner = self._spare.pop(decision.name, None) or self._make(decision.name)
        self._runner, self._running = runner, decision.name
        runner.take_over(self._handover)

    def _make(self, name: str) -> Runner:
        plan = self.plans[name]
        if not plan.nodes[0].shares_memory:
            return Here(self._home, plan)
        assert self._standby is not None
        return There(self._home, plan, self._standby)

    def _go(self, decision: Decision) -> Went:
        assert self._runner is not None
        patience = None
        if self.known.recent and not self._asked.script:
            pace = seconds_of(self.known.legs, decision.best)
            patience = PATIENCE * decision.updates * pace
        if self.signals.received is not None:
            self._runner.request_stop()
        return self._runner.go(self.known.position + decision.updates, patience)

    def _put_out(self, decision: Decision, error: Exception, began: float) -> None:
        """Out with a plan that failed; the state from before its leg is still there."""
        simplest = self.known.options[0].name
        if decision.name == simplest or self._asked.script:
            raise error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self._home.view.say(f"{decision.name} is out, and training goes on without it: {reason}")
        if self._runner is not None and self._runner.is_kept:
            with contextlib.suppress(PacelineError):
                self._runner.close()
        elif not self._standby_is_well():
            self._end_ranks()
        self._runner, self._running = None, ""
        self._recover()
        position = self._handover.state.position.update if self._handover is not None else 0
        out = self._fails_too(decision.name, error, reason)
        # Updates up to a checkpoint that was made in the leg are not lost.
        first = min(self.known.position, position)
        leg = Leg(
            name=decision.name,
            plan=self.plans[decision.name],
            first=first,
            updates=position - first,
            role=decision.role,
            best=decision.best if decision.best != decision.name else simplest,
            began=decision.reason,
            ended=reason,
            began_at=began - self._home.began,
            setup_seconds=time.perf_counter() - began,
        )
        self._add(leg, position=position, out={**self.known.out, **out})

    def _fails_too(self, name: str, error: Exception, reason: str) -> dict[str, str]:
        """The plans that are out with one that has failed.

        Where the parts of a batch do not add up, all that divide batches.
        """
        out = {name: reason}
        divides = isinstance(error, ProofError) and self.plans[name].nodes[0].divides
        if divides and self._is_of_division():
            divided = (n for n, plan in self.plans.items() if plan.nodes[0].divides)
            out |= dict.fromkeys(divided, reason)
        return out

    def _is_of_division(self) -> bool:
        """Whether the newest proof failed because the parts of a batch do not add up."""
        try:
            proof = read_json(Proof, self._home.run.path / "proof.json")
        except PacelineError:
            return False
        return proof.cause in ("loss", "samples", "carried")

    def _standby_is_well(self) -> bool:
        """Whether the ranks only refused, and stand by again."""
        try:
            return self._standby is not None and self._standby.is_ready
        except PacelineError:
            return False

    def _recover(self) -> None:
        """Go back to the newest state there is: before the leg, or a checkpoint made in it."""
        from paceline.training.checkpoint import Checkpoints
        from paceline.training.handover import Handover

        checkpoints = Checkpoints(self._home.run.checkpoints, self._home.config.train.keep)
        newest = checkpoints.newest()
        if newest is None:
            return
        state, model, optimizer = checkpoints.load(newest)
        update = state.position.update
        if self._handover is None or update > self._handover.state.position.update:
            self._handover = Handover(
                state=state, model=model, optimizer=optimizer, saved_at=update
            )

    def _note(
        self, decision: Decision, went: Went, began: float, setup: float, *, first: int
    ) -> None:
        middle, error = typical(went.times)
        is_new = setup if decision.role != "keep" else 0.0
        leg = Leg(
            name=decision.name,
            plan=self.plans[decision.name],
            first=first,
            updates=went.update - first,
            role=decision.role,
            best=decision.best,
            began=decision.reason,
            began_at=began - self._home.began,
            setup_seconds=setup + (max(0.0, went.times[0] - middle) if middle and is_new else 0.0),
            seconds=sum(went.times),
            update_seconds=middle,
            error=error,
        )
        self._add(leg, position=went.update, updates=went.updates)
        why = f": {leg.began}" if leg.began else ""
        self._say_if_verbose(
            f"{leg.updates} updates with {leg.name} ({leg.role}{why}), {self._speed(leg)} samples/s"
        )

    def _say_if_verbose(self, text: str) -> None:
        if self._asked.verbose:
            self._home.view.say(f"  {text}")

    def _add(self, leg: Leg, **changes: Any) -> None:
        self.known = dataclasses.replace(self.known, legs=(*self.known.legs, leg), **changes)
        write_legs(self._home.run, [*self._asked.earlier, *self.known.legs])

    def _say_change(self, decision: Decision) -> None:
        """One line where the way of training changes for good; none for a trial that did not."""
        legs = self.known.recent
        if decision.role not in ("first", "keep"):
            return
        kept = [leg for leg in legs if leg.role in ("first", "keep") and leg.update_seconds]
        if kept and kept[-1].name == decision.name:
            return
        now = next((leg for leg in reversed(legs) if leg.name == decision.name), None)
        plan = dataclasses.replace(self.plans[decision.name], reason=decision.reason)
        if now is not None and now.update_seconds:
            speed = plan.batch_size / now.update_seconds
            predicted = {"images_per_second": speed, "update_seconds": now.update_seconds}
            plan = dataclasses.replace(plan, predicted=predicted)
        write_json(self._home.run.plan, plan)
        if kept and now is not None:
            times = 1 / ratio(legs, decision.name, kept[-1].name)
            self._home.view.say(
                f"from here with {decision.name}: {self._speed(now)} samples/s,"
                f" {times:.2f} times as fast as {kept[-1].name}"
            )

    def _speed(self, leg: Leg) -> str:
        return rate(leg.plan.batch_size / leg.update_seconds) if leg.update_seconds else "?"

    def _summary(self) -> dict[str, Any]:
        legs = self.known.legs
        return {
            "legs": len(merged(legs)),
            "finding_seconds": spent(self.known),
            "saved_seconds": saved(self.known) if legs else 0.0,
        }

    def _request_stop(self) -> None:
        if self._runner is not None:
            self._runner.request_stop()


def write_legs(run: RunDirectory, legs: Sequence[Leg]) -> None:
    """legs.jsonl, whole: a reader never sees half of it."""
    partial = run.path / ".legs.jsonl.partial"
    try:
        partial.write_text("".join(json.dumps(encode(leg)) + "\n" for leg in merged(legs)))
        partial.replace(run.legs)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
