"""How the learning rate moves; without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.schema.config import Optimizer


def schedule_factor(settings: Optimizer, *, update: int, updates: int) -> float:
    """The learning rate of update number `update` (from 0) out of `updates`, 1 at its peak.

    Warm-up rises in a straight line over the first `warmup` of all updates;
    then the schedule takes over and would reach its end one update after the last.
    """
    warm = round(settings.warmup * updates)
    if update < warm:
        return (update + 1) / warm
    progress = (update - warm) / max(1, updates - warm)
    if settings.schedule == "linear":
        return 1 - progress
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if settings.schedule == "step":
        falls = math.floor(update / max(1.0, settings.step_every * updates) + 1e-9)
        return float(settings.step_factor**falls)
    return 1.0


def length_at(update: int, updates: int, lengths: Mapping[str, int]) -> int:
    """Out of how many updates an update counts, in a training that was made longer.

    >>> [length_at(update, 40, {"10": 20}) for update in (9, 10)]
    [20, 40]
    """
    later = [until for until in map(int, lengths) if update < until]
    return lengths[str(min(later))] if later else updates


def first_other_rate(
    settings: Optimizer,
    done: int,
    before: tuple[int, Mapping[str, int]],
    now: tuple[int, Mapping[str, int]],
) -> int | None:
    """The first of `done` updates whose rate would be another with other lengths.

    >>> first_other_rate(Optimizer(schedule="cosine"), 10, (20, {}), (40, {}))
    1
    >>> first_other_rate(Optimizer(schedule="cosine"), 10, (20, {}), (40, {"10": 20})) is None
    True
    """
    if before == now or (settings.schedule == "constant" and not settings.warmup):
        return None
    for update in range(done):
        lengths = [length_at(update, *each) for each in (before, now)]
        rates = [schedule_factor(settings, update=update, updates=n) for n in lengths]
        if rates[0] != rates[1]:
            return update
    return None
