"""What an epoch of a loop of one's own was: samples, seconds, and what was logged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import ConfigError
from paceline.observe.metrics import Tally
from paceline.observe.recorder import Recorder
from paceline.pace.ranks import Ranks

Part = tuple[float, float]
"""Samples of this rank's part of a batch, and of the whole batch."""


class Working:
    """The batches that loaders have handed out and that the loop is working on."""

    def __init__(self, waited: Callable[[float, float], None]) -> None:
        self.waited = waited
        """Told when a batch was asked for, and how many seconds it took to come."""
        self.parts: dict[int, Part] = {}
        self.handed = 0
        """How many there were so far."""
        self.since = time.perf_counter()
        """When the newest was handed out."""

    def part(self) -> Part | None:
        """Of the batch that is being worked on; None where there is none."""
        found = set(self.parts.values())
        if len(found) > 1:
            raise ConfigError(
                "several loaders have handed out batches of different sizes: say by what the loss"
                " is a mean, as pace.backward(loss, weight=len(inputs))"
            )
        return next(iter(found), None)


class Meter:
    """Counts and times of this rank, in an epoch and over all updates."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.working = Working(self._waited)
        self.recorder = Recorder()
        """Into the run directory, where this rank has one."""
        self.updates = 0
        self.busy = 0.0
        """Seconds that this rank has computed since it was started."""
        self._counted = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._tally = Tally()
        self._logged: dict[str, tuple[float, float]] = {}
        self._busy = self._own_samples = self._waiting = 0.0
        self.last = self._epoch_began = self._update_began = time.perf_counter()

    def _waited(self, asked: float, seconds: float) -> None:
        self._waiting += seconds
        self.recorder.add("read", asked, seconds, update=self.updates)

    def computed(self, seconds: float) -> None:
        """Until now."""
        self._busy += seconds
        self.busy += seconds
        self.recorder.add("compute", time.perf_counter() - seconds, seconds, update=self.updates)

    def trained_on(self, part: Any) -> None:
        """Count a batch's samples once, however many losses are taken of it."""
        self._tally.read_seconds, self._waiting = self._tally.read_seconds + self._waiting, 0.0
        if part is None:
            with contextlib.suppress(ConfigError):
                part = self.working.part()
        if part is not None and self.working.handed != self._counted:
            self._counted = self.working.handed
            self._own_samples += part[0]
            self._tally.samples += int(part[1])

    def updated(self) -> None:
        now = time.perf_counter()
        self._tally.durations.append(now - self._update_began)
        self._tally.updates += 1
        self.updates += 1
        self._update_began = self.last = now

    def log(self, name: str, total: float, count: float) -> None:
        """One more sum, and what it is a sum of."""
        before = self._logged.get(name, (0.0, 0.0))
        self._logged[name] = (before[0] + total, before[1] + count)

    @property
    def speed(self) -> float:
        """Samples of this rank's own part in a second of computing."""
        return self._own_samples / self._busy if self._busy else 0.0

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl says of the epoch; every rank calls it."""
        self._tally.seconds = max(self.last - self._epoch_began, 1e-9)
        return {
            **self._means(),
            "images_per_second": self._tally.samples / self._tally.seconds,
            **self._tally.times(),
            # Between hosts torch's collectives send, and nobody counts.
            **({} if len(set(self._ranks.hosts)) > 1 else {"bytes_sent": 0}),
        }

    def _means(self) -> dict[str, float]:
        """What was logged, over all ranks; one that logged nothing under a name adds nothing."""
        names = sorted({name for each in self._ranks.gather(list(self._logged)) for name in each})
        pairs = [self._logged.get(name, (0.0, 0.0)) for name in names]
        sums = self._ranks.sum(number for pair in pairs for number in pair)
        return {
            name: total / count
            for name, total, count in zip(names, sums[::2], sums[1::2], strict=True)
            if count
        }
