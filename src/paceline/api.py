"""The chain of stages: config -> measure -> plan -> launch -> train.

Only this module and the command line chain them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import dump_config, load_config, with_versions
from paceline.config.environment import data_root
from paceline.errors import RunDirectoryError
from paceline.plan import (
    asked_node,
    asked_plan,
    plan_from_race,
    refuse_options_without_strategy,
)
from paceline.run import RunDirectory, create_run, open_run
from paceline.schema import Config, Plan, Race, encode, read_json, write_json

if TYPE_CHECKING:
    from paceline.train.parts import Given


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` gives back."""

    run: Path
    """The run directory."""
    summary: dict[str, Any]
    """What run.json holds: loss, accuracy, seconds, images per second."""
    exit_code: int = 0

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last epoch, 0 to 1."""
        return self.summary.get("test_accuracy")

    def load_model(self, model: Any) -> Any:
        """Put the trained weights into `model` (a module of the same kind) and return it."""
        from safetensors.torch import load_file

        model.load_state_dict(load_file(self.run / "checkpoints" / "latest" / "model.safetensors"))
        return model


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a training is begun."""

    config: Config
    run: RunDirectory
    plan: Plan | None = None
    given: Given | None = None
    silent: bool = False
    again: bool = False
    say: Callable[[str], None] = print


def begin(
    config: Config | None,
    *,
    run: Path | None = None,
    resume: bool = False,
    plan: Path | None = None,
) -> tuple[Config, RunDirectory, Plan | None]:
    """Make or open the run directory; the plan comes from it, from `plan`, or is still open."""
    if resume:
        directory = open_run(run or Path("runs/latest"))
        if directory.config.exists():
            stored = load_config(directory.config)
            if config is not None and _asked(config) != _asked(stored):
                raise RunDirectoryError(
                    f"{directory.path} was begun with another configuration: leave CONFIG and --set"
                    " out to continue it, or start a new run without --resume"
                )
            config = stored
        elif config is None:
            raise RunDirectoryError(f"{directory.path} has no config.toml to continue from")
    else:
        config = config or load_config()
        directory = create_run(config.name, run)
    directory.lock()
    config = resolve(config)
    if not (resume and directory.config.exists()):
        directory.config.write_text(dump_config(config))
    found = plan or (directory.plan if directory.plan.exists() else None)
    return config, directory, read_json(Plan, found) if found else None


def plan_beside(config: Path) -> Plan | None:
    """The plan of the run whose config.toml this is, so that it is repeated, not planned anew."""
    folder = config if config.is_dir() else config.parent
    stored = folder / "plan.json"
    is_run = (folder / "config.toml").exists() and config.name in ("config.toml", folder.name)
    return read_json(Plan, stored) if is_run and stored.exists() else None


def resolve(config: Config) -> Config:
    """Fill in what depends on where we are: versions, paths, the batch."""
    root = config.data.root or data_root()
    work = config.workload
    if work.batch_size is None and work.batch_per_worker is None:
        work = dataclasses.replace(work, batch_size=work.global_batch(1))
    return with_versions(
        dataclasses.replace(
            config,
            workload=work,
            data=dataclasses.replace(config.data, root=str(Path(root).resolve()) if root else None),
        )
    )


def _asked(config: Config) -> Any:
    """What makes two configurations the same training."""
    data = encode(resolve(config))
    for key in ("versions", "name"):
        data.pop(key)
    return data


def run_training(start: Start) -> Result:
    """Plan if needed, launch, train, and return what came of it."""
    from paceline.measure.instructions import use_safe_instructions

    config, run, plan = start.config, start.run, start.plan
    note = use_safe_instructions(config)
    if note:
        start.say(note)
    if plan is None:
        plan = choose_plan(start)
    write_json(run.plan, plan)
    node = plan.nodes[0]
    if node.ranks == 1:
        from paceline.train.loop import Task, train
        from paceline.train.progress import make_view

        task = Task(
            config=config,
            plan=plan,
            run=run,
            given=start.given,
            view=make_view(silent=start.silent),
        )
        outcome = train(task)
        return Result(run=run.path, summary=outcome.summary, exit_code=outcome.exit_code)
    from paceline.launch.local import run_ranks

    code = run_ranks(RunDirectory(run.path.resolve()), node, silent=start.silent)
    summary = json.loads(run.summary.read_text()) if run.summary.exists() else {}
    return Result(run=run.path, summary=summary, exit_code=code)


def choose_plan(start: Start) -> Plan:
    """The plan for this machine: what was asked for, or what a race finds."""
    from paceline.local.cores import usable_cores

    config = start.config
    if config.local.strategy != "auto":
        node = asked_node(
            config.local, usable_cores(), elementwise=_has_elementwise_optimizer(start)
        )
        return asked_plan(config, node, f"local.strategy = {node.strategy!r} was asked for")
    refuse_options_without_strategy(config.local)
    found, cached = race(
        config, given=start.given, again=start.again, quiet=start.silent, say=start.say
    )
    write_json(start.run.race, found)
    for warning in found.warnings:
        start.say(f"warning: {warning}")
    start.say(f"{'race (from the cache)' if cached else 'race'}: {found.decision}")
    return plan_from_race(config, found)


def race(
    config: Config,
    *,
    given: Given | None = None,
    again: bool = False,
    seconds: float = 40.0,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Race, bool]:
    """Race this machine's strategies for a configuration; True when it came from the cache."""
    from paceline.measure.instructions import use_safe_instructions
    from paceline.measure.race import RaceRequest, run_race

    note = use_safe_instructions(config)
    if note and not quiet:
        say(note)
    request = RaceRequest(
        config=config,
        batch_size=config.workload.global_batch(1),
        given=given,
        again=again,
        seconds=seconds,
        quiet=quiet,
        say=say,
    )
    return run_race(request)


def _has_elementwise_optimizer(start: Start) -> bool:
    own = start.given is not None and start.given.optimizer is not None
    return not own and ":" not in start.config.optimizer.name
