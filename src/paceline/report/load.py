"""Reads a run directory for people to look at: what is missing or damaged is said, not fatal."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import PacelineError, RunDirectoryError, shown
from paceline.report.track import Track
from paceline.run import open_run
from paceline.schema import Plan, Race, read_json
from paceline.schema.events import RankSession, newest_sessions
from paceline.schema.ledger import Ledger
from paceline.schema.legs import Leg, read_legs
from paceline.schema.plain import parse_json, read_json_file, read_text, read_toml
from paceline.schema.strategies import describe


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything a report needs to know of a run."""

    path: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    race: Race | None = None
    races: Mapping[str, Race] = field(default_factory=dict)
    """Where several hosts raced: each one's own, by host."""
    legs: tuple[Leg, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[RankSession, ...] = ()
    ledger: Ledger | None = None
    """Made of the events by the observing stage; None where there are none."""
    track: Track | None = None
    """How far it has come by the clock; None where its ranks wrote nothing."""
    problems: tuple[str, ...] = ()
    """One sentence for each file that could not be read."""
    when: str = ""
    """When it began, as far as its files know."""

    @property
    def under_way(self) -> bool:
        """It trains: what is not there yet may come."""
        return self.track is not None and self.track.under_way

    def asked(self, key: str) -> Any:
        """A setting by its dotted key; None where it was left out."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def model(self) -> str:
        return str(self.asked("workload.model") or "")

    @property
    def data(self) -> str:
        return str(self.asked("workload.data") or "")

    @property
    def batch(self) -> int | None:
        if self.plan is not None:
            return self.plan.batch_size
        asked = self.asked("workload.batch_size")
        return asked if isinstance(asked, int) else None

    @property
    def hosts(self) -> int:
        return len(self.plan.nodes) if self.plan is not None else 1

    @property
    def cores(self) -> int:
        """Threads that compute, over all hosts, as planned."""
        if self.plan is None:
            return 1
        return sum(node.ranks * node.threads * _copies(node) for node in self.plan.nodes)

    @property
    def strategy(self) -> str:
        """The local strategies in use, each named once."""
        if self.plan is None:
            return ""
        return ", ".join(dict.fromkeys(describe(node) for node in self.plan.nodes))

    @property
    def exchange(self) -> str:
        """How its nodes agree; nothing for one node."""
        if self.plan is None or self.hosts < 2:
            return ""
        split = self.plan.partition not in ("none", "")
        return f"{self.plan.exchange}, partition" if split else self.plan.exchange

    @property
    def speed(self) -> float | None:
        """Median images per second over the epochs."""
        return self.number("images_per_second")

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation; None where there are no classes."""
        return self.number("test_accuracy")

    @property
    def loss(self) -> float | None:
        return self.number("test_loss")

    def number(self, key: str) -> float | None:
        """A finite number of run.json, or the last one of metrics.jsonl."""
        for line in (self.summary, *reversed(self.metrics)):
            if (value := finite(line.get(key))) is not None:
                return value
        return None

    def column(self, key: str) -> tuple[float | None, ...]:
        """One value per epoch."""
        if key not in self._columns:
            self._columns[key] = tuple(finite(line.get(key)) for line in self.metrics)
        return self._columns[key]

    @functools.cached_property
    def _columns(self) -> dict[str, tuple[float | None, ...]]:
        """Those that were asked for: curves and tables ask several times for each."""
        return {}


def _copies(node: Any) -> int:
    """Threads of `replicas` are counted per replica."""
    return 1 if node.shares_memory else int(node.replicas)


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None.

    >>> finite(1), finite(float("nan")), finite("x"), finite(True)
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def is_run(path: Path) -> bool:
    """True for a folder that a training made."""
    return any((path / name).is_file() for name in ("config.toml", "plan.json", "metrics.jsonl"))


def load_run(path: Path, *, events: bool = True) -> RunData:
    """Read a run directory; `events` False leaves the largest files alone."""
    run = open_run(path)
    if not is_run(path):
        raise RunDirectoryError(
            f"{path} is not a run: it has neither config.toml, plan.json nor metrics.jsonl"
        )
    problems: list[str] = []
    return RunData(
        path=run.path,
        name=run.path.name,
        config=_tried(read_toml, run.config, problems, {}),
        plan=_tried(partial(read_json, Plan), run.plan, problems, None),
        race=_tried(partial(read_json, Race), run.race, problems, None),
        races=_read_races(run.path, problems),
        legs=tuple(_tried(read_legs, run.legs, problems, [])),
        metrics=tuple(_tried(_read_lines, run.metrics, problems, [])),
        summary=_tried(_read_object, run.summary, problems, {}),
        sessions=tuple(newest_sessions(run.path)) if events else (),
        problems=tuple(problems),
        when=_when(run.config),
    )


Found = TypeVar("Found")


def _tried(
    read: Callable[[Path], Found], path: Path, problems: list[str], otherwise: Found
) -> Found:
    """What a file holds; `otherwise` where it is missing, or cannot be read, which is noted."""
    if path.exists():
        try:
            return read(path)
        except (PacelineError, OSError, ValueError) as error:
            problems.append(f"{path.name} could not be read: {error}")
    return otherwise


def _read_races(path: Path, problems: list[str]) -> dict[str, Race]:
    """race-HOST.json, in the order of the hosts' names."""
    found = {}
    for file in sorted(path.glob("race-*.json")):
        race = _tried(partial(read_json, Race), file, problems, None)
        if race is not None and race.candidates:
            found[file.stem.removeprefix("race-")] = race
    return found


def _read_object(path: Path) -> dict[str, Any]:
    found = read_json_file(path)
    if not isinstance(found, dict):
        raise ValueError(f"it is {shown(found)}, not a table of keys")
    return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; the half line of a killed run is left out."""
    lines = []
    for each in read_text(path).splitlines():
        try:
            line = parse_json(each)
        except ValueError:
            continue
        if isinstance(line, dict) and finite(line.get("epoch")) is not None:
            lines.append(line)
    return lines


def _when(config: Path) -> str:
    """config.toml is written once, when a run begins."""
    if not config.exists():
        return ""
    return datetime.fromtimestamp(config.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
