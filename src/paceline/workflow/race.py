"""`race`: every way to train a workload on this machine, in legs on a copy of the weights.

Every way to divide the cores has a turn, then the layouts and precisions of those that are near
the fastest, then all that are near it once more, until the time is up or nothing is left to tell.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from paceline.config.cache import keep, place_of
from paceline.cost.memory import estimate_mb
from paceline.errors import DivergedError, StrategyError, WorkerError, first_line
from paceline.hardware.footprint import measure_footprint
from paceline.hardware.instructions import use_safe_instructions
from paceline.hardware.kept_races import fingerprint, kept_race
from paceline.hardware.machine import busy_cores
from paceline.local.cores import usable_cores
from paceline.local.memory import MEMORY_PART, available_mb
from paceline.plan.candidates import candidate, structures, variants
from paceline.plan.choose import decided
from paceline.plan.hopes import plan_of
from paceline.plan.pilot import MOST_PAIRS, OBVIOUS, typical
from paceline.schema import Candidate, Config, NodePlan, Race
from paceline.schema.machines import BUSY
from paceline.text import rate
from paceline.workflow.alone import can_divide
from paceline.workflow.rehearsal import Rehearsal, rehearsing

TURN_SECONDS = 1.0
"""About how long a turn is timed: far longer than a moment's hitch."""


@dataclass(frozen=True, kw_only=True)
class RaceRequest:
    """What to race, and how."""

    config: Config
    batch_size: int
    again: bool = False
    seconds: float = 40.0
    """When no candidate gets another turn."""
    say: Callable[[str], None] = print
    quiet: bool = False
    thorough: bool = False
    """Every candidate gets every turn; the result is not kept."""


def race_safely(request: RaceRequest) -> tuple[Race, bool]:
    """`run_race`, with the instructions that this machine can really run."""
    note = use_safe_instructions(request.config, all_numerics=True)
    if note and not request.quiet:
        request.say(note)
    return run_race(request)


def run_race(request: RaceRequest) -> tuple[Race, bool]:
    """The race's result, and whether it came from the cache."""
    if request.thorough:
        return _race(request), False
    name = fingerprint(request.config, request.batch_size)
    kept = None if request.again else kept_race(place_of("races", name))
    if kept is not None and (kept.busy <= BUSY or busy_cores() > BUSY):
        return kept, True
    if kept is not None:
        request.say("the race in the cache was run on a busy machine: racing again")
    race = _race(request)
    if trouble := keep(place_of("races", name), race):
        request.say(trouble)
    return race, False


def time_sizes(
    config: Config, entry: Candidate, sizes: Sequence[int], *, seconds: float
) -> dict[int, tuple[float, ...]]:
    """Seconds of the updates of one candidate at several batch sizes, timed in turns.

    What disturbs the machine for a while hits all alike; every size has at least one turn.
    """
    end = time.monotonic() + seconds
    found: dict[int, list[float]] = {size: [] for size in sizes}
    with rehearsing(config) as rehearsal:
        rehearsal.ranks = entry.node.ranks
        for number in range(MOST_PAIRS):
            for size, times in found.items():
                if number and time.monotonic() > end:
                    break
                node = dataclasses.replace(
                    entry.node, micro_batches=min(entry.node.micro_batches, size)
                )
                plan = plan_of(config, dataclasses.replace(entry, node=node), size, "")
                times += rehearsal.turn(plan, TURN_SECONDS / 2).times
    return {size: tuple(times) for size, times in found.items()}


@dataclass
class _Entrant:
    """A candidate, and what its turns have shown."""

    entry: Candidate
    turns: list[tuple[float, ...]] = field(default_factory=list)
    memory_mb: float | None = None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Of an update; None where it never came to a time, or fails now."""
        times = [each for turn in self.turns for each in turn]
        return statistics.median(times) if times and not self.reason else None

    def result(self, batch_size: int, sequential: float | None) -> Candidate:
        """What race.json says of it."""
        entry = dataclasses.replace(self.entry, memory_mb=self.memory_mb, reason=self.reason)
        if (seconds := self.seconds) is None:
            return entry
        speeds = sorted(batch_size / each for turn in self.turns for each in turn)
        low, _, high = (
            statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
        )
        return dataclasses.replace(
            entry,
            images_per_second=batch_size / seconds,
            low=low,
            high=high,
            error=self._error(),
            trials=len(speeds),
            speedup=sequential / seconds if sequential else None,
        )

    def _error(self) -> float | None:
        """Of the median, from within the turns or from what differs between them."""
        _, error = typical([0.0, *(each for turn in self.turns for each in turn)])
        middles = [math.log(statistics.median(turn)) for turn in self.turns if turn]
        if len(middles) < 2:
            return error
        return max(error or 0.0, statistics.stdev(middles) / math.sqrt(len(middles)))


class _Contest:
    def __init__(self, request: RaceRequest, rehearsal: Rehearsal) -> None:
        self._request, self._rehearsal = request, rehearsal
        self._entrants: dict[str, _Entrant] = {}

    def enter(self, entry: Candidate, reason: str = "") -> None:
        """A turn of a candidate, or none where `reason` says why not."""
        entrant = self._entrants.setdefault(entry.name, _Entrant(entry))
        entrant.reason = entrant.reason or reason
        if not entrant.reason:
            self._turn(entrant)

    def _turn(self, entrant: _Entrant) -> None:
        request, entry = self._request, entrant.entry
        plan = plan_of(request.config, entry, request.batch_size, "")
        try:
            turn = self._rehearsal.turn(plan, TURN_SECONDS)
        except DivergedError:
            raise  # the training's own doing, whatever the plan
        except WorkerError as error:
            entrant.reason = f"brought its processes down: {first_line(error)}"
        except Exception as error:
            entrant.reason = first_line(error)
        else:
            entrant.turns.append(turn.times)
            entrant.memory_mb = max(entrant.memory_mb or 0.0, turn.memory_mb)
        if not request.quiet:
            seconds = entrant.seconds
            told = f"{rate(request.batch_size / seconds)} images/s" if seconds else entrant.reason
            request.say(f"  {entry.name}: {told}")

    def near_the_fastest(self) -> list[Candidate]:
        """The candidates that the fastest is not obviously ahead of."""
        timed = {name: each.seconds for name, each in self._entrants.items() if each.seconds}
        best = min(timed.values(), default=0.0)
        return [
            self._entrants[name].entry
            for name, seconds in timed.items()
            if self._request.thorough or math.log(seconds / best) <= OBVIOUS
        ]

    def results(self) -> list[Candidate]:
        first = self._entrants.get("sequential")
        reference = first.seconds if first else None
        return [
            each.result(self._request.batch_size, reference) for each in self._entrants.values()
        ]


def _race(request: RaceRequest) -> Race:
    start, config = time.monotonic(), request.config
    busy, cores = busy_cores(), usable_cores()
    many = config.train.device != "cuda"
    with rehearsing(config) as rehearsal:
        parts = rehearsal.parts
        nodes = structures(cores, request.batch_size, elementwise=parts.elementwise, many=many)
        rehearsal.ranks = max(node.ranks for node in nodes)
        footprint = measure_footprint(parts, config, request.batch_size)
        numerics = variants(config.numerics, images=len(parts.dataset.sample_shape) == 3)
        whole = not can_divide(config, parts.build_model())
        limit, estimates = MEMORY_PART * available_mb(), dict[str, float]()
        contest = _Contest(request, rehearsal)

        def enter(node: NodePlan, precision: Any, layout: Any) -> None:
            entry = candidate(node, precision, layout)
            needed = estimate_mb(
                footprint, node, batch_size=request.batch_size, precision=precision
            )
            estimates[entry.name] = needed
            reason = ""
            if whole and node.divides:
                reason = (
                    "a layer looks across the samples of a batch in its own way: it must stay whole"
                )
            elif needed > limit:
                reason = f"needs about {needed:,.0f} MB, of {limit:,.0f} free"
            contest.enter(entry, reason)

        for node in nodes:
            enter(node, *numerics[0])
        near = nodes if request.thorough else [entry.node for entry in contest.near_the_fastest()]
        for node in near:
            for precision, layout in numerics[1:]:
                enter(node, precision, layout)
        for _ in range(MOST_PAIRS - 1):
            for entry in contest.near_the_fastest():
                if request.thorough or time.monotonic() - start < request.seconds:
                    contest.enter(entry)
    results = [
        dataclasses.replace(entry, estimated_mb=estimates[entry.name])
        for entry in contest.results()
    ]
    race = Race(
        fingerprint=fingerprint(config, request.batch_size),
        workload=f"{config.workload.model} on {config.workload.data}",
        batch_size=request.batch_size,
        cores=cores,
        seconds=time.monotonic() - start,
        busy=busy,
        warnings=_warnings(busy, results),
        candidates=tuple(results),
        gradient_mb=footprint.parameter_mb,
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    return _chosen(race, config)


def _chosen(race: Race, config: Config) -> Race:
    # A precision that was asked for by name is allowed by that.
    found = decided(race, allowed=(*config.numerics.allow, config.numerics.precision))
    if found is None:
        # What one thread alone cannot train fails everywhere for the same reason.
        alone = [c.reason for c in race.candidates if c.name == "sequential" and c.reason]
        reasons = "; ".join(alone or [f"{c.name}: {c.reason}" for c in race.candidates])
        raise StrategyError(f"no local strategy could train this workload ({reasons})")
    return found


def _warnings(busy: float, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    warnings = []
    if busy > BUSY:
        warnings.append(
            f"other programs used {busy:.0%} of the cores before the race: its times are doubtful;"
            " run it again with --again when the machine is quiet"
        )
    timed = [c for c in candidates if c.images_per_second and c.low and c.high and c.trials > 3]
    wide = [c for c in timed if (c.high or 0) > 1.4 * (c.low or 1)]
    if timed and len(wide) > len(timed) / 2:
        warnings.append("times of the same candidate differ by more than 40%: the machine is noisy")
    return tuple(warnings)
