"""Watches folders and says which versions are there; what is done about it the manager decides."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.schema.version import Serving
from paceline.serve.versions import NAME, read_serving, version_numbers


@dataclass(frozen=True, kw_only=True)
class VersionPlace:
    """Where a version lies."""

    path: Path
    stamp: str
    """Another one when files change: a version that could not be loaded is then tried again."""
    is_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model, its versions, and which of them are to be served."""

    name: str
    versions: dict[int, VersionPlace]
    serving: Serving = field(default_factory=Serving)
    problem: str = ""
    """Why serving.json could not be read: the rule before it stays."""


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory, not a folder of models."""
    return (path / "config.toml").is_file()


class ModelSource:
    """Folders of models, and runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_dir():
                raise ConfigError(f"{path} is not a folder: give a folder of models, or runs")
        self.folders = [path for path in paths if not is_run(path)]
        self.runs = [path for path in paths if is_run(path)]
        self.hidden: set[Path] = set()
        """Models and runs that are not served, as another one has their name."""

    def look(self) -> list[Found]:
        """All models that are there now; a name that is there twice is the first one's."""
        found: dict[str, Found] = {}
        self.hidden = set()
        for folder in self.folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                if NAME.fullmatch(path.name) and path.is_dir():
                    self._add(found, path, _model(path))
        for run in self.runs:
            self._add(found, run, _run(run))
        return list(found.values())

    def _add(self, found: dict[str, Found], path: Path, one: Found) -> None:
        if found.setdefault(one.name, one) is not one:
            self.hidden.add(path)


def _model(path: Path) -> Found:
    versions = {}
    for number in version_numbers(path):
        with contextlib.suppress(OSError):  # removed meanwhile
            folder = path / str(number)
            versions[number] = VersionPlace(path=folder, stamp=_stamp(folder))
    try:
        return Found(name=path.name, versions=versions, serving=read_serving(path))
    except PacelineError as error:
        return Found(name=path.name, versions=versions, problem=str(error))


def _stamp(folder: Path) -> str:
    with os.scandir(folder) as entries:
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    return "|".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def _run(path: Path) -> Found:
    """A run's best weights, or its latest; the number of updates is the version."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip(".-_")[:100] or "run"
    versions: dict[int, VersionPlace] = {}
    for link in ("best", "latest"):
        with contextlib.suppress(OSError, ValueError):
            target = (path / "checkpoints" / link).readlink().name
            number = max(1, int(target.removeprefix("step-")))
            versions[number] = VersionPlace(path=path, stamp=target, is_run=True)
            break
    return Found(name=name, versions=versions)
