"""The chain of stages: config -> measure -> plan -> launch -> train.

Only this module and the command line chain them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import config_from, dump_config, load_config, with_versions
from paceline.config.environment import data_root
from paceline.errors import RunDirectoryError, UserError
from paceline.references import reference_to
from paceline.run import RunDirectory, create_run, open_run
from paceline.schema import Config, Plan, Race, encode, read_json

if TYPE_CHECKING:
    from paceline.schema.hosts import Hosts
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
class Workload:
    """What to train: names as in a configuration, or objects of your own."""

    model: str | Callable[..., Any] = "mnist_cnn"
    """A name, "module:callable", or a function or class that makes a new `nn.Module`."""
    data: Any = "digits"
    """A name, a folder, "module:callable", a map-style dataset, or a pair (train, test) of them."""
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
    workload = workload or Workload()
    names, given = _names_and_objects(workload)
    asked = {"name": "train", "train.epochs": epochs, **names, **(settings or {})}
    config = config_from(asked)
    if given is not None:
        from paceline.train.parts import with_dataset

        given = with_dataset(given, workload.data, config)
    where = Path(run) if run is not None else None
    config, directory, plan = begin(config, run=where, resume=resume)
    try:
        say = (lambda text: None) if silent else print
        start = Start(config=config, run=directory, plan=plan, given=given, silent=silent, say=say)
        return run_training(start)
    finally:
        directory.unlock()


def _names_and_objects(workload: Workload) -> tuple[dict[str, Any], Given | None]:
    """Settings for what has a name, and the objects that have none."""
    from paceline.train.parts import Given

    keys = {
        "workload.model": workload.model,
        "workload.loss": workload.loss,
        "optimizer.name": workload.optimizer,
        "workload.data": workload.data,
    }
    names: dict[str, Any] = {"workload.batch_size": workload.batch_size}
    objects: dict[str, Any] = {}
    for key, value in keys.items():
        name = value if isinstance(value, str) else reference_to(value)
        if name is not None:
            names[key] = name
        else:
            objects[key] = value
    if not objects:
        return names, None
    return names, Given(
        model=objects.get("workload.model"),
        loss=objects.get("workload.loss"),
        optimizer=objects.get("optimizer.name"),
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
) -> tuple[Config, RunDirectory, Plan | None]:
    """Make or open the run directory; the plan comes from it, from `plan`, or is still open.

    `changes` are settings (as "key=value") of a run to be continued, where `config` is None.
    """
    if resume:
        directory = open_run(run or Path("runs/latest"))
        config = _continued(directory, config, changes)
    else:
        config = config or load_config()
        directory = create_run(config.name, run)
    directory.lock()
    config = resolve(config)
    found = plan or (directory.plan if directory.plan.exists() else None)
    try:
        stored_plan = read_json(Plan, found) if found else None
    except UserError:
        directory.discard()
        raise
    if not (resume and directory.config.exists() and load_config(directory.config) == config):
        partial = directory.config.with_name(".config.toml.partial")
        partial.write_text(dump_config(config))
        partial.replace(directory.config)
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


MAY_CHANGE = (
    "name", "versions", "observe", "data.root", "data.cache",
    "train.epochs", "train.steps", "train.until", "train.deadline",
    "train.evaluate_every", "train.checkpoint_every", "train.keep",
)  # fmt: skip
"""What may be different when a run is continued: how long, not what."""


def _continued(directory: RunDirectory, config: Config | None, changes: Sequence[str]) -> Config:
    """The configuration of a run to be continued, with what may change of what is asked."""
    if not directory.config.exists():
        if config is None:
            raise RunDirectoryError(f"{directory.path} has no config.toml to continue from")
        return config
    stored = load_config(directory.config)
    wanted = config or load_config(directory.config, changes)
    before, now = _flat(encode(resolve(stored))), _flat(encode(resolve(wanted)))
    other = [
        key
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ]
    if other:
        raise RunDirectoryError(
            f"{directory.path} was begun with another configuration ({', '.join(other[:4])}"
            f"{', ...' if len(other) > 4 else ''}): leave CONFIG and --set out to continue it, or"
            " start a new run without --resume; only how long it trains may change"
        )
    return dataclasses.replace(wanted, name=stored.name)


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def run_training(start: Start) -> Result:
    """Plan if needed, launch, train, and return what came of it."""
    try:
        return _run_training(start)
    except UserError:
        start.run.discard()
        raise
    finally:
        start.run.unlock()


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
    from paceline.commands.alone import train_alone

    return train_alone(start)


def summary_of(run: RunDirectory) -> dict[str, Any]:
    """What run.json holds; empty before the end of a training."""
    found: dict[str, Any] = json.loads(run.summary.read_text()) if run.summary.exists() else {}
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
