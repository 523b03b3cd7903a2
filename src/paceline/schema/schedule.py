"""How the learning rate moves; without torch."""

from __future__ import annotations

import math

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


def first_other_rate(settings: Optimizer, done: int, before: int, now: int) -> int | None:
    """The first of `done` updates whose rate would be another, had there been `now` in all.

    >>> first_other_rate(Optimizer(schedule="cosine"), done=10, before=20, now=40)
    1
    >>> first_other_rate(Optimizer(), done=10, before=20, now=40) is None
    True
    """
    if before == now or (settings.schedule == "constant" and not settings.warmup):
        return None
    for update in range(done):
        rates = [schedule_factor(settings, update=update, updates=n) for n in (before, now)]
        if rates[0] != rates[1]:
            return update
    return None
