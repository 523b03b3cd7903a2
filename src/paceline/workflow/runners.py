"""Where the updates of a leg are made: in this process, or in ranks that stand by."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.run import RunDirectory
from paceline.schema import Config, Plan, decode, encode
from paceline.schema.checkpoint import read_state

if TYPE_CHECKING:
    from torch import nn

    from paceline.launch.standby import Standby
    from paceline.observe.recorder import Recorder
    from paceline.training.given import Given
    from paceline.training.handover import Handover
    from paceline.training.loop import Outcome, Trainer
    from paceline.training.parts import Parts
    from paceline.training.progress import View


@dataclass(frozen=True, kw_only=True)
class Home:
    """What the process that leads a training has for all of its legs."""

    config: Config
    run: RunDirectory
    parts: Parts
    given: Given | None
    view: View
    recorder: Recorder
    began: float
    """When the training was asked for (perf_counter)."""
    open_seconds: float
    """What opening the data took."""
    rehearsal: bool = False
    """All legs are made on a copy of the weights."""


@dataclass(frozen=True, kw_only=True)
class Went:
    """What a leg came to."""

    times: tuple[float, ...]
    """Seconds of each of its updates."""
    update: int
    """Updates done in all."""
    updates: int
    """Updates of the whole training."""
    finished: bool
    memory_mb: float = 0.0
    """Largest resident memory of the ranks together, where there are any."""
    took: tuple[tuple[float, ...], ...] = ()
    """Seconds of each of several nodes in its updates, waiting for the others left out."""
    fairer: tuple[float, ...] = ()
    """Shares with which the nodes would wait less for each other, where that is worth it."""

    @classmethod
    def told(cls, words: Mapping[str, Any]) -> Went:
        """As another process says it, in JSON."""
        found = dict(words) | {"times": tuple(words["times"])}
        found["took"] = tuple(map(tuple, words.get("took", ())))
        found["fairer"] = tuple(words.get("fairer", ()))
        return cls(**{each.name: found[each.name] for each in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Began:
    """Where a training begins."""

    update: int
    """Updates that were done before."""
    updates: int
    """Updates of the whole training."""
    finished: bool
    plan: Plan | None
    """That made the last of the updates before."""
    started: float
    """When it would have begun if it had never been interrupted (perf_counter)."""

    @classmethod
    def of(cls, trainer: Trainer, before: Mapping[str, Any]) -> Began:
        """Where a trainer stands now; `before`: the plan of its checkpoint, if there is one."""
        return cls(
            plan=decode(Plan, before) if before else None,
            update=trainer.position.update,
            updates=trainer.updates,
            finished=trainer.is_finished,
            started=trainer.started,
        )


class Runner(Protocol):
    """Makes the updates of one plan."""

    is_kept: bool
    """Whether it can be kept while another plan is tried, to be taken up again."""

    def take_over(self, handover: Handover | None) -> None: ...
    def go(self, until: int, patience: float | None) -> Went: ...
    def hand_over(self) -> Handover: ...
    def finish(self, more: Mapping[str, Any], received: int | None) -> Outcome: ...
    def request_stop(self) -> None: ...
    def close(self) -> None: ...


class Here:
    """In this process."""

    is_kept = True

    def __init__(self, home: Home, plan: Plan, checkpoint: Path | None = None) -> None:
        """`checkpoint`: what the first leg of a training goes on from."""
        from paceline.training.assemble import Task
        from paceline.training.loop import Trainer
        from paceline.training.proof import prove

        self._home = home
        task = Task(
            config=home.config,
            plan=plan,
            run=home.run,
            given=home.given,
            view=home.view,
            checkpoint=checkpoint,
            rehearsal=home.rehearsal,
        )
        prove(task, home.parts, home.recorder)
        self._trainer = Trainer(task, home.parts, home.recorder, started=home.began)
        self._threads = self._count_threads()

    @staticmethod
    def _count_threads() -> int:
        import torch

        return torch.get_num_threads()

    @property
    def model(self) -> nn.Module:
        return self._trainer.strategy.model

    def begin(self) -> Began:
        """Begin the training, or go on from its newest checkpoint."""
        trainer = self._trainer
        trainer.check_goal()
        trainer.resume()
        newest = trainer.task.checkpoint
        return Began.of(trainer, read_state(newest).plan if newest is not None else {})

    def take_over(self, handover: Handover | None) -> None:
        from paceline.local.cores import set_threads

        set_threads(self._threads)
        if handover is not None:
            self._trainer.take_over(handover)

    def go(self, until: int, patience: float | None) -> Went:
        trainer = self._trainer
        times = trainer.run_leg(until, patience)
        return Went(
            times=tuple(times),
            update=trainer.position.update,
            updates=trainer.updates,
            finished=trainer.is_finished,
        )

    def hand_over(self) -> Handover:
        return self._trainer.hand_over()

    def finish(self, more: Mapping[str, Any], received: int | None) -> Outcome:
        return self._trainer.end(self._home.open_seconds, more, received)

    def request_stop(self) -> None:
        self._trainer.team.request_stop()

    def close(self) -> None:
        self._trainer.strategy.close()


class There:
    """In ranks that stand by."""

    is_kept = False

    def __init__(self, home: Home, plan: Plan, standby: Standby) -> None:
        self._home, self._plan, self._standby = home, plan, standby
        self._members = plan.nodes[0].ranks

    def take_over(self, handover: Handover | None) -> None:
        assert handover is not None, "a leg in ranks takes over from one in this process"
        with self._elsewhere():
            self._standby.order(
                self._members,
                "leg",
                plan=encode(self._plan),
                began=self._home.began,
                rehearsal=self._home.rehearsal,
                place=None,
            )
            rest = handover.store(self._standby.handover)
            self._standby.order(self._members, "take_over", rest=rest)

    def go(self, until: int, patience: float | None) -> Went:
        with self._elsewhere():
            return Went.told(
                self._standby.order(self._members, "go", until=until, patience=patience)
            )

    def leave(self) -> None:
        """Let the ranks stand by again, and forget what they did."""
        self._standby.order(self._members, "close_leg")

    def hand_over(self) -> Handover:
        from paceline.training.handover import Handover

        with self._elsewhere():
            answer = self._standby.order(self._members, "end")
        return Handover.fetch(self._standby.handover, answer["rest"])

    def finish(self, more: Mapping[str, Any], received: int | None) -> Outcome:
        from paceline.training.loop import Outcome

        answer = self._standby.order(
            self._members,
            "finish",
            open_seconds=self._home.open_seconds,
            more=more,
            received=received,
        )
        self.leave()
        return Outcome(summary=answer["summary"], exit_code=answer["exit_code"])

    def request_stop(self) -> None:
        self._standby.request_stop()

    def close(self) -> None:
        """Nothing is held here: the ranks gave everything back when they handed over."""

    def _elsewhere(self) -> Any:
        return self._home.recorder.span("stand_by")


def wait_until_ready(standby: Standby) -> None:
    """Sleep until all ranks have come up."""
    while not standby.is_ready:
        time.sleep(0.05)
