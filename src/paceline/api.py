"""What `paceline.train(...)` and the command line begin with; `workflow` chains the stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import config_from, dump_config, load_config, with_versions
from paceline.config.environment import data_root
from paceline.errors import ConfigError, RunDirectoryError, UserError
from paceline.launch.engines import finds_hosts
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
from paceline.workflow.training import HostsRequest, Result, TrainingStart, run_training, summary_of

if TYPE_CHECKING:
    from paceline.schema.legs import Leg
    from paceline.training.given import Given

__all__ = [
    "HostsRequest", "Result", "TrainingStart", "Workload", "begin", "evaluate", "legs_beside",
    "plan_beside", "race", "resolve", "run_training", "summary_of", "train",
]  # fmt: skip


OPTIONAL = ("step", "collate_fn", "scheduler")
"""Parts of a workload that may be None."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train: names as in a configuration, or objects of your own."""

    model: str | Callable[..., Any] = "mnist_cnn"
    """A name, "module:callable", a function or class that makes a new `nn.Module`, or a module
    itself, which begins with the weights that it has and ends with the trained ones."""
    data: Any = "digits"
    """A name, a folder, "module:callable", a map-style dataset, a pair (train, test), a function
    that gives one of these two, or one or two DataLoaders."""
    loss: str | Callable[..., Any] = "cross_entropy"
    """A name of torch.nn.functional as "mse_loss", or (outputs, targets) -> mean over the samples,
    or a dict as a step returns."""
    step: str | Callable[..., Any] | None = None
    """Instead of a loss: (model, batch) -> loss, or a dict with "loss", "weight" (by what the loss
    is a mean: samples when left out) and what else is to be reported."""
    collate_fn: str | Callable[..., Any] | None = None
    """With a step: makes a batch of a list of samples, as a DataLoader's."""
    metrics: Mapping[str, str | Callable[..., Any]] = field(default_factory=dict)
    """What else is reported: name -> (outputs, targets) -> (sum, count), or a tensor of values."""
    unit: str = "images"
    """What rates count: samples, or as "tokens" what the step's weight counts."""
    optimizer: str | Callable[..., Any] = "adam"
    """A name, or parameters -> `torch.optim.Optimizer` (also given `lr` if it takes one)."""
    scheduler: str | Callable[..., Any] | None = None
    """optimizer -> one of `torch.optim.lr_scheduler`, which takes a step after every epoch, or with
    the setting `optimizer.scheduler_steps = "update"` after every update."""
    batch_size: int = 128
    """Samples per update over all workers."""


def train(
    workload: Workload | None = None,
    *,
    epochs: int = 5,
    monitor: str = "auto",
    settings: Mapping[str, Any] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    silent: bool = False,
    hosts: str | None = None,
    engine: str | None = None,
    address: str | None = None,
    nodes: int | None = None,
) -> Result:
    """Train, and find the fastest way meanwhile; `settings` are those of a configuration.

    `hosts`: other machines too, as `paceline train --hosts`: names with commas between, a
    hosts.toml, or "lab". What is trained must then have a name, as a function of a module has.

    `engine`: who starts the hosts, as `paceline train --engine`; with "ray" and "spark" the cluster
    at `address` (Ray's, or Spark's master) names the hosts itself: all of them, or `nodes`.

    `monitor`: what makes weights the best, as "loss:min" or "mae:min"; left to itself, test
    accuracy, or without classes test loss.

    >>> result = paceline.train(
    ...     paceline.Workload(model=MyNet, data=(train_set, test_set), batch_size=64),
    ...     epochs=3, settings={"optimizer.learning_rate": 0.01, "local.strategy": "threads"},
    ... )                                                                    # doctest: +SKIP
    """
    workload = Workload() if workload is None else workload
    _refuse_other_types(workload, settings, run)
    names, given = _names_and_objects(workload)
    config = config_from(
        {
            "name": "train",
            "train.epochs": epochs,
            "train.monitor": monitor,
            **names,
            **flat_settings(settings or {}),
        }
    )
    _refuse_two_names(config, names)
    where = Path(run) if run is not None else None
    say = (lambda text: None) if silent else print
    request = _hosts_request(hosts, config, given, engine, address, nodes)
    config, directory, plan = begin(
        config, run=where, resume=resume, given=given, elsewhere=request is not None, say=say
    )
    result = run_training(
        TrainingStart(
            config=config,
            run=directory,
            plan=plan,
            given=given,
            silent=silent,
            say=say,
            hosts=request,
        )
    )
    if given is not None:
        from torch import nn

        result = dataclasses.replace(result, factory=given.model, given=given)
        if isinstance(given.model, nn.Module):
            result.load_model(given.model)
    return result


def _refuse_other_types(workload: Any, settings: Any, run: Any) -> None:
    """What Python itself would only trip over later."""
    wrong, metrics = "", getattr(workload, "metrics", None)
    if not isinstance(workload, Workload):
        wrong = f"workload is a {type(workload).__name__}: give paceline.Workload(model=..., ...)"
    elif not isinstance(metrics, Mapping):
        wrong = f"metrics is a {type(metrics).__name__}: give a dict, name -> function"
    elif not isinstance(settings, Mapping | None):
        wrong = f"settings is a {type(settings).__name__}: give a dict, as {{'train.epochs': 3}}"
    elif not isinstance(run, str | Path | None):
        wrong = f"run is a {type(run).__name__}: give the path of a folder"
    if wrong:
        raise ConfigError(wrong)


def evaluate(
    trained: Result | str | Path, *, data: Any = None, weights: Literal["best", "latest"] = "best"
) -> dict[str, float]:
    """The loss, the accuracy where there are classes, and all metrics of a trained model.

    On the run's own test data, or on `data`: a map-style dataset, whose samples are as those of the
    training; with the loss, or the step, that it was trained with.

    >>> result = paceline.train(...)                                         # doctest: +SKIP
    >>> paceline.evaluate(result)                                            # doctest: +SKIP
    {'loss': 0.08, 'accuracy': 0.98, 'top5': 1.0}
    """
    from paceline.serve.trained import score

    if not isinstance(trained, Result | str | Path):
        raise ConfigError(
            f"evaluate was given a {type(trained).__name__}: give what paceline.train returned, or"
            " the path of a run"
        )
    run, given = (trained.run, trained.given) if isinstance(trained, Result) else (trained, None)
    return score(Path(run), given, data=data, weights=weights)


def _hosts_request(
    hosts: str | None,
    config: Config,
    given: Given | None,
    engine: str | None = None,
    address: str | None = None,
    nodes: int | None = None,
) -> HostsRequest | None:
    """The machines that are named; what they cannot get is refused before anything is begun."""
    if hosts is None and engine in (None, "auto", "local"):
        if address is not None or nodes is not None:
            raise ConfigError('address and nodes belong to engine="ray" or "spark": name one')
        return None
    from paceline.config.hosts import find_hosts
    from paceline.training.given import refuse_other_hosts

    refuse_other_hosts(config, given)
    if engine is not None and finds_hosts(engine):
        from paceline.workflow.clusters import cluster_request

        return cluster_request(engine, hosts=hosts, nodes=nodes, address=address)
    if hosts is None:
        raise ConfigError(f'engine="{engine}" needs hosts: names as "a,b", a hosts.toml, or "lab"')
    return HostsRequest(hosts=find_hosts(hosts), engine=engine or "auto")


def _names_and_objects(workload: Workload) -> tuple[dict[str, Any], Given | None]:
    """Settings for what is to be trained, and the objects that have no name to be found by."""
    from paceline.training.given import KEYS, Given, refuse_bound

    workload, order = _without_loaders(workload)
    names: dict[str, Any] = {
        **order,
        "workload.batch_size": workload.batch_size,
        "workload.unit": workload.unit,
    }
    objects: dict[str, Any] = {}
    for part, key in KEYS.items():
        value = getattr(workload, part)
        if value is None:
            if part not in OPTIONAL:
                raise ConfigError(
                    f"{part} = None: leave it out for its default, or give what is to be used (a"
                    " function that was called instead of named, perhaps, and returned nothing)"
                )
            continue
        if part == "metrics":
            names[key], handed = _named_metrics(value)
            objects |= {part: handed} if handed else {}
            continue
        name = value if isinstance(value, str) else reference_to(value)
        if name is None:
            name, objects[part] = object_name(value), value
        names[key] = name
    if workload.step is not None and workload.loss == "cross_entropy":
        del names[KEYS["loss"]]
    if not objects:
        return names, None
    given = Given(**objects)
    refuse_bound(given)
    return names, given


def _without_loaders(workload: Workload) -> tuple[Workload, dict[str, Any]]:
    """With what DataLoaders read instead of them, and the setting of the order."""
    from paceline.data.loaders import taken_apart

    loaded = taken_apart(workload.data)
    if loaded is None:
        return workload, {}
    usual = type(workload).batch_size
    if workload.batch_size not in (usual, loaded.batch_size):
        raise ConfigError(
            f"batch_size = {workload.batch_size}, but the DataLoader has {loaded.batch_size}: leave"
            " it out of one of them"
        )
    if loaded.collate_fn is not None and workload.step is None:
        raise ConfigError(
            "the DataLoader has a collate_fn of its own, whose batches only a step takes: give the"
            " workload a step"
        )
    changed = dataclasses.replace(
        workload,
        data=loaded.data,
        batch_size=loaded.batch_size,
        collate_fn=workload.collate_fn or loaded.collate_fn,
    )
    return changed, {"data.shuffle": loaded.shuffle, "data.processes": loaded.processes}


def _named_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """What a configuration says of each metric, and those that came as objects."""
    names, objects = {}, {}
    for name, value in metrics.items():
        found = value if isinstance(value, str) else reference_to(value)
        if found is None:
            found, objects[name] = object_name(value), value
        names[name] = found
    return names, objects


def _refuse_two_names(config: Config, names: Mapping[str, Any]) -> None:
    """A setting must not say something else than the object that is trained."""
    flat = flat_settings(encode(config))
    for key, name in names.items():
        if is_object(str(name)) and flat[key] != name:
            raise ConfigError(
                f"settings has {key} = {flat[key]!r}, but the workload gives {name}: leave one of"
                " them out"
            )


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
    from paceline.training.given import refuse_without_objects

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


def run_of(path: Path) -> Path | None:
    """The run directory that `path` is, or whose config.toml it is."""
    folder = path if path.is_dir() else path.parent
    is_run = (folder / "config.toml").exists() and path.name in ("config.toml", folder.name)
    return folder if is_run else None


def plan_beside(path: Path, config: Config) -> Plan | None:
    """The plan of the run whose config.toml `path` is, so that it is repeated, not planned anew.

    None where `config`, which came of it, asks for something that a plan decides.
    """
    folder = run_of(path)
    if folder is None or not (stored := folder / "plan.json").exists():
        return None
    before = resolve(load_config(folder))
    same = all(
        getattr(before, part) == getattr(config, part)
        for part in ("workload", "numerics", "local", "exchange")
    )
    return read_json(Plan, stored) if same and before.train.device == config.train.device else None


def legs_beside(path: Path) -> list[Leg]:
    """The legs of the run whose config.toml `path` is, so that they are repeated."""
    from paceline.schema.legs import read_legs

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
        step=_from_anywhere(work.step),
        collate_fn=_from_anywhere(work.collate_fn),
        metrics={name: _from_anywhere(value) for name, value in work.metrics.items()},
        weights=str(Path(work.weights).resolve()) if work.weights else None,
    )
    return with_versions(
        dataclasses.replace(
            config,
            workload=work,
            optimizer=dataclasses.replace(
                optimizer,
                name=_from_anywhere(optimizer.name),
                scheduler=_from_anywhere(optimizer.scheduler),
            ),
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


def race(
    config: Config,
    *,
    again: bool = False,
    seconds: float = 40.0,
    quiet: bool = False,
    thorough: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Race, bool]:
    """Race this machine's strategies for a configuration; True when it came from the cache."""
    from paceline.workflow.race import RaceRequest, race_safely

    return race_safely(
        RaceRequest(
            config=config,
            batch_size=config.workload.global_batch(1),
            again=again,
            seconds=seconds,
            quiet=quiet,
            thorough=thorough,
            say=say,
        )
    )
