"""A training on one machine as a sequence of legs: the pilot decides, runners make the updates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    ConfigError,
    DivergedError,
    PacelineError,
    RunDirectoryError,
    StorageError,
)
from paceline.plan.pilot import (
    Decision,
    Knowledge,
    Option,
    next_leg,
    saved,
    seconds_of,
    spent,
    typical,
)
from paceline.run import RunDirectory
from paceline.schema import Plan, decode, encode, write_json
from paceline.schema.legs import Leg
from paceline.schema.plain import parse_json, read_text
from paceline.text import rate
from paceline.workflow.runners import Here, Home, Runner, There, Went, wait_until_ready

if TYPE_CHECKING:
    from paceline.launch.standby import Standby
    from paceline.train.handover import Handover
    from paceline.train.loop import Outcome

PATIENCE = 2.0
"""A trial ends when its updates take this many times as long as the best plan's would have."""


@dataclass(frozen=True, kw_only=True)
class LegsRequest:
    """What a training in legs begins with."""

    home: Home
    options: Sequence[Option]
    """Plans that may be used, the simplest first."""
    plans: Mapping[str, Plan]
    """By their options' names."""
    updates: int
    start: str | None = None
    """The plan that past trainings here have found to be the best."""
    script: Sequence[Leg] = ()
    """The legs of a training that is repeated."""
    verbose: bool = False


class LegTraining:
    """Leg after leg, until nothing is left to train or a signal ends it."""

    def __init__(self, asked: LegsRequest, first: tuple[str, Runner]) -> None:
        """`first`: the runner that the training begins with, and the name of its plan."""
        from paceline.train.signals import StopSignals

        self._asked, self._home = asked, asked.home
        self._standby: Standby | None = None
        self._handover: Handover | None = None
        """The state before the leg that is under way."""
        self._runner: Runner | None = None
        self._running, self._runner = first
        self._spare: dict[str, Runner] = {}
        """A runner in this process that is kept while another plan is tried."""
        self.known = Knowledge(
            options=asked.options,
            updates=asked.updates,
            budget=asked.home.config.pilot.budget,
            start=asked.start,
            rank_seconds=time.perf_counter() - asked.home.began,
        )
        self.signals = StopSignals(self._request_stop)

    def run(self) -> Outcome:
        """Train; the outcome of the last leg is the training's."""
        try:
            with self.signals.installed():
                finished = False
                while not finished and self.signals.received is None:
                    finished = self._one_leg()
            assert self._runner is not None
            return self._runner.finish(self._summary(), self.signals.received)
        finally:
            self._close()

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
        try:
            if decision.name != self._running:
                with self._home.recorder.span("handover"):
                    self._leave(decision)
                    blamed = decision.name
                    self._enter(decision)
            setup = time.perf_counter() - began
            went = self._go(decision)
        except (DivergedError, StorageError):
            raise  # the training's own doing, whatever the plan
        except Exception as error:
            self._put_out(dataclasses.replace(decision, name=blamed), error, began)
            return False
        self._note(decision, went, began, setup, first=first)
        return went.finished

    def _decide(self) -> Decision:
        ready = self._standby.count if self._standby and self._standby.is_ready else 0
        elapsed = time.perf_counter() - self._home.began
        self.known = dataclasses.replace(self.known, ready=ready, elapsed=elapsed)
        if self._asked.script:
            return self._scripted()
        decision = next_leg(self.known)
        if decision.ranks and self._standby is None:
            self._start_ranks()
        self._say_change(decision)
        return decision

    def _scripted(self) -> Decision:
        """The next leg of the training that is repeated; its last plan goes on to the end."""
        position, last = self.known.position, self._asked.script[-1]
        made = (leg for leg in self._asked.script if leg.first + leg.updates > position)
        leg = next(made, last)
        end = leg.first + leg.updates if leg is not last else self.known.updates
        if self._plan(leg.name).nodes[0].shares_memory:
            if self._standby is None:
                self._start_ranks()
            assert self._standby is not None
            wait_until_ready(self._standby)
        return Decision(
            name=leg.name, updates=end - position, role="keep", best=leg.name, reason="repeated"
        )

    def _plan(self, name: str) -> Plan:
        return self._asked.plans[name]

    def _start_ranks(self) -> None:
        from paceline.launch.standby import Standby

        most = max(plan.nodes[0].ranks for plan in self._asked.plans.values())
        self._standby = Standby(self._home.run, most, self._show)

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
        if isinstance(runner, Here) and name == decision.best:
            self._spare[name] = runner
        else:
            runner.close()

    def _enter(self, decision: Decision) -> None:
        """Build a plan, or take it up again, and hand over to it."""
        runner = self._spare.pop(decision.name, None) or self._make(decision.name)
        self._runner, self._running = runner, decision.name
        runner.take_over(self._handover)

    def _make(self, name: str) -> Runner:
        plan = self._plan(name)
        if not plan.nodes[0].shares_memory:
            return Here(self._home, plan)
        assert self._standby is not None
        return There(self._home, plan, self._standby)

    def _go(self, decision: Decision) -> Went:
        assert self._runner is not None
        patience = None
        if decision.role == "trial":
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
        if isinstance(self._runner, Here):
            self._runner.close()
        elif not self._standby_is_well():
            self._end_ranks()
        self._runner, self._running = None, ""
        self._recover()
        position = self._handover.state.position.update if self._handover is not None else 0
        leg = Leg(
            name=decision.name,
            plan=self._plan(decision.name),
            first=position,
            role=decision.role,
            best=decision.best if decision.best != decision.name else simplest,
            began=decision.reason,
            ended=reason,
            began_at=began - self._home.began,
            setup_seconds=time.perf_counter() - began,
        )
        out = {**self.known.out, decision.name: reason}
        self._add(leg, position=position, out=out)

    def _standby_is_well(self) -> bool:
        """Whether the ranks only refused, and stand by again."""
        try:
            return self._standby is not None and self._standby.is_ready
        except PacelineError:
            return False

    def _recover(self) -> None:
        """Go back to the newest state there is: before the leg, or a checkpoint made in it."""
        from paceline.train.checkpoint import Checkpoints
        from paceline.train.handover import Handover

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
            plan=self._plan(decision.name),
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
        if self._asked.verbose:
            why = f": {leg.began}" if leg.began else ""
            self._home.view.say(
                f"  {leg.updates} updates with {leg.name} ({leg.role}{why}),"
                f" {self._speed(leg)} samples/s"
            )

    def _add(self, leg: Leg, **changes: Any) -> None:
        self.known = dataclasses.replace(self.known, legs=(*self.known.legs, leg), **changes)
        write_legs(self._home.run, self.known.legs)

    def _say_change(self, decision: Decision) -> None:
        """One line where the way of training changes for good; none for a trial that did not."""
        legs = self.known.legs
        if decision.role not in ("first", "keep"):
            return
        kept = [leg for leg in legs if leg.role in ("first", "keep") and leg.update_seconds]
        if kept and kept[-1].name == decision.name:
            return
        write_json(self._home.run.plan, self._plan(decision.name))
        now = next((leg for leg in reversed(legs) if leg.name == decision.name), None)
        if kept and now is not None:
            self._home.view.say(
                f"from here with {decision.name}: {self._speed(now)} samples/s"
                f" instead of {self._speed(kept[-1])} with {kept[-1].name}"
            )

    def _speed(self, leg: Leg) -> str:
        return rate(leg.plan.batch_size / leg.update_seconds) if leg.update_seconds else "?"

    def _summary(self) -> dict[str, Any]:
        legs = self.known.legs
        return {
            "legs": len(merged(legs)),
            "finding_seconds": spent(self.known),
            "saved_seconds": saved(self.known, legs[-1].best) if legs else 0.0,
        }

    def _request_stop(self) -> None:
        if self._runner is not None:
            self._runner.request_stop()


def merged(legs: Sequence[Leg]) -> list[Leg]:
    """Consecutive legs of the same plan as one: the pilot was asked in between, and went on."""
    found: list[Leg] = []
    for leg in legs:
        last = found[-1] if found else None
        if last is None or last.name != leg.name or last.ended or leg.ended:
            found.append(leg)
            continue
        longer = leg if leg.updates > last.updates else last
        found[-1] = dataclasses.replace(
            last,
            updates=last.updates + leg.updates,
            seconds=last.seconds + leg.seconds,
            setup_seconds=last.setup_seconds + leg.setup_seconds,
            update_seconds=longer.update_seconds,
            error=longer.error,
        )
    return found


def write_legs(run: RunDirectory, legs: Sequence[Leg]) -> None:
    """legs.jsonl, whole: a reader never sees half of it."""
    partial = run.path / ".legs.jsonl.partial"
    partial.write_text("".join(json.dumps(encode(leg)) + "\n" for leg in merged(legs)))
    partial.replace(run.legs)


def read_legs(path: Path) -> list[Leg]:
    """The legs of a run; none where it has no legs.jsonl."""
    if not path.exists():
        return []
    found: list[Leg] = []
    try:
        for line in read_text(path).splitlines():
            found.append(decode(Leg, parse_json(line)))
    except (OSError, ValueError, ConfigError) as error:
        raise RunDirectoryError(
            f"{path} is damaged in line {len(found) + 1}: {error}; remove it to train without"
            " repeating its legs"
        ) from None
    return found
