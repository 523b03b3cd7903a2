"""From a race to a plan, with reasons in plain words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.plan.hopes import plan_of
from paceline.plan.pilot import CLEAR, OBVIOUS
from paceline.schema import Candidate, Config, Plan, Race, Rejected
from paceline.schema.strategies import cause, describe, strategy_of
from paceline.text import rate

SAME = 0.02
"""A difference of this part is none, however well it is measured."""


def decided(race: Race, *, allowed: Sequence[str]) -> Race | None:
    """The race with its choice and a reason for each candidate; None where nothing ran."""
    chosen = pick(race.candidates, allowed)
    if chosen is None:
        return None
    explained = tuple(_explained(entry, chosen, race, allowed) for entry in race.candidates)
    return dataclasses.replace(race, candidates=explained, decision=_decision(race, chosen))


def pick(candidates: Sequence[Candidate], allowed: Sequence[str]) -> Candidate | None:
    """The fastest that gives the weights of one process, or rounds as is allowed.

    Differences inside the noise are ties, and of ties the one that comes first is the simplest.
    """
    able = [
        entry
        for entry in candidates
        if entry.images_per_second and not entry.out and (entry.exact or entry.precision in allowed)
    ]
    best = max(able, key=lambda entry: entry.images_per_second or 0.0, default=None)
    return next((entry for entry in able if best and _is_level(entry, best)), None)


def _is_level(entry: Candidate, best: Candidate) -> bool:
    noise = CLEAR * math.hypot(entry.error or 0.0, best.error or 0.0)
    return _part_behind(entry, best) <= max(SAME, min(noise, OBVIOUS))


def _part_behind(entry: Candidate, other: Candidate) -> float:
    """By which part of the other's speed an entry is slower; negative where it is faster."""
    return 1 - (entry.images_per_second or 0.0) / (other.images_per_second or 1.0)


def _explained(
    entry: Candidate, chosen: Candidate, race: Race, allowed: Sequence[str]
) -> Candidate:
    if entry.name == chosen.name:
        faster = any(
            other.exact == chosen.exact and not other.out and _part_behind(chosen, other) > 0
            for other in race.candidates
        )
        reason = "as fast as the fastest, and simpler" if faster else "the fastest"
        return dataclasses.replace(entry, chosen=True, reason=reason)
    if entry.images_per_second is None or entry.out:
        return dataclasses.replace(entry, chosen=False)
    why = _why_not(entry, chosen, race.gradient_mb, allowed)
    return dataclasses.replace(entry, chosen=False, reason=why)


def _why_not(
    entry: Candidate, chosen: Candidate, gradient_mb: float, allowed: Sequence[str]
) -> str:
    behind = _part_behind(entry, chosen)
    if not entry.exact and entry.precision not in allowed:
        faster = f"{1 - behind:.2f}x the choice, but " if behind < 0 else ""
        return f'{faster}changes results: allow it with numerics.allow = ["{entry.precision}"]'
    why = _cause(entry, chosen, gradient_mb)
    if behind < SAME or _is_level(entry, chosen):
        return f"as fast as the choice{'; ' + why if why else ''}"
    return f"{behind:.0%} slower{': ' + why if why else ''}"


def _cause(entry: Candidate, chosen: Candidate, gradient_mb: float) -> str:
    """Why a structure costs what it costs, as far as its arithmetic tells."""
    node = entry.node
    if dataclasses.replace(node, cores=()) == dataclasses.replace(chosen.node, cores=()):
        return f"the {entry.memory_format} layout"
    if strategy_of(node).is_plain and node.strategy == chosen.node.strategy:
        return "fewer cores"
    return cause(node, gradient_mb)


def _decision(race: Race, chosen: Candidate) -> str:
    """One line on what was chosen and why."""
    rivals = [
        entry
        for entry in race.candidates
        if entry.images_per_second
        and not entry.out
        and (entry.exact or entry.precision == chosen.precision)
        and entry.node.strategy not in (chosen.node.strategy, "sequential")
    ]
    text = f"{chosen.name}: {rate(chosen.images_per_second or 0)} images/s"
    if chosen.speedup:
        text += f", {chosen.speedup:.2f}x sequential"
    if not rivals:
        return text
    rival = max(rivals, key=lambda entry: entry.images_per_second or 0.0)
    name, speed = describe(rival.node), rate(rival.images_per_second or 0)
    if _is_level(rival, chosen):
        return f"{text}; as fast as {name} ({speed}), and simpler"
    cause = _cause(rival, chosen, race.gradient_mb)
    return f"{text}; next {name} at {speed}{', because ' + cause if cause else ''}"


def plan_from_race(config: Config, race: Race) -> Plan:
    """The plan that the race's choice means."""
    chosen = next(c for c in race.candidates if c.chosen)
    rejected = tuple(
        Rejected(option=c.name, images_per_second=c.images_per_second, reason=c.reason)
        for c in race.candidates
        if not c.chosen
    )
    speed = chosen.images_per_second or 0.0
    return dataclasses.replace(
        plan_of(config, chosen, race.batch_size, race.decision),
        predicted={
            "images_per_second": speed,
            "update_seconds": race.batch_size / speed if speed else 0.0,
            "memory_mb": chosen.memory_mb or chosen.estimated_mb or 0.0,
        },
        rejected=rejected,
    )
