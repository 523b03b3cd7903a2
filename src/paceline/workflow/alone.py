"""A training on this machine alone: begins at once, and finds its fastest way while it trains."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.cache import keep, kept, place_of
from paceline.errors import ProofError, StrategyError, UnsupportedError
from paceline.hardware.kept_races import fingerprint
from paceline.plan.hopes import name_of, options, plan_of
from paceline.plan.pilot import Option, learned
from paceline.run import RunDirectory
from paceline.schema import Candidate, Config, Plan, write_json
from paceline.schema.legs import Leg, Lesson, cut_at, read_legs
from paceline.workflow.legs import LegsRequest, LegTraining, write_legs
from paceline.workflow.runners import Began, Here, Home

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.loop import Outcome
    from paceline.training.progress import View
    from paceline.workflow.training import TrainingStart


def train_alone(start: TrainingStart) -> Outcome:
    """Train on this machine, from the first update to the last."""
    from paceline.local.memory import keep_freed_memory
    from paceline.training.progress import make_view

    keep_freed_memory()  # before the view starts a thread
    view = make_view(silent=start.silent, unit=start.config.workload.unit)
    try:
        return _with_view(start, view)
    finally:
        view.close()


def _with_view(start: TrainingStart, view: View) -> Outcome:
    from paceline.training.assemble import Task
    from paceline.training.device import use_deterministic
    from paceline.training.parts import make_parts
    from paceline.training.watching import observed

    config = start.config
    use_deterministic(config.train.deterministic)
    opening = time.perf_counter()
    parts = make_parts(config, start.given)
    opened = time.perf_counter() - opening
    if parts.dataset.left_out:
        view.say(parts.dataset.left_out)
    try:
        with observed(Task(config=config, plan=_no_plan(config), run=start.run, view=view)) as seen:
            home = Home(
                config=config,
                run=start.run,
                parts=parts,
                given=start.given,
                view=view,
                recorder=seen,
                began=start.began,
                open_seconds=opened,
            )
            return _train(start, home)
    finally:
        parts.dataset.close()


def _train(start: TrainingStart, home: Home) -> Outcome:
    batch_size = start.config.workload.global_batch(1)
    place = lesson_place(start.config, batch_size)
    lesson = _read_lesson(place) if start.given is None and not start.again else Lesson()
    every = _options(start, home, lesson, divisible=True)
    plans = {o.name: plan_of(start.config, e, batch_size, "") for o, e in every}
    plans |= {leg.name: leg.plan for leg in start.script}
    wanted = name_of(start.plan) if start.plan is not None else lesson.best
    building = time.perf_counter()
    name, runner = _first_runner(start, home, plans, [option for option, _ in every], wanted)
    built = time.perf_counter() - building
    begun = runner.begin()
    home.recorder.ready()
    write_json(home.run.plan, plans[name])
    if not can_divide(start.config, runner.model):
        every = _options(start, home, lesson, divisible=False)
    training = LegTraining(
        LegsRequest(
            home=dataclasses.replace(home, began=begun.started),
            options=[option for option, _ in every],
            plans=plans,
            begun=begun,
            began=start.began,
            built_seconds=built,
            earlier=legs_before(home.run, begun),
            start=name if name == wanted else None,
            script=start.script,
            verbose=start.verbose,
        ),
        first=(name, runner),
    )
    outcome = training.run()
    if start.given is None and not start.script:
        _keep_lesson(place, training)
    return outcome


def legs_before(
    run: RunDirectory, begun: Began, name: Callable[[Plan], str] = name_of
) -> list[Leg]:
    """What a training that goes on has behind it, with the leg that was cut short."""
    found = cut_at(read_legs(run.legs), begun.update)
    end = found[-1].first + found[-1].updates if found else 0
    if end < begun.update and begun.plan is not None:
        found.append(
            Leg(
                name=name(begun.plan),
                plan=begun.plan,
                first=end,
                updates=begun.update - end,
                ended="interrupted",
            )
        )
    write_legs(run, found)
    return found


def _first_runner(
    start: TrainingStart,
    home: Home,
    plans: Mapping[str, Plan],
    every: Sequence[Option],
    wanted: str,
) -> tuple[str, Here]:
    """The plan that is wanted, where this process alone can train it; else the simplest."""
    from paceline.training.checkpoint import Checkpoints

    here = [option.name for option in every if not option.ranks]
    newest = Checkpoints(home.run.checkpoints, start.config.train.keep).newest()
    if wanted in here[1:] and not start.script:
        try:
            return wanted, Here(home, plans[wanted], newest)
        except (ProofError, StrategyError, UnsupportedError) as error:
            # What was the fastest before does not do any more.
            home.view.say(f"{error}; training begins with {here[0]} instead")
    return here[0], Here(home, plans[here[0]], newest)


def _options(
    start: TrainingStart, home: Home, lesson: Lesson, *, divisible: bool
) -> list[tuple[Option, Candidate]]:
    from paceline.local.cores import usable_cores
    from paceline.local.tiles import has_bf16

    return options(
        start.config,
        cores=usable_cores(),
        batch_size=start.config.workload.global_batch(1),
        elementwise=home.parts.elementwise,
        images=len(home.parts.dataset.sample_shape) == 3,
        many=start.config.train.device != "cuda",
        # To compile a model for every plan would take longer than most trainings.
        divisible=divisible and not start.config.numerics.compile,
        rounds=start.config.train.device == "cuda" or has_bf16(),
        learned=lesson.factors,
    )


def can_divide(config: Config, model: nn.Module) -> bool:
    """Whether parts of a batch can have the statistics of all, or need not have them."""
    from paceline.local.batch_norm import refuse_own_forward

    if "local_batch_norm" in config.numerics.allow:
        return True
    try:
        refuse_own_forward(model)
    except StrategyError:
        return False
    return True


def _no_plan(config: Config) -> Plan:
    return Plan(batch_size=config.workload.global_batch(1))


def lesson_place(config: Config, batch_size: int) -> Path:
    """Where the cache keeps what trainings of a workload have taught."""
    return place_of("lessons", fingerprint(config, batch_size))


def _read_lesson(place: Path) -> Lesson:
    found = kept(Lesson, place) or Lesson()
    return found if all(factor > 0 for factor in found.factors.values()) else Lesson()


def _keep_lesson(place: Path, training: LegTraining) -> None:
    known = training.known
    if known.legs:
        keep(place, Lesson(best=known.legs[-1].best, factors=learned(known)))
