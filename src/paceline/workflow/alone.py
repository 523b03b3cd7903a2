"""A training on this machine alone: begins at once, and finds its fastest way while it trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.environment import cache_root
from paceline.errors import PacelineError
from paceline.plan.hopes import options, plan_of
from paceline.plan.pilot import Option, learned
from paceline.run import RunDirectory
from paceline.schema import Candidate, Config, Plan, read_json, write_json
from paceline.schema.legs import Leg, Lesson
from paceline.workflow.legs import LegsRequest, LegTraining
from paceline.workflow.runners import Here, Home

if TYPE_CHECKING:
    from torch import nn

    from paceline.train.given import Given
    from paceline.train.loop import Outcome


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What is asked for."""

    config: Config
    run: RunDirectory
    given: Given | None = None
    script: Sequence[Leg] = ()
    silent: bool = False
    verbose: bool = False
    began: float
    """When it was asked for (perf_counter)."""


def train_alone(asked: Alone) -> Outcome:
    """Train on this machine, from the first update to the last."""
    from paceline.local.memory import keep_freed_memory
    from paceline.train.assemble import Task
    from paceline.train.device import use_deterministic
    from paceline.train.parts import make_parts
    from paceline.train.progress import make_view
    from paceline.train.watching import observed

    config = asked.config
    keep_freed_memory()
    use_deterministic(config.train.deterministic)
    view = make_view(silent=asked.silent)
    opening = time.perf_counter()
    parts = make_parts(config, asked.given)
    opened = time.perf_counter() - opening
    try:
        with observed(Task(config=config, plan=_no_plan(config), run=asked.run, view=view)) as seen:
            home = Home(
                config=config,
                run=asked.run,
                parts=parts,
                given=asked.given,
                view=view,
                recorder=seen,
                began=asked.began,
                open_seconds=opened,
            )
            return _train(asked, home)
    finally:
        view.close()
        parts.dataset.close()


def _train(asked: Alone, home: Home) -> Outcome:
    batch_size = asked.config.workload.global_batch(1)
    place = lesson_place(asked.config, batch_size)
    lesson = Lesson() if asked.given is not None else _read_lesson(place)
    every = _options(asked, home, lesson, divisible=True)
    plans = {o.name: plan_of(asked.config, e, batch_size, "") for o, e in every}
    plans |= {leg.name: leg.plan for leg in asked.script}
    here = [option.name for option, _ in every if not option.ranks]
    begins = lesson.best if lesson.best in here and not asked.script else here[0]
    runner = Here(home, plans[begins])
    home.recorder.ready()
    write_json(home.run.plan, plans[begins])
    if looks_across_samples(runner.model):
        every = _options(asked, home, lesson, divisible=False)
    training = LegTraining(
        LegsRequest(
            home=home,
            options=[option for option, _ in every],
            plans=plans,
            updates=runner.updates,
            start=begins if begins == lesson.best else None,
            script=asked.script,
            verbose=asked.verbose,
        ),
        first=(begins, runner),
    )
    outcome = training.run()
    if asked.given is None and not asked.script:
        _keep_lesson(place, training)
    return outcome


def _options(
    asked: Alone, home: Home, lesson: Lesson, *, divisible: bool
) -> list[tuple[Option, Candidate]]:
    from paceline.local.cores import usable_cores

    return options(
        asked.config,
        cores=usable_cores(),
        batch_size=asked.config.workload.global_batch(1),
        elementwise=home.parts.elementwise,
        images=len(home.parts.dataset.sample_shape) == 3,
        many=asked.given is None and asked.config.train.device != "cuda",
        divisible=divisible,
        learned=lesson.factors,
    )


def looks_across_samples(model: nn.Module) -> bool:
    """Whether a layer normalises over the samples of a batch, which must then stay whole."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def _no_plan(config: Config) -> Plan:
    return Plan(batch_size=config.workload.global_batch(1))


def lesson_place(config: Config, batch_size: int) -> Path:
    """Where the cache keeps what trainings of a workload have taught."""
    from paceline.measure.race import RaceRequest, fingerprint

    request = RaceRequest(config=config, batch_size=batch_size)
    return cache_root() / "lessons" / f"{fingerprint(request)}.json"


def _read_lesson(place: Path) -> Lesson:
    try:
        found = read_json(Lesson, place)
    except PacelineError:
        return Lesson()  # none yet, or of another version
    return found if all(factor > 0 for factor in found.factors.values()) else Lesson()


def _keep_lesson(place: Path, training: LegTraining) -> None:
    known = training.known
    if not known.legs:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, Lesson(best=known.legs[-1].best, factors=learned(known)))
    except OSError:
        return  # a cache that cannot be written costs the next training its head start only
