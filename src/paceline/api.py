"""The chain of stages: config -> measure -> plan -> launch -> train.

Only this module and the command line chain them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import config_from, dump_config, load_config, with_versions
from paceline.config.environment import data_root
from paceline.errors import ConfigError, RunDirectoryError, UserError, shown
from paceline.references import is_object, object_name, reference_to
from paceline.run import RunDirectory, create_run, open_run, write_whole
from paceline.schema import Config, Plan, Race, read_json
from paceline.schema.checkpoint import (
    TrainState,
    check_continued,
    fixed_settings,
    flat_settings,
    newest_good,
    other_settings,
    with_lengths,
)
from paceline.schema.codec import decode, encode
from paceline.schema.plain import read_json_file

if TYPE_CHECKING:
    from paceline.schema.hosts import Hosts
    from paceline.schema.legs import Leg
    from paceline.train.given import Given


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` gives back."""

    run: Path
    """The run directory."""
    summary: dict[str, Any]
    """What run.json holds: loss, accuracy where there are classes, seconds, images per second."""
    exit_code: int = 0

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last epoch, 0 to 1; None where there are no classes."""
        return self.summary.get("test_accuracy")

    def load_model(self, model: Any) -> Any:
        """Put the trained weights into `model` (a module of the same kind) and return it."""
        from paceline.models.extra_state import load_model

        model.load_state_dict(load_model(self.run / "checkpoints" / "latest" / "model.safetensors"))
        return model


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train: names as in a configuration, or objects of your own."""

    model: str | Callable[..., Any] = "mnist_cnn"
    """A name, "module:callable", or a function or class that makes a new `nn.Module`."""
    data: Any = "digits"
    """A name, a folder, "module:callable", a map-style dataset, a pair (train, test), or a function
    that gives one of these two."""
    loss: str | Callable[..., Any] = "cross_entropy"
    """A name, or (outputs, targets) -> mean over the samples."""
    optimizer: str | Callable[..., Any] = "adam"
    """A name, or parameters -> `torch.optim.Optimizer` (also given `lr` if it takes one)."""
    batch_size: int = 128
    """Samples per update over all workers."""


def train(
    workload: Workload | None = None,
    *,
    epochs: int = 5,
    settings: Mapping[str, Any] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    silent: bool = False,
) -> Result:
    """Race, plan and train; every setting of a configuration can be given by its dotted key.

    >>> result = paceline.train(
    ...     paceline.Workload(model=MyNet, data=(train_set, test_set), batch_size=64),
    ...     epochs=3, settings={"optimizer.learning_rate": 0.01, "local.strategy": "threads"},
    ... )                                                                    # doctest: +SKIP
    """
    names, given = _names_and_objects(workload or Workload())
    config = config_from(
        {"name": "train", "train.epochs": epochs, **names, **flat_settings(settings or {})}
    )
    _refuse_two_names(config, names)
    where = Path(run) if run is not None else None
    say = (lambda text: None) if silent else print
    config, directory, plan = begin(config, run=where, resume=resume, given=given, say=say)
    return run_training(
        Start(config=config, run=directory, plan=plan, given=given, silent=silent, say=say)
    )


def _names_and_objects(workload: Workload) -> tuple[dict[str, Any], Given | None]:
    """Settings for what is to be trained, and the objects that have no name to be found by."""
    from paceline.train.given import KEYS, Given

    names: dict[str, Any] = {"workload.batch_size": workload.batch_size}
    objects: dict[str, Any] = {}
    for part, key in KEYS.items():
        value = getattr(workload, part)
        name = value if isinstance(value, str) else reference_to(value)
        if name is None:
            name, objects[part] = object_name(value), value
        names[key] = name
    return names, Given(**objects) if objects else None


def _refuse_two_names(config: Config, names: Mapping[str, Any]) -> None:
    """A setting must not say something else than the object that is trained."""
    flat = flat_settings(encode(config))
    for key, name in names.items():
        if is_object(str(name)) and flat[key] != name:
            raise ConfigError(
                f"settings has {key} = {flat[key]!r}, but the workload gives {name}: leave one of"
                " them out"
            )


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
    show: Callable[[str], None] = print
    """Where the lines that ranks of other hosts print go."""
    hosts: HostsRequest | None = None
    """Where to train, if not on this machine alone."""
    verbose: bool = False
    """Tell of every leg."""
    script: Sequence[Leg] = ()
    """The legs of a run that is repeated."""
    began: float = field(default_factory=time.perf_counter)
    """When the training was asked for."""


@dataclass(frozen=True, kw_only=True)
class HostsRequest:
    """Which machines train, and who starts them."""

    hosts: Hosts
    engine: str = "auto"
    """A name of `launch.engines`, with an option as in "torchrun:c10d"."""
    options: tuple[str, ...] = ()
    """For sbatch or srun."""


def begin(
    config: Config | None,
    *,
    run: Path | None = None,
    resume: bool = False,
    plan: Path | None = None,
    changes: Sequence[str] = (),
    given: Given | None = None,
    elsewhere: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Config, RunDirectory, Plan | None]:
    """Make or open the run directory; the plan comes from it, from `plan`, or is still open.

    `changes` are settings (as "key=value") of a run to be continued, where `config` is None.
    `elsewhere`: hosts may have kept checkpoints that are not here, and are asked later.
    """
    from paceline.train.given import refuse_without_objects

    opened = open_run(run or Path("runs/latest")) if resume else None
    config = resolve(_continued(opened, config, changes) if opened else config or load_config())
    refuse_without_objects(config, given)
    directory = opened or create_run(config.name, run)
    with directory.explained():
        directory.lock()
        directory.remember()
        try:
            state = None
            if resume:
                config, state = _checkpoint(directory, config, say, elsewhere=elsewhere)
            stored_plan = _stored_plan(directory, plan, state, say)
            same = directory.config.exists() and load_config(directory.config) == config
            if not (resume and same):
                write_whole(directory.config, dump_config(config))
        except BaseException:
            directory.discard()
            directory.unlock()
            raise
    return config, directory, stored_plan


def plan_beside(path: Path, config: Config) -> Plan | None:
    """The plan of the run whose config.toml `path` is, so that it is repeated, not planned anew.

    None where `config`, which came of it, asks for something that a plan decides.
    """
    folder = path if path.is_dir() else path.parent
    stored = folder / "plan.json"
    is_run = (folder / "config.toml").exists() and path.name in ("config.toml", folder.name)
    if not is_run or not stored.exists():
        return None
    before = resolve(load_config(folder))
    same = all(
        getattr(before, part) == getattr(config, part)
        for part in ("workload", "numerics", "local", "exchange")
    )
    return read_json(Plan, stored) if same and before.train.device == config.train.device else None


def legs_beside(path: Path) -> list[Leg]:
    """The legs of the run whose config.toml `path` is, so that they are repeated."""
    from paceline.workflow.legs import read_legs

    folder = path if path.is_dir() else path.parent
    return read_legs(folder / "legs.jsonl")


def resolve(config: Config) -> Config:
    """Fill in what depends on where we are: versions, paths, the batch."""
    root = config.data.root or data_root()
    work, optimizer = config.workload, config.optimizer
    if work.batch_size is None and work.batch_per_worker is None:
        work = dataclasses.replace(work, batch_size=work.global_batch(1))
    work = dataclasses.replace(
        work,
        model=_from_anywhere(work.model),
        data=_from_anywhere(work.data),
        loss=_from_anywhere(work.loss),
        weights=str(Path(work.weights).resolve()) if work.weights else None,
    )
    return with_versions(
        dataclasses.replace(
            config,
            workload=work,
            optimizer=dataclasses.replace(optimizer, name=_from_anywhere(optimizer.name)),
            data=dataclasses.replace(config.data, root=str(Path(root).resolve()) if root else None),
        )
    )


def _from_anywhere(name: str) -> str:
    """A path, or a reference into a file, so that it is found from another directory too."""
    place, separator, attribute = name.rpartition(":")
    if separator and place.endswith(".py"):
        return f"{Path(place).resolve()}:{attribute}"
    if not separator and "/" in name:
        return str(Path(name).resolve())
    return name


def _continued(directory: RunDirectory, config: Config | None, changes: Sequence[str]) -> Config:
    """The configuration of a run to be continued, with what may change of what is asked."""
    if not directory.config.exists():
        if config is None:
            raise RunDirectoryError(f"{directory.path} has no config.toml to continue from")
        return config
    stored = load_config(directory.config)
    wanted = config or load_config(directory.config, changes)
    other = other_settings(fixed_settings(resolve(stored)), fixed_settings(resolve(wanted)))
    if other:
        raise RunDirectoryError(
            f"{directory.path} was begun with another configuration ({', '.join(other[:4])}"
            f"{', ...' if len(other) > 4 else ''}): leave CONFIG and --set out to continue it, or"
            " start a new run without --resume; only how long it trains may change"
        )
    return dataclasses.replace(wanted, name=stored.name)


def _checkpoint(
    directory: RunDirectory, config: Config, say: Callable[[str], None], *, elsewhere: bool
) -> tuple[Config, TrainState | None]:
    """What a run goes on from: its newest checkpoint that is not damaged, of this training."""
    found = newest_good(directory.checkpoints, say)
    if found is None and elsewhere:
        return config, None
    if found is None:
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint to continue from: train it from the start with"
            f" `paceline train {directory.config} --run {directory.path}`"
        )
    config = with_lengths(config, found[1])
    check_continued(*found, config)
    for until, length in config.train.lengths.items():
        say(
            f"the learning rate follows the new length from update {until} on, and before that the"
            f" {length} updates it was to be: config.toml says so in train.lengths"
        )
    return config, found[1]


def _stored_plan(
    directory: RunDirectory,
    given: Path | None,
    state: TrainState | None,
    say: Callable[[str], None],
) -> Plan | None:
    """The plan that was asked for, or the run's; a damaged one of a run is in its checkpoints."""
    if given is not None or state is None:
        found = given or (directory.plan if directory.plan.exists() else None)
        return read_json(Plan, found) if found else None
    try:
        return read_json(Plan, directory.plan)
    except UserError as error:
        if not state.plan:
            say(f"warning: {error}; the run is planned anew")
            return None
        say(f"warning: {error}; the plan of the newest checkpoint is used")
        return decode(Plan, state.plan)


def run_training(start: Start) -> Result:
    """Plan if needed, launch, train, and return what came of it."""
    try:
        with start.run.explained():
            return _run_training(_with_objects(start))
    except UserError:
        start.run.discard()
        raise
    finally:
        start.run.unlock()


def _with_objects(start: Start) -> Start:
    """With data of the caller's own opened; what would leave objects behind is refused."""
    from paceline.train.given import refuse_other_hosts, refuse_other_processes, with_open_data

    if start.given is None:
        return start
    if start.hosts is not None:
        refuse_other_hosts(start.config, start.given)
    nodes = start.plan.nodes if start.plan is not None else ()
    for strategy in (start.config.local.strategy, *(node.strategy for node in nodes)):
        refuse_other_processes(start.config, strategy, start.given)
    from paceline.train.parts import data_request

    given = with_open_data(start.given, start.config, data_request(start.config))
    return dataclasses.replace(start, given=given)


def _run_training(start: Start) -> Result:
    from paceline.measure.instructions import use_safe_instructions

    config, run = start.config, start.run
    note = use_safe_instructions(config)
    if note:
        start.say(note)
    if start.hosts is not None:
        from paceline.commands.spread import train_on_hosts

        code = train_on_hosts(start)
        return Result(run=run.path, summary=summary_of(run), exit_code=code)
    if start.script or (start.plan is None and _finds_out(config)):
        return _train_in_legs(start)
    from paceline.commands.alone import train_alone

    return train_alone(start)


def _finds_out(config: Config) -> bool:
    """Whether the training finds its fastest way while it trains."""
    return config.pilot.legs and config.local.strategy == "auto" and not config.numerics.compile


def _train_in_legs(start: Start) -> Result:
    from paceline.plan import refuse_options_without_strategy
    from paceline.workflow.alone import Alone, train_alone

    refuse_options_without_strategy(start.config.local)
    outcome = train_alone(
        Alone(
            config=start.config,
            run=start.run,
            given=start.given,
            silent=start.silent,
            verbose=start.verbose,
            script=start.script,
            began=start.began,
        )
    )
    return Result(run=start.run.path, summary=outcome.summary, exit_code=outcome.exit_code)


def summary_of(run: RunDirectory) -> dict[str, Any]:
    """What run.json holds; empty before the end of a training."""
    if not run.summary.exists():
        return {}
    try:
        found = read_json_file(run.summary)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{run.summary} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{run.summary} is {shown(found)}, not a table of keys")
    return found


def race(
    config: Config,
    *,
    given: Given | None = None,
    again: bool = False,
    seconds: float = 40.0,
    quiet: bool = False,
    thorough: bool = False,
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
        thorough=thorough,
        say=say,
    )
    return run_race(request)
