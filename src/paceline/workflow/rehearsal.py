"""Legs on a copy of the weights: all begin at the same place, and nothing of them is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import dump_config
from paceline.errors import WorkerError
from paceline.local.memory import (
    give_back_memory,
    keep_freed_memory,
    reset_peak_memory,
    resident_mb,
)
from paceline.run import RunDirectory
from paceline.schema import Config, Plan
from paceline.schema.config import Until
from paceline.signals import handled, leave
from paceline.workflow.runners import Here, Home, There, Went, wait_until_ready

if TYPE_CHECKING:
    from paceline.launch.standby import Standby
    from paceline.training.handover import Handover
    from paceline.training.parts import Parts

ENDLESS = 10**9
"""Updates of a training that only its turns end."""


@contextlib.contextmanager
def rehearsing(config: Config) -> Iterator[Rehearsal]:
    """A rehearsal of a training, which leaves neither files nor processes behind."""
    from paceline.training.assemble import Task
    from paceline.training.device import use_deterministic
    from paceline.training.parts import make_parts
    from paceline.training.progress import SilentView
    from paceline.training.watching import observed

    keep_freed_memory()
    use_deterministic(config.train.deterministic)
    config = _without_an_end(config)
    with handled(leave), tempfile.TemporaryDirectory(prefix="paceline-race-") as folder:
        run, view = RunDirectory(Path(folder)), SilentView()
        run.config.write_text(dump_config(config))
        parts = make_parts(config)
        plan = Plan(batch_size=config.workload.global_batch(1))
        with observed(Task(config=config, plan=plan, run=run, view=view)) as recorder:
            home = Home(
                config=config,
                run=run,
                parts=parts,
                given=None,
                view=view,
                recorder=recorder,
                began=time.perf_counter(),
                open_seconds=0.0,
                rehearsal=True,
            )
            rehearsal = Rehearsal(home)
            try:
                yield rehearsal
            finally:
                rehearsal.close()
                parts.dataset.close()


def _without_an_end(config: Config) -> Config:
    train = dataclasses.replace(config.train, epochs=ENDLESS, steps=None, until=Until(), lengths={})
    observe = dataclasses.replace(config.observe, events=False, tensorboard=False)
    return dataclasses.replace(config, train=train, observe=observe)


class Rehearsal:
    """Turns of plans, in this process or in ranks that stand by."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.ranks = 1
        """What the largest plan needs; to be set before the first turn."""
        self._standby: Standby | None = None
        self._start: Handover | None = None

    @property
    def parts(self) -> Parts:
        """Model, data and loss of the training."""
        return self._home.parts

    def turn(self, plan: Plan, seconds: float) -> Went:
        """Updates for about so long, a few at least, after one to warm up that does not count."""
        from paceline.local.cores import set_threads, usable_cores

        if plan.nodes[0].shares_memory:
            return self._in_ranks(plan, seconds)
        reset_peak_memory()
        runner = Here(self._home, plan)
        try:
            runner.begin()
            went = runner.go(ENDLESS, seconds)
        finally:
            runner.close()
            del runner
            gc.collect()  # each plan is measured alone, with what its memory takes
            give_back_memory()
            set_threads(usable_cores())
        return dataclasses.replace(went, times=went.times[1:], memory_mb=sum(resident_mb()))

    def _in_ranks(self, plan: Plan, seconds: float) -> Went:
        start = self._beginning(plan)
        try:
            runner = There(self._home, plan, self._ready_ranks())
            runner.take_over(start)
            went = runner.go(ENDLESS, seconds)
            runner.leave()
        except WorkerError:
            self.close()
            raise
        return dataclasses.replace(went, times=went.times[1:])

    def _beginning(self, plan: Plan) -> Handover:
        """The state before the first update, for those who are not in this process."""
        if self._start is None:
            nodes = (type(plan.nodes[0])(),)
            plain = dataclasses.replace(
                plan, nodes=nodes, precision="fp32", memory_format="contiguous", compile=False
            )
            runner = Here(self._home, plain)
            try:
                runner.begin()
                self._start = runner.hand_over()
            finally:
                runner.close()
        return self._start

    def _ready_ranks(self) -> Standby:
        from paceline.launch.standby import Standby

        if self._standby is None:
            self._standby = Standby(self._home.run, self.ranks, lambda answer: None)
        wait_until_ready(self._standby)
        return self._standby

    def close(self) -> None:
        """End the ranks."""
        if self._standby is not None:
            self._standby.close()
            self._standby = None
