"""What an experiment is: its steps, as data of `experiment.toml`.

    name = "wang"
    title = "MNIST over MPI"
    study = "Wang and Yang: ..."
    [settings]                      # of every step; keys as `--set` takes them
    "workload.model" = "mnist_cnn"
    [quick]                         # further settings with --quick
    "train.epochs" = 1
    [otherwise.cifar10]             # further settings of steps whose data set is not at hand
    "workload.data" = "synthetic"
    [published]                     # the study's own numbers, any shape
    [[step]]
    name = "{recipe}-{nodes}x{processes}"
    each = [ { nodes = 1, processes = 2, hosts = [1.0] },
             { nodes = 2, processes = 1, hosts = [0.5, 0.5] } ]
    facts = { recipe = "study" }
    hosts = "{hosts}"
    settings = { "exchange.kind" = "reduce_broadcast", "local.processes" = "{processes}" }

`each` makes one step of every table of a list, or of every combination of a table of lists; its
values are facts of the step, and "{key}" anywhere in the step stands for them (a text that is
nothing else keeps the value's type).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.config.environment import data_root
from paceline.data import DataRequest, is_here
from paceline.errors import ConfigError, shown, unknown_name
from paceline.schema.codec import decode, encode, rule
from paceline.schema.plain import read_toml

BUILT_IN = Path(__file__).parent
FILE = "experiment.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, kw_only=True)
class StudyStep:
    """One thing to run: by a public command, in a folder of its own."""

    name: str
    """Names its folder under OUT/steps; unique."""
    kind: Literal["train", "peer", "command"] = "train"
    """`paceline train`, a program of benchmarks/peers, or any command that prints JSON."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What findings.py groups by."""
    hosts: tuple[float | dict[str, Any], ...] = ()
    """Lab hosts: cores of each, or a table of the lab's own keys; none: this machine, no lab."""
    visible: int | None = rule(default=None, minimum=1)
    """Cores that each lab host sees; its quota stays as `hosts` says."""
    slots: int = rule(default=1, minimum=1)
    """Nodes on each lab host: 1 is a host with all its cores, more share them as MPI ranks do."""
    rate: str | None = None
    """Rate of the lab's link, such as "1gbit"."""
    delay: str | None = None
    """Delay of the lab's link, such as "1ms"."""
    faults: tuple[dict[str, Any], ...] = ()
    """What goes wrong, as the lab's [[fault]] has it; hosts are called a, b, c and so on."""
    engine: str = ""
    """For `paceline train --engine`; "" is auto."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Configuration keys of this step."""
    quick_settings: dict[str, Any] = field(default_factory=dict)
    """Further ones with --quick."""
    quick: bool = True
    """False: --quick leaves the step out."""
    full: bool = True
    """False: only --quick has the step."""
    peer: str = ""
    """For kind = "peer": which file of benchmarks/peers."""
    processes: int | None = rule(default=None, minimum=1)
    """For kind = "peer": processes on each host; one per visible core when left out."""
    threads: int = rule(default=0, minimum=0)
    """For kind = "peer": threads of each process; 0: as its launcher leaves them."""
    variant: str = ""
    """For kind = "peer": which of the peer's ways, where it has several."""
    command: tuple[str, ...] = ()
    """For kind = "command"; "{config}", "{step}" and "{out}" stand for paths."""
    fails: bool = False
    """True: it is expected to end with an error, and what it said is the result."""
    limit: float = rule(default=1800.0, minimum=0.0)
    """Seconds after which it is ended; 0: never."""
    seconds: float = rule(default=0.0, minimum=0.0)
    """What it took on a machine of 2 cores, for the estimate; 0: not known."""
    quick_seconds: float = rule(default=0.0, minimum=0.0)
    """The same with --quick."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"step name {shown(self.name)} must be letters, digits, dots and dashes:"
                " it names a folder"
            )
        needed = {"peer": self.peer, "command": self.command}.get(self.kind, True)
        if not needed:
            raise ConfigError(
                f"step {shown(self.name)} of kind {shown(self.kind)} needs {self.kind} = ..."
            )
        if self.faults and not self.hosts:
            raise ConfigError(f"step {shown(self.name)} has faults but no hosts for them to befall")

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes what is run; keys left out do not count."""
        aside = ("facts", "quick", "full", "quick_settings", "limit", "seconds", "quick_seconds")
        plain, content = encode(StudyStep(name="plain")), encode(self)
        content = {
            key: value
            for key, value in content.items()
            if key not in aside and (key == "name" or value != plain[key])
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def cores(self) -> float:
        """Quotas of its lab hosts together; 0 without a lab."""
        return sum(
            float(host.get("cores", 1.0)) if isinstance(host, dict) else host for host in self.hosts
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A study to be run here."""

    name: str
    title: str
    study: str
    """Citation, in a line."""
    steps: tuple[StudyStep, ...]
    """With the settings of the whole experiment, and those of --quick, in each."""
    folder: Path
    quick: bool = False
    published: dict[str, Any] = field(default_factory=dict)
    """The study's own numbers."""

    def step(self, name: str) -> StudyStep:
        """The step of that name."""
        for step in self.steps:
            if step.name == name:
                return step
        raise ConfigError(unknown_name("step", name, [step.name for step in self.steps]))


@dataclass(frozen=True, kw_only=True)
class _File:
    """The keys of experiment.toml."""

    name: str
    title: str
    study: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    quick: dict[str, Any] = field(default_factory=dict)
    otherwise: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    step: tuple[dict[str, Any], ...] = ()


def built_in() -> dict[str, Path]:
    """Name and folder of every experiment that comes with Paceline."""
    return {path.parent.name: path.parent for path in sorted(BUILT_IN.glob(f"*/{FILE}"))}


def find_experiment(name: str) -> Path:
    """The folder of a built-in experiment, or of one's own."""
    folders = built_in()
    if name in folders:
        return folders[name]
    path = Path(name)
    if (path / FILE).is_file():
        return path.resolve()
    if path.is_dir():
        raise ConfigError(f"{name} is no experiment: it has no {FILE}")
    raise ConfigError(
        unknown_name("experiment", name, folders) + "; or give a folder that has an experiment.toml"
    )


def load_experiment(folder: Path, *, quick: bool = False) -> Experiment:
    """Read an experiment; every step gets the common settings and, with `quick`, those for it."""
    path = folder / FILE
    try:
        data = read_toml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        file = decode(_File, data)
        steps = [
            _whole(decode(StudyStep, table, f"step {number}"), file, quick)
            for number, written in enumerate(file.step, start=1)
            for table in _expanded(written)
        ]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    steps = [step for step in steps if (step.quick if quick else step.full)]
    names = [step.name for step in steps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{path}: {names.count(name)} steps are called {shown(name)}: rename one"
            )
    return Experiment(
        name=file.name,
        title=file.title,
        study=file.study,
        steps=tuple(steps),
        folder=folder,
        quick=quick,
        published=file.published,
    )


def _whole(step: StudyStep, file: _File, quick: bool) -> StudyStep:
    """A step with every setting that holds for it; the most particular one wins."""
    settings = _over(flat(file.settings), flat(step.settings))
    if quick:
        settings = _over(_over(settings, flat(file.quick)), flat(step.quick_settings))
    data = str(settings.get("workload.data", ""))
    if data in file.otherwise and not at_hand(data, settings):
        settings = _over(settings, flat(file.otherwise[data]))
    return dataclasses.replace(
        step,
        settings=settings,
        quick_settings={},
        seconds=step.quick_seconds if quick else step.seconds,
    )


def at_hand(data: str, settings: Mapping[str, Any]) -> bool:
    """Whether the files of a data set are where the steps will look for them."""
    root = settings.get("data.root") or data_root()
    return is_here(DataRequest(name=data, root=str(root) if root else None))


def _over(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes; a batch of one kind replaces that of the other."""
    rivals = {"workload.batch_size": "workload.batch_per_worker"}
    rivals |= {value: key for key, value in rivals.items()}
    dropped = {rivals.get(key) for key in changes}
    return {key: value for key, value in settings.items() if key not in dropped} | changes


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted keys, however they are nested.

    >>> flat({"train": {"epochs": 2}, "workload.model": "mnist_cnn"})
    {'train.epochs': 2, 'workload.model': 'mnist_cnn'}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        # Options of a model or a data set are one value of the configuration.
        whole = not isinstance(value, Mapping) or key.rpartition(".")[2].endswith("options")
        found |= {prefix + key: value} if whole else flat(value, f"{prefix}{key}.")
    return found


def _expanded(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tables that `each` makes of one; the table itself where there is none."""
    each = written.get("each", [{}])
    if isinstance(each, Mapping):
        lists = [value if isinstance(value, list) else [value] for value in each.values()]
        each = [dict(zip(each, values, strict=True)) for values in itertools.product(*lists)]
    if not isinstance(each, list) or not all(isinstance(one, Mapping) for one in each):
        raise ConfigError(f"each = {shown(each)} must be a list of tables, or a table of lists")
    tables = []
    for values in each:
        table = {key: value for key, value in written.items() if key != "each"}
        facts = {**values, **table.get("facts", {})}
        tables.append(_filled({**table, "facts": facts}, facts))
    return tables


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """`value` with every "{key}" replaced; keys that are not known are left for later."""
    if isinstance(value, Mapping):
        return {key: _filled(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    if whole and whole[1] in values:
        return values[whole[1]]
    return _PLACE.sub(lambda match: str(values.get(match[1], match[0])), value)
