"""Sums of all ranks of what steps report, under names that only calling a step tells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from paceline.local.steps import Step, Sums
from paceline.schema.plain import parse_json
from paceline.training.team import Team

AT_ONCE = 30
"""Numbers that ranks of a node add up at once: the board has room for 32."""


def agreed_names(team: Team, step: Step, sums: Sums, more: Iterable[str] = ()) -> list[str]:
    """The names of what is reported besides loss and accuracy; all ranks call it.

    Where a step of the user's own tells none, those that the first rank has. `more`: those that
    every step may have.
    """
    names = list(step.names or ())
    if step.names is None and team.adds_up:
        names = list(parse_json(team.from_first(json.dumps(sorted(sums)), "the metrics' names")))
    return list(dict.fromkeys([*names, *more]))


def added_up(team: Team, names: Sequence[str], sums: Sums, what: str) -> Sums:
    """The sums under these names over all ranks; all ranks call it."""
    values = [value for name in names for value in sums.get(name, (0.0, 0.0))]
    found: list[float] = []
    for start in range(0, len(values), AT_ONCE):
        found += team.sum(values[start : start + AT_ONCE], what)
    return dict(zip(names, zip(found[::2], found[1::2], strict=True), strict=True))


def means_of(sums: Sums) -> dict[str, float | None]:
    """By name; None where nothing was counted.

    >>> means_of({"mae": (1.0, 4.0), "top5": (0.0, 0.0)})
    {'mae': 0.25, 'top5': None}
    """
    return {name: total / count if count else None for name, (total, count) in sums.items()}
