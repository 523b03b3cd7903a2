"""A night on four lab hosts: one leaves and comes back again and again, another is slow at times.

What the training makes of it is compared with the sum of what was there: every host's own speed, as
long as it was there, and as fast as it was just then.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.lab.faults import HOSTS, Cell, Outcome, trained_alone
from paceline.errors import ConfigError, PacelineError
from paceline.lab import Lab
from paceline.schema.legs import read_legs

LEAVES, SLOWS = "c", "b"
"""The host that comes and goes, and the one that is throttled."""
CORES = 0.9
SLOW = 1 / 3
"""Of its cores are left to a host that is throttled."""
SECONDS = 0.025
"""That a host takes for a sample: long beside what a busy machine does to an exchange."""
BATCH = 32
SAMPLES = 1600
"""Of an epoch."""
_END_FACTOR = 3.0
"""So many times as long as it would take on what is there, and it has failed."""

What = Literal["leaves", "returns", "slows", "recovers"]


@dataclass(frozen=True)
class Event:
    """Something that happens to a host, so many seconds after all of them train."""

    at: float
    host: str
    what: What
    how: str = ""


@dataclass(kw_only=True)
class NightOutcome:
    """What came of a night."""

    outcome: Outcome
    events: list[Event] = field(default_factory=list)
    """What happened, in seconds after the training was asked for."""
    images: int = 0
    there: float = 0.0
    """Images that the hosts could have computed, each by itself, while they were there."""
    seconds: float = 0.0
    """From the first update to the end of the last."""
    departures: int = 0
    returns: int = 0
    """Of which legs.jsonl tells."""
    lost_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """The part of what was there that became updates."""
        return self.images / self.there if self.there else 0.0


def schedule(seconds: float, *, departures: int, throttles: int) -> list[Event]:
    """What happens in a night of so many seconds.

    Every departure has its own stretch of the night: gone after a fifth of it, for two fifths.
    Likewise with throttling, for three tenths of its stretch.

    >>> [event.at for event in schedule(100, departures=1, throttles=1)]
    [20.0, 45.0, 60.0, 75.0]
    """
    found = []
    for number in range(departures):
        stretch = seconds / departures
        begin = number * stretch + stretch / 5
        how = "rebooted" if number % 2 == 0 else "cut off"
        found.append(Event(begin, LEAVES, "leaves", how))
        found.append(Event(begin + 2 * stretch / 5, LEAVES, "returns"))
    for number in range(throttles):
        stretch = seconds / throttles
        begin = (number + 0.45) * stretch
        found.append(Event(begin, SLOWS, "slows"))
        found.append(Event(begin + 3 * stretch / 10, SLOWS, "recovers"))
    return sorted(found, key=lambda event: event.at)


def host_seconds(host: str, events: Sequence[Event], begin: float, end: float) -> float:
    """How long a host was there between two moments; a slow second counts as what it is worth.

    >>> host_seconds("b", [Event(10, "b", "slows"), Event(16, "b", "recovers")], 0, 20)
    16.0
    """
    worth = {"leaves": 0.0, "returns": 1.0, "slows": SLOW, "recovers": 1.0}
    total, now, since = 0.0, 1.0, begin
    for event in sorted(events, key=lambda event: event.at):
        if event.host == host:
            at = min(max(event.at, begin), end)
            total, now, since = total + now * (at - since), worth[event.what], at
    return total + now * (end - since)


class Night(Cell):
    """One training, and all that happens to its hosts."""

    cores = CORES

    def __init__(self, folder: Path, seconds: float, *, departures: int, throttles: int) -> None:
        super().__init__(folder, "allreduce", "night")
        self.plan = schedule(seconds, departures=departures, throttles=throttles)
        self.happened: list[Event] = []
        self.asked = time.monotonic()
        hosts = sum(host_seconds(host, self.plan, 0.0, seconds) for host in HOSTS)
        self.end_seconds = max(300.0, _END_FACTOR * seconds)
        self.settings = {
            **self.settings,
            "workload.batch_size": BATCH,
            "workload.model_options": f"{{ seconds = {SECONDS}, cores = {CORES} }}",
            "data.options": f"{{ shape = [1, 28, 28], samples = {SAMPLES}, test_samples = 20 }}",
            # As many as they can compute in that time: the night is over before the training.
            "train.epochs": max(1, round(hosts / SECONDS / SAMPLES)),
        }

    def act(self, lab: Lab) -> None:
        began = time.monotonic()
        for event in self.plan:
            time.sleep(max(0.0, began + event.at - time.monotonic()))
            if self.is_over:
                return
            with contextlib.suppress(PacelineError):  # the lab is being taken down
                _happen(lab, event)
                at = time.monotonic() - self.asked
                self.happened.append(Event(at, event.host, event.what, event.how))


def _happen(lab: Lab, event: Event) -> None:
    if event.what == "leaves":
        if event.how == "rebooted":  # its connections close before it is silent
            lab.signal(event.host, signal.SIGKILL)
            time.sleep(0.1)
        lab.cut(event.host)
    elif event.what == "returns":
        lab.restore(event.host)
    else:
        lab.slow(event.host, CORES * (SLOW if event.what == "slows" else 1.0))


def run_night(
    seconds: float,
    say: Callable[[str], None],
    *,
    departures: int = 6,
    throttles: int = 2,
    keep: Path | None = None,
) -> NightOutcome:
    """A night from its first update to its end; the run stays below `keep` where that is given."""
    if seconds < 60 or departures < 0 or throttles < 0:
        raise ConfigError(
            f"a night of {seconds:g} s with {departures} departures and {throttles} throttlings:"
            " it takes a minute at least, and numbers from 0"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-night-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        night = Night(folder, seconds, departures=departures, throttles=throttles)
        expected = trained_alone(folder, night.settings)
        say(f"{night.settings['train.epochs']} epochs on {', '.join(HOSTS)}")
        night.asked = time.monotonic()
        return _measured(night, night.run(expected))


def _measured(night: Night, outcome: Outcome) -> NightOutcome:
    found = NightOutcome(outcome=outcome, events=night.happened)
    legs = read_legs(night.run_path / "legs.jsonl")
    if not legs:
        return found
    begin, last = legs[0].began_at, legs[-1]
    end = last.began_at + last.setup_seconds + last.seconds
    hosts = sum(host_seconds(host, night.happened, begin, end) for host in HOSTS)
    found.images = BATCH * sum(leg.updates for leg in legs)
    found.there, found.seconds = hosts / SECONDS, end - begin
    found.departures = sum(len(leg.left) for leg in legs)
    found.returns = sum(len(leg.came) for leg in legs)
    found.lost_seconds = sum(leg.lost_seconds for leg in legs)
    return found


def as_json(found: NightOutcome) -> dict[str, Any]:
    """For programs."""
    import dataclasses

    return {**dataclasses.asdict(found), "goodput": found.goodput}
