"""A training on one machine as a sequence of legs: the pilot decides, runners make the updates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DivergedError, PacelineError, StorageError
from paceline.plan.hopes import plan_of
from paceline.plan.pilot import Decision, Knowledge, Option, next_leg, saved, spent, typical
from paceline.run import RunDirectory
from paceline.schema import Candidate, Config, decode, encode, write_json
from paceline.schema.legs import Leg
from paceline.text import rate
from paceline.workflow.runners import Here, Home, Runner, There, Went, wait_until_ready

if TYPE_CHECKING:
    from paceline.launch.standby import Standby
    from paceline.train.handover import Handover
    from paceline.train.loop import Outcome

PATIENCE = 2.0
"""A trial ends when its updates take this many times as long as the best plan's would have."""


@dataclass(frozen=True, kw_only=True)
class Voyage:
    """What a training in legs begins with."""

    home: Home
    options: Sequence[tuple[Option, Candidate]]
    batch_size: int
    updates: int
    start: str | None = None
    """The plan that past trainings here have found to be the best."""
    script: Sequence[Leg] = ()
    """The legs of a training that is repeated."""
    verbose: bool = False
    say: Callable[[str], None] = print

    @property
    def config(self) -> Config:
        return self.home.config


class LegTraining:
    """Leg after leg, until nothing is left to train or a signal ends it."""

    def __init__(self, voyage: Voyage, first: tuple[str, Runner]) -> None:
        """`first`: the runner that the training begins with, and the name of its plan."""
        self._voyage, self._home = voyage, voyage.home
        self._entries = {option.name: entry for option, entry in voyage.options}
        self._legs: list[Leg] = []
        self._standby: Standby | None = None
        self._wanted = 0.0
        """When the ranks were started."""
        self._rank_seconds: float | None = None
        self._handover: Handover | None = None
        """The state before the leg that is under way."""
        self._runner: Runner | None = None
        self._running = ""
        self._spare: dict[str, Runner] = dict([first])
        """The best plan's runner in this process, kept while another is tried."""
        self.known = Knowledge(
            options=[option for option, _ in voyage.options],
            updates=voyage.updates,
            budget=voyage.config.pilot.budget,
            start=voyage.start,
        )
        from paceline.train.signals import StopSignals

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
            self.close()

    def close(self) -> None:
        """End the ranks that stand by, and give back what runners hold."""
        for runner in (*self._spare.values(), *([self._runner] if self._runner else [])):
            with contextlib.suppress(PacelineError):
                runner.close()
        self._spare.clear()
        if self._standby is not None:
            self._standby.close()
            self._standby = None

    def _one_leg(self) -> bool:
        """One more leg; True when the training is finished."""
        decision = self._decide()
        before = self.known.position
        began = time.perf_counter()
        try:
            setup = self._open(decision)
            went = self._go(decision)
        except (DivergedError, StorageError, KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            self._fail(decision, error, began)
            return False
        self._note(decision, went, began, setup, first=before)
        return went.finished

    def _decide(self) -> Decision:
        if self._standby is not None and self._rank_seconds is None and self._standby.is_ready:
            self._rank_seconds = time.perf_counter() - self._wanted
        ready = self._standby.count if self._standby and self._rank_seconds is not None else 0
        self.known = dataclasses.replace(
            self.known,
            ready=ready,
            elapsed=time.perf_counter() - self._home.began,
            rank_seconds=self._home.open_seconds,
        )
        decision = self._scripted() if self._voyage.script else next_leg(self.known)
        if decision.ranks and self._standby is None:
            self._start_ranks(decision.ranks)
        return decision

    def _scripted(self) -> Decision:
        """The next leg of the training that is repeated; its last plan goes on to the end."""
        position = self.known.position
        for leg in self._voyage.script:
            if leg.first + leg.updates > position:
                break
        left = leg.first + leg.updates - position
        if left <= 0:
            left = self.known.updates - position
        node = self._entries[leg.name].node
        if node.shares_memory and self._standby is None:
            self._start_ranks(node.ranks)
        if node.shares_memory and self._standby is not None:
            wait_until_ready(self._standby)
        return Decision(name=leg.name, updates=left, role="keep", best=leg.name, reason="repeated")

    def _start_ranks(self, count: int) -> None:
        from paceline.launch.standby import Standby

        self._wanted = time.perf_counter()
        most = max(option.ranks for option in self.known.options)
        self._standby = Standby(self._home.run, max(count, most), self._show)

    def _show(self, answer: Mapping[str, Any]) -> None:
        """What a rank would show, here."""
        view, words = self._home.view, answer["with"]
        if answer["show"] == "advance":
            for images in words[0]:
                view.advance(images=images, loss=words[1])
        else:
            getattr(view, answer["show"])(*words, **answer["named"])

    def _open(self, decision: Decision) -> float:
        """Hand over to the plan of the next leg, if it is another; seconds that this took."""
        if decision.name == self._running:
            return 0.0
        start = time.perf_counter()
        with self._home.recorder.span("handover"):
            if self._runner is not None:
                self._handover = self._runner.hand_over()
                self._put_aside(decision)
            self._runner, self._running = None, ""
            runner = self._spare.pop(decision.name, None) or self._make(decision)
            runner.take_over(self._handover)
        self._runner, self._running = runner, decision.name
        return time.perf_counter() - start

    def _make(self, decision: Decision) -> Runner:
        entry = self._entries[decision.name]
        plan = plan_of(self._voyage.config, entry, self._voyage.batch_size, decision.reason)
        if not entry.node.shares_memory:
            return Here(self._home, plan)
        assert self._standby is not None
        return There(self._home, plan, self._standby)

    def _put_aside(self, decision: Decision) -> None:
        """Keep the best plan's runner where going back to it is likely; take others down."""
        assert self._runner is not None
        if isinstance(self._runner, Here) and self._running == decision.best:
            self._spare = {self._running: self._runner}
        else:
            self._runner.close()

    def _go(self, decision: Decision) -> Went:
        assert self._runner is not None
        until = self.known.position + decision.updates
        patience = None
        if decision.role == "trial":
            best = next(
                leg.update_seconds for leg in reversed(self._legs) if leg.name == decision.best
            )
            patience = PATIENCE * decision.updates * best if best else None
        return self._runner.go(until, patience)

    def _fail(self, decision: Decision, error: Exception, began: float) -> None:
        """Out with the plan; the state from before the leg is still there."""
        if decision.name == self.known.options[0].name or self._voyage.script:
            raise error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self._home.view.say(f"{decision.name} is out, training goes on without it: {reason}")
        if self._standby is not None and self._entries[decision.name].node.shares_memory:
            self._standby.close()
            self._standby, self._rank_seconds = None, None
        self._runner, self._running = None, ""
        position = self._handover.state.position.update if self._handover is not None else 0
        leg = Leg(
            name=decision.name,
            plan=self._plan(decision),
            first=position,
            role=decision.role,
            best=decision.best if decision.best != decision.name else self.known.options[0].name,
            began=decision.reason,
            ended=reason,
            began_at=began - self._home.began,
            setup_seconds=time.perf_counter() - began,
        )
        self._add(leg, position=position, out={**self.known.out, decision.name: reason})

    def _plan(self, decision: Decision) -> Any:
        entry = self._entries[decision.name]
        return plan_of(self._voyage.config, entry, self._voyage.batch_size, decision.reason)

    def _note(
        self, decision: Decision, went: Went, began: float, setup: float, *, first: int
    ) -> None:
        middle, error = typical(went.times)
        warm = max(0.0, went.times[0] - middle) if middle and setup else 0.0
        leg = Leg(
            name=decision.name,
            plan=self._plan(decision),
            first=first,
            updates=went.update - first,
            role=decision.role,
            best=decision.best,
            began=decision.reason,
            began_at=began - self._home.began,
            setup_seconds=setup + warm,
            seconds=sum(went.times),
            update_seconds=middle,
            error=error,
        )
        self._tell(decision, leg)
        self._add(leg, position=went.update, updates=went.updates)

    def _add(self, leg: Leg, **changes: Any) -> None:
        self._legs.append(leg)
        self.known = dataclasses.replace(self.known, legs=tuple(self._legs), **changes)
        write_legs(self._home.run, self._legs)

    def _tell(self, decision: Decision, leg: Leg) -> None:
        """One line where the way of training has changed; every leg with --verbose."""
        speed = self._voyage.batch_size / leg.update_seconds if leg.update_seconds else 0.0
        if self._voyage.verbose:
            self._home.view.say(
                f"  leg {len(self._legs) + 1}: {leg.updates} updates with {leg.name}"
                f" ({leg.role}{': ' if leg.began else ''}{leg.began}), {rate(speed)} samples/s"
            )
        kept = [each for each in self._legs if each.role in ("first", "keep")]
        changed = leg.role == "keep" and kept and kept[-1].name != leg.name
        if not changed:
            return
        write_json(self._home.run.plan, leg.plan)
        was = ""
        if before := kept[-1].update_seconds:
            was = f" instead of {rate(self._voyage.batch_size / before)} with {kept[-1].name}"
        self._home.view.say(f"now with {leg.name}: {rate(speed)} samples/s{was}")

    def _summary(self) -> dict[str, Any]:
        best = self._legs[-1].best if self._legs else ""
        return {
            "legs": len(merged(self._legs)),
            "finding_seconds": spent(self.known) if self._legs else 0.0,
            "saved_seconds": saved(self.known, best) if self._legs else 0.0,
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
    return [decode(Leg, json.loads(line)) for line in path.read_text().splitlines()]
