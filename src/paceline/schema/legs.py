"""Legs: consecutive updates of one training under one plan; a line of legs.jsonl each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError, RunDirectoryError
from paceline.schema.codec import decode, rule
from paceline.schema.plain import parse_json, read_text
from paceline.schema.plan import Plan

FORMAT = 1
Role = Literal["first", "trial", "check", "keep"]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg: what was planned, why it began and ended, and what was measured."""

    format: int = FORMAT
    name: str
    """The plan in a few words."""
    plan: Plan = field(default_factory=Plan)
    first: int = rule(default=0, minimum=0)
    """Updates that were done before it."""
    updates: int = rule(default=0, minimum=0)
    """Updates that it made."""
    role: Role = "keep"
    """"trial" tries another plan, "check" goes back to the best one to compare, "keep" goes on."""
    best: str = ""
    """The plan that was the best one known when this leg began."""
    began: str = ""
    """Why it began."""
    ended: str = ""
    """Why it ended before its time, if it did."""
    left: tuple[str, ...] = ()
    """Hosts that were lost in it."""
    came: tuple[str, ...] = ()
    """Hosts that came before it began, whether it uses them or not."""
    lost_seconds: float = rule(default=0.0, minimum=0.0)
    """From its last update, after which a host was lost, to the first update of the next leg."""
    began_at: float = 0.0
    """Seconds after the training's start."""
    setup_seconds: float = rule(default=0.0, minimum=0.0)
    """Taking over, building, and the first update, which warms up."""
    seconds: float = rule(default=0.0, minimum=0.0)
    """All of its updates."""
    update_seconds: float | None = None
    """Median over its updates, the first one left out."""
    error: float | None = None
    """Standard error of that median, as a part of it."""
    predicted_seconds: float | None = None
    """What an update was expected to take."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What trainings of a workload on this machine have taught, kept in the cache."""

    format: int = FORMAT
    best: str = ""
    """The plan that the newest of them ended with."""
    factors: dict[str, float] = field(default_factory=dict)
    """What each trait of a plan multiplied the seconds of an update by."""
    plan: Plan | None = None
    """What `best` was over several hosts: shares and layers are found again only by measuring."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A loss after which all nodes were started again."""

    why: str
    left: tuple[str, ...] = ()
    """Hosts that are not there any more."""
    at: float = 0.0
    """When it was noticed, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class LegsOrder:
    """What the node that leads a training over several is told before it begins."""

    format: int = FORMAT
    goes_on: Plan | None = None
    """The plan that a training to be continued was left with."""
    start: Plan | None = None
    """What the cost model would begin with, where the hosts have been measured."""
    writers: tuple[int, ...] = (0,)
    """Nodes that see the first one's run directory, and so can write to it."""
    script: tuple[Leg, ...] = ()
    """The legs of a training that is repeated."""
    verbose: bool = False
    """Tell of every leg."""
    again: bool = False
    """Forget what past trainings have taught."""
    elapsed: float = 0.0
    """Seconds since the training was asked for."""
    joins: bool = False
    """The others train already: this node comes to them."""
    broken: Broken | None = None
    """Why the nodes were started again, if they were."""


def leg_text(role: str, name: str, reason: str) -> str:
    """What is said of a leg that begins.

    >>> leg_text("trial", "processes 2x1", "may be 1.4 times as fast")
    'trial with processes 2x1: may be 1.4 times as fast'
    """
    return f"{role} with {name}" + (f": {reason}" if reason else "")


def merged(legs: Sequence[Leg]) -> list[Leg]:
    """Consecutive legs of the same plan as one: the pilot was asked in between, and went on."""
    found: list[Leg] = []
    for leg in legs:
        last = found[-1] if found else None
        same = last is not None and (last.name, last.plan) == (leg.name, leg.plan)
        if last is None or not same or last.ended or leg.ended or leg.came:
            found.append(leg)
            continue
        longer = leg if leg.updates > last.updates else last
        found[-1] = dataclasses.replace(
            last,
            updates=last.updates + leg.updates,
            seconds=last.seconds + leg.seconds,
            setup_seconds=last.setup_seconds + leg.setup_seconds,
            update_seconds=longer.update_seconds,
            error=longer.error,
        )
    return found


def cut_at(legs: Sequence[Leg], update: int) -> list[Leg]:
    """The legs up to an update: what a training that goes on from there has behind it."""
    found = [leg for leg in legs if leg.first < update]
    if found and found[-1].first + found[-1].updates > update:
        found[-1] = dataclasses.replace(found[-1], updates=update - found[-1].first)
    return found


def read_legs(path: Path) -> list[Leg]:
    """The legs of a run; none where it has no legs.jsonl."""
    if not path.exists():
        return []
    found: list[Leg] = []
    try:
        for line in read_text(path).splitlines():
            found.append(decode(Leg, parse_json(line)))
    except (OSError, ValueError, ConfigError) as error:
        raise RunDirectoryError(
            f"{path} is damaged in line {len(found) + 1}: {error}; remove it to train without"
            " repeating its legs"
        ) from None
    return found
