"""How a training goes on when its workers die."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.load import RunData
from paceline.schema.events import Span
from studies.outcome import StepOutcome, read_object
from studies.shi.measures import update_spans

WINDOW = 3.0
"""Seconds over which a speed is taken for the figure."""
SETTLING = 2.0
"""Seconds after a loss that belong to neither speed, before or after."""
NEAR = 4.0
"""Seconds around a loss in which a pause may begin."""
_LOST = re.compile(r"worker (\d+) on (\S+) was lost at update (\d+); going on with (\d+) worker")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that died."""

    host: str
    update: int
    """The server's count of updates."""
    left: int
    """Workers that went on."""
    seconds: float | None
    """After the first worker's first update began, by the last that is known of the dead."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """A training during which workers died."""

    kind: str
    what: str
    failed: str
    finished: bool
    updates: int
    seconds: float | None
    losses: tuple[Loss, ...] = ()
    speeds: tuple[tuple[float, float], ...] = ()
    """(seconds after the first update began, images per second) in windows of `WINDOW`."""
    phases: tuple[tuple[int, float | None], ...] = ()
    """(workers, images per second) before the first loss, between losses, after the last."""
    pauses: tuple[float | None, ...] = ()
    """Longest time without a finished update around each loss."""
    train_losses: tuple[float | None, ...] = ()
    said: str = ""
    losses_before: tuple[float | None, ...] = ()
    """Training loss of the last whole epoch before each loss of a worker."""


def follow(outcome: StepOutcome) -> Course:
    """How a training with dying workers went."""
    facts = outcome.step.facts
    run = outcome.run
    record = read_object(outcome.path / "step.json")
    base: dict[str, Any] = {
        "kind": str(facts["kind"]),
        "what": str(facts["what"]),
        "failed": outcome.failed,
        "said": str(record.get("said", "")),
    }
    if run is None or not run.sessions or not (spans := update_spans(run.sessions[0])):
        return Course(**base, finished=False, updates=0, seconds=None)
    lost = _losses(outcome, spans)
    each_worker = int(outcome.step.settings.get("workload.batch_per_worker", 0))
    alive = _Alive(int(facts["workers"]), lost)
    return Course(
        **base,
        finished=run.finished,
        updates=len(spans),
        seconds=spans[-1].end - spans[0].start,
        losses=lost,
        speeds=tuple(_windows(spans, alive, each_worker)),
        phases=tuple(_phases(spans, lost, alive, each_worker)),
        pauses=tuple(_pause(spans, loss) for loss in lost),
        train_losses=run.column("train_loss"),
        losses_before=tuple(_loss_before(run, spans, loss) for loss in lost),
    )


def _losses(outcome: StepOutcome, spans: Sequence[Span]) -> tuple[Loss, ...]:
    """From what the first server told the first worker."""
    lines = read_object(outcome.path / "run" / "staleness.json").get("workers", [])
    sessions = outcome.run.sessions if outcome.run is not None else ()
    ended = {each.start.host: each.ended - spans[0].start for each in sessions}
    found = [match for line in lines if (match := _LOST.search(str(line)))]
    return tuple(
        Loss(host=match[2], update=int(match[3]), left=int(match[4]), seconds=ended.get(match[2]))
        for match in found
    )


def _loss_before(run: RunData, spans: Sequence[Span], loss: Loss) -> float | None:
    if loss.seconds is None or not run.metrics:
        return None
    done = sum(span.end - spans[0].start < loss.seconds for span in spans)
    known = run.column("train_loss")[: done // max(1, len(spans) // len(run.metrics))]
    return known[-1] if known else None


@dataclass(frozen=True)
class _Alive:
    """How many workers an update of the first worker stands for: all have the same quota."""

    workers: int
    losses: tuple[Loss, ...] = ()

    def at(self, seconds: float) -> int:
        gone = [loss for loss in self.losses if loss.seconds is not None and loss.seconds < seconds]
        return gone[-1].left if gone else self.workers


def _windows(spans: Sequence[Span], alive: _Alive, each_worker: int) -> list[tuple[float, float]]:
    begin, end = spans[0].start, spans[-1].end
    found = []
    for number in range(int((end - begin) / WINDOW)):
        low = begin + number * WINDOW
        done = [span.end - begin for span in spans if low < span.end <= low + WINDOW]
        images = sum(alive.at(seconds) for seconds in done) * each_worker
        found.append((number * WINDOW + WINDOW / 2, images / WINDOW))
    return found


def _phases(
    spans: Sequence[Span], losses: Sequence[Loss], alive: _Alive, each_worker: int
) -> list[tuple[int, float | None]]:
    """Speed while nobody died: the first seconds after a loss are left out."""
    begin = spans[0].start
    cuts = [loss.seconds for loss in losses if loss.seconds is not None]
    edges = [spans[0].seconds, *cuts, spans[-1].end - begin]
    found: list[tuple[int, float | None]] = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        low += SETTLING if number else 0.0
        ends = [span.end - begin for span in spans if low <= span.end - begin < high]
        workers = alive.at((low + high) / 2)
        speed = None
        if len(ends) > 2:
            speed = (len(ends) - 1) * workers * each_worker / (ends[-1] - ends[0])
        found.append((workers, speed))
    return found


def _pause(spans: Sequence[Span], loss: Loss) -> float | None:
    """The longest time without a finished update that began when a worker was lost."""
    if loss.seconds is None:
        return None
    ends = [span.end - spans[0].start for span in spans]
    near = [b - a for a, b in itertools.pairwise(ends) if abs(a - loss.seconds) <= NEAR]
    return max(near, default=None)
