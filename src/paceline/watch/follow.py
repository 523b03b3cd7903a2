"""Follows one run by its files, from whatever process and machine sees them.

Each look reads only what was added since the one before; the training does nothing for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.report.load import RunData, is_run
from paceline.run import RunDirectory
from paceline.schema import Plan, read_json
from paceline.schema.checkpoint import checkpoints_in, update_of
from paceline.schema.events import (
    FILE_NAME,
    Clock,
    End,
    Event,
    Exchanged,
    Note,
    Progress,
    Sample,
    Span,
    Start,
    decode_line,
)
from paceline.schema.ledger import Ledger
from paceline.schema.legs import Leg, read_legs
from paceline.schema.plain import parse_json, read_json_file, read_toml
from paceline.schema.requests import taken_by
from paceline.watch.booking import RankBook, book

MOST_POINTS = 600
"""Of a series; older ones are thinned."""
SILENT_SECONDS = 8.0
"""A rank that has written nothing for so long, while others have, gives no sign."""
LAST_SECONDS = 2.5
"""The same once the training is over: ranks that are there write every second."""
MOST_NOTES = 30


MOST_BYTES = 8 << 20
"""Read in one look; a long past is caught up with in several."""


class Tail:
    """The whole lines that a file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._file = 0, -1
        self.is_behind = False
        """The last look left something for the next one."""

    def lines(self) -> list[str]:
        """New lines; all of them once more where the file was replaced or cut."""
        self.is_behind = False
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file or about.st_size < self._at:
                    self._at, self._file = 0, about.st_ino
                if about.st_size == self._at:
                    return []
                file.seek(self._at)
                data = file.read(MOST_BYTES)
                self.is_behind = len(data) == MOST_BYTES
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == MOST_BYTES:  # damaged: no line is that long
            whole = len(data)
        self._at += whole
        return data[:whole].decode("utf-8", "replace").splitlines()


class TimeSeries:
    """Points over time, thinned by halves when there are too many."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._every, self._count = 1, 0

    def add(self, at: float, value: float) -> None:
        self._count += 1
        if self._count % self._every or not math.isfinite(value):
            return
        self.points.append((at, value))
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self._every *= 2


@dataclass
class RankSeen:
    """What one rank has told."""

    tail: Tail
    start: Start | None = None
    sample: Sample | None = None
    end: End | None = None
    heard: float = 0.0
    """The time of its newest event."""
    cpu: TimeSeries = field(default_factory=TimeSeries)
    sent: float = 0.0
    received: float = 0.0
    """MB per second between the last two samples, loopback left out."""
    book: RankBook | None = None
    update: int = 0
    """How far its newest progress is; behind it, the run goes on from an older checkpoint."""


class Follower:
    """One run, as far as its files tell."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path.resolve())
        self.ranks: dict[int, RankSeen] = {}
        self.metrics: list[dict[str, Any]] = []
        self.legs: list[Leg] = []
        self.leg: Note | None = None
        """The leg that is under way."""
        self._first_leg: Note | None = None
        """Of a training that was neither continued nor started again: there two clocks meet."""
        self.notes: deque[tuple[float, int, Note]] = deque(maxlen=MOST_NOTES)
        self.progress: deque[Progress] = deque(maxlen=40)
        self.loss, self.speed = TimeSeries(), TimeSeries()
        self.ledger = Ledger(ranks=())
        self.config: dict[str, Any] = {}
        self.plan: Plan | None = None
        self.summary: dict[str, Any] = {}
        self.looked = 0.0
        self.former: dict[str, tuple[float, float]] = {}
        """Hosts whose rank another host has now: from when to when they trained."""
        self._broken_since: float | None = None
        """When what was started again, because it was broken off, had begun."""
        self._final: tuple[object, RunData] | None = None
        self._metrics = Tail(self.run.metrics)
        self._seen: dict[Path, tuple[int, int]] = {}

    @property
    def exists(self) -> bool:
        return is_run(self.run.path)

    def look(self) -> None:
        """Read what is new."""
        self.looked = time.time()
        self._changed(self.run.config, self._read_config)
        self._changed(self.run.plan, self._read_plan)
        self._changed(self.run.legs, self._read_legs)
        self._changed(self.run.summary, self._read_summary)
        self._read_metrics()
        for folder in self.run.path.glob("rank-*"):
            if match := re.fullmatch(r"rank-(\d{1,6})", folder.name):
                rank = int(match[1])
                if rank not in self.ranks:
                    self.ranks[rank] = RankSeen(tail=Tail(folder / FILE_NAME))
        advances: list[tuple[Progress, RankSeen]] = []
        for rank, seen in sorted(self.ranks.items()):
            for line in seen.tail.lines():
                event = decode_line(line)
                if isinstance(event, Progress):
                    advances.append((event, seen))
                if event is not None:
                    self._take(rank, seen, event)
        # From leg to leg another rank may tell how far the training is.
        for progress, seen in sorted(advances, key=lambda pair: pair[0].time):
            self._advance(progress, seen)
        books = {rank: seen.book for rank, seen in self.current.items() if seen.book is not None}
        self.ledger = book(books, alive={r for r in books if self.state_of(r) == "there"})

    def catch_up(self) -> None:
        """Read all that is there: a long past takes several looks."""
        self.look()
        while any(seen.tail.is_behind for seen in self.ranks.values()):
            self.look()

    def remembered(self, make: Callable[[Path], RunData]) -> RunData:
        """What is made of a run that is over: once, and again only after it went on."""
        mark = (self.newest, self._seen.get(self.run.summary))
        if self._final is None or self._final[0] != mark:
            self._final = (mark, make(self.run.path))
        return self._final[1]

    def _changed(self, path: Path, read: Callable[[], None]) -> None:
        try:
            about = path.stat()
        except OSError:
            return
        mark = (about.st_mtime_ns, about.st_size)
        if self._seen.get(path) != mark:
            self._seen[path] = mark
            # A file that is being replaced, or damaged, is looked at again when it changes.
            with contextlib.suppress(PacelineError, OSError, ValueError):
                read()

    def _read_config(self) -> None:
        self.config = read_toml(self.run.config)

    def _read_plan(self) -> None:
        self.plan = read_json(Plan, self.run.plan)

    def _read_legs(self) -> None:
        self.legs = read_legs(self.run.legs)

    def _read_summary(self) -> None:
        found = read_json_file(self.run.summary)
        self.summary = found if isinstance(found, dict) else {}

    def _read_metrics(self) -> None:
        for text in self._metrics.lines():
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and isinstance(line.get("epoch"), int):
                    # A continued run writes its newest epochs once more.
                    self.metrics = [old for old in self.metrics if old["epoch"] < line["epoch"]]
                    self.metrics.append(line)

    def _take(self, rank: int, seen: RankSeen, event: Event) -> None:
        if isinstance(event, Start):
            self._note_restart(rank, seen, event)
            if seen.start is not None:
                self._first_leg = None
            seen.start, seen.end, seen.sample = event, None, None
            booked = seen.book.booked if seen.book is not None else None
            seen.book = RankBook(start=event, booked=booked)
        if seen.start is None or seen.book is None:
            return
        seen.heard = max(seen.heard, event.end if isinstance(event, Span) else event.time)
        if isinstance(event, Span):
            seen.book.spans.append(event)
            if event.update is not None:
                seen.book.last = max(seen.book.last, event.update)
        elif isinstance(event, Exchanged):
            seen.book.exchanged.append(event)
        elif isinstance(event, Clock):
            seen.book.clocks.append(event)
        elif isinstance(event, Sample):
            self._sample(seen, event)
        elif isinstance(event, Note):
            if event.what == "leg":
                if self.leg is None:
                    self._first_leg = event
                self.leg = event
            else:
                self.notes.append((event.time, rank, event))
        elif isinstance(event, End):
            seen.end = event

    def _note_restart(self, rank: int, seen: RankSeen, event: Start) -> None:
        """A rank that did not end begins anew: after a loss all of them are started again."""
        before = seen.start
        if before is None or seen.end is not None:
            if not rank:
                self._broken_since = None
            return
        if before.host != event.host:
            self.former[before.host] = (before.began, seen.heard)
        if not rank:
            if self._broken_since is None:
                self._broken_since = before.began
            text = "broken off; all nodes were started again"
            self.notes.append((event.time, rank, Note(time=event.time, what="restart", text=text)))

    def _sample(self, seen: RankSeen, sample: Sample) -> None:
        before, seen.sample = seen.sample, sample
        seen.cpu.add(sample.time, sample.cpu)
        seconds = sample.time - before.time if before is not None else 0.0
        if before is None or seconds <= 0:
            return
        for name in ("sent", "received"):
            old, new = (_bytes(each, name) for each in (before, sample))
            setattr(seen, name, max(0, new - old) / seconds / 1e6)

    def _advance(self, event: Progress, seen: RankSeen) -> None:
        goes_back, seen.update = event.update < seen.update, event.update
        if goes_back:
            self.progress.clear()  # continued from an older checkpoint
        elif self.progress and (
            event.update <= self.progress[-1].update or event.time <= self.progress[-1].time
        ):
            return  # another rank has told so before
        before = self.progress[-1] if self.progress else None
        self.progress.append(event)
        if event.loss is not None:
            self.loss.add(event.time, event.loss)
        if before is not None and event.time > before.time:
            updates = event.update - before.update
            self.speed.add(event.time, updates * self.batch / (event.time - before.time))

    # --- what it comes to ---------------------------------------------------------

    @property
    def batch(self) -> int:
        if self.plan is not None and self.plan.batch_size:
            return self.plan.batch_size
        return int(self.config.get("workload", {}).get("batch_size") or 1)

    @property
    def current(self) -> dict[int, RankSeen]:
        """The ranks of the newest start: there may be fewer of them than before."""
        starts = [seen.start for seen in self.ranks.values() if seen.start is not None]
        newest = max(starts, key=lambda start: start.time, default=None)
        size = newest.world_size if newest is not None else 0
        return {
            rank: seen
            for rank, seen in sorted(self.ranks.items())
            if seen.start is None or rank < size or seen.start is newest
        }

    @property
    def left(self) -> dict[str, tuple[float, float]]:
        """Hosts that trained before all was started again without them: from when to when."""
        current = self.current
        hosts = {seen.start.host for seen in current.values() if seen.start is not None}
        found = dict(self.former)
        for rank, seen in self.ranks.items():
            if rank not in current and seen.start is not None:
                found[seen.start.host] = (seen.start.began, seen.heard)
        return {host: times for host, times in found.items() if host not in hosts}

    @property
    def began(self) -> float:
        """When the training was asked for, as legs.jsonl counts; else when its ranks began."""
        if self._first_leg is not None and self.legs and self.legs[0].first == 0:
            return self._first_leg.time - self.legs[0].began_at
        starts = [seen.start.began for seen in self.current.values() if seen.start is not None]
        if self._broken_since is not None:
            starts.append(self._broken_since)
        return min(starts, default=self.looked)

    @property
    def newest(self) -> float:
        """The time of the newest thing that any rank has told."""
        return max((seen.heard for seen in self.ranks.values()), default=0.0)

    def state_of(self, rank: int) -> str:
        """there, ended (with the training), or gone: without a word while others went on."""
        seen = self.ranks[rank]
        if seen.end is not None:
            return "ended"
        is_over = self.is_over
        # The others of a training that fails are ended within seconds of the first.
        if self.newest - seen.heard > (LAST_SECONDS if is_over else SILENT_SECONDS):
            return "gone"
        return "ended" if is_over else "there"

    @property
    def state(self) -> str:
        """starting, training, finished, stopped (saved), or lost: gone without saving a summary."""
        started = max((s.start.time for s in self.ranks.values() if s.start), default=0.0)
        if self.summary and self._seen.get(self.run.summary, (0, 0))[0] / 1e9 >= started:
            return "finished" if self.summary.get("finished") else "stopped"
        if self.looked - self.newest < 2 * SILENT_SECONDS or is_locked(self.run.path / ".lock"):
            return "training" if self.progress else "starting"
        return "lost" if self.ranks else "starting"

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "stopped", "lost")

    @property
    def checkpoint(self) -> int | None:
        """The update of the newest checkpoint."""
        found = checkpoints_in(self.run.checkpoints)
        return update_of(found[-1]) if found else None

    @property
    def takes(self) -> tuple[str, ...]:
        return taken_by(self.run)


def _bytes(sample: Sample, way: str) -> int:
    return sum(getattr(t, f"bytes_{way}") for name, t in sample.network.items() if name != "lo")


def is_locked(path: Path) -> bool:
    """Whether a training of this machine holds a run's lock; asking does not touch the lock."""
    try:
        inode = f":{path.stat().st_ino} "
        return any(
            " FLOCK " in line and inode in line
            for line in Path("/proc/locks").read_text().splitlines()
        )
    except OSError:
        return False
