"""The rules of a race, with times made up: a known best, noise, failures, a clock that jumps."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from paceline.errors import StrategyError
from paceline.measure.alternate import COLD, LEAST, LOOK, MOST
from paceline.measure.contest import (
    FAR_BEHIND,
    FINALISTS,
    LONGEST,
    ROUNDS,
    UPDATES,
    WARMUP,
    Contest,
    pick,
)
from paceline.measure.trial import LONG_STEP, LONG_TURN
from paceline.plan.candidates import candidate, structures
from paceline.plan.choose import decision, explain, plan_from_race
from paceline.schema import Candidate, Config, NodePlan, Race

BATCH = 100
PLAIN = [("fp32", "contiguous")]
EVERY = [
    ("fp32", "contiguous"),
    ("fp32", "channels_last"),
    ("bf16", "contiguous"),
    ("bf16", "channels_last"),
]


class FakeTrial:
    """Steps that take what `seconds` says, with noise that only ever adds time."""

    def __init__(
        self, seconds: Callable[[Candidate], float], *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.seconds, self.noise = seconds, noise
        self.random = random.Random(seed)
        self.now = 0.0
        self.calls: list[str] = []
        self.broken: dict[str, int] = {}
        """Name of a candidate -> how many of its trials go well before one fails."""

    def __call__(
        self, entry: Candidate, *, warmup: int, steps: int, give_up: float | None
    ) -> tuple[list[float], float | None]:
        self.calls.append(entry.name)
        if self.calls.count(entry.name) > self.broken.get(entry.name, 10**9):
            raise StrategyError(f"{entry.name} cannot be built here")
        times: list[float] = []
        for _ in range(steps):
            seconds = self.seconds(entry) * (1 + self.noise * self.random.expovariate(1.0))
            self.now += seconds
            times.append(seconds)
            if sum(times) > LONG_TURN:
                break
            needed = 2 if times[0] > LONG_STEP else 3
            if give_up is not None and len(times) >= needed and min(times) > give_up:
                break
        self.now += warmup * self.seconds(entry)
        return times, 300.0

    def clock(self) -> float:
        return self.now


class FakeAlternation:
    """Updates of candidates that are built, as long as those of a trial."""

    def __init__(self, trial: FakeTrial) -> None:
        self.trial = trial
        self.calls: list[str] = []
        self.built: set[str] = set()
        self.most = self.closed = 0
        self.broken: set[str] = set()

    def build(self, entry: Candidate) -> None:
        if entry.name in self.broken:
            raise StrategyError(f"{entry.name} cannot be built again")
        assert not self.calls[self.closed :], "all are built before the first update"
        self.built.add(entry.name)
        self.most = max(self.most, len(self.built))

    def update(self, entry: Candidate) -> float:
        assert entry.name in self.built
        self.calls.append(entry.name)
        cold = self.calls[self.closed :].count(entry.name) <= COLD
        seconds = self.trial.seconds(entry) * (2.0 if cold else 1.0)
        self.trial.now += seconds
        return seconds

    def close(self) -> None:
        self.built.clear()
        self.closed = len(self.calls)


def race(
    trial: FakeTrial,
    nodes: list[NodePlan],
    numerics: list[tuple[str, str]] = PLAIN,
    *,
    seconds: float = 1000.0,
    alternation: FakeAlternation | None = None,
    room_mb: float = math.inf,
) -> list[Candidate]:
    contest = Contest(
        trial,
        batch_size=BATCH,
        seconds=seconds,
        clock=trial.clock,
        alternation=alternation,
        room_mb=room_mb,
    )
    return contest.run(nodes, numerics)


NODES = structures(4, BATCH, elementwise=True)


@pytest.mark.parametrize("seed", range(10))
def test_finds_the_planted_best_under_noise(seed: int) -> None:
    best = candidate(random.Random(seed).choice(NODES[1:]), *EVERY[seed % 2]).name

    def seconds(entry: Candidate) -> float:
        return 0.10 if entry.name == best else 0.13

    trial = FakeTrial(seconds, noise=0.1, seed=seed)
    chosen = pick(race(trial, NODES, EVERY), allowed=())
    assert chosen is not None
    assert chosen.name == best


def test_order_speedup_and_quartiles() -> None:
    times = {"sequential": 0.4, "threads 4": 0.1}
    trial = FakeTrial(lambda entry: times.get(entry.name, 0.2), noise=0.05)
    results = race(trial, NODES)
    assert [c.name for c in results] == [candidate(node).name for node in NODES]
    for entry in results:
        assert entry.images_per_second is not None
        assert entry.low is not None
        assert entry.high is not None
        assert entry.low <= entry.images_per_second <= entry.high
        assert entry.memory_mb == 300.0
    by_name = {c.name: c for c in results}
    assert by_name["sequential"].speedup == 1.0
    assert by_name["threads 4"].speedup == pytest.approx(4.0, rel=0.15)
    assert (by_name["threads 4"].images_per_second or 0) == pytest.approx(1000, rel=0.15)


def test_far_behind_stops_early_but_the_baseline_is_measured() -> None:
    nodes = [NodePlan(strategy="threads", threads=4), NodePlan(), NodePlan(strategy="replicas")]
    times = {"threads 4": 0.1, "sequential": 1.0, "replicas 1x1": 0.1 * FAR_BEHIND * 1.01}
    trial = FakeTrial(lambda entry: times[entry.name])
    by_name = {c.name: c for c in race(trial, nodes)}
    assert by_name["sequential"].trials == 6, "as long as a turn of the fastest takes"
    assert by_name["replicas 1x1"].trials == 3
    assert by_name["replicas 1x1"].reason == "stopped early: far behind"
    assert by_name["replicas 1x1"].images_per_second is not None


def test_only_the_front_gets_other_numerics() -> None:
    times = {"threads 4": 0.1, "replicas 4x1": 0.12}
    trial = FakeTrial(lambda entry: times.get(entry.name.split(",")[0], 1.0))
    race(trial, NODES, EVERY)
    tried = {name for name in trial.calls if "," in name}
    assert tried == {
        f"{structure}, {variant}"
        for structure in times
        for variant in ("channels_last", "bf16", "channels_last, bf16")
    }


def test_finals_run_the_front_runners_in_turn() -> None:
    times = {"threads 4": 0.1, "replicas 4x1": 0.101}
    trial = FakeTrial(lambda entry: times.get(entry.name, 0.2), noise=0.2)
    race(trial, NODES)
    finals = trial.calls[len(NODES) :]
    assert len(finals) >= 4
    for number in range(0, len(finals), 2):
        assert set(finals[number : number + 2]) == set(times), "noise hits both alike"


def test_the_time_is_kept() -> None:
    trial = FakeTrial(lambda entry: 0.4)
    race(trial, NODES, EVERY, seconds=1.0)
    # Everyone has had a first chance, and the finals had the second that was asked for: a turn.
    assert {candidate(node).name for node in NODES} <= set(trial.calls)
    assert len(trial.calls) == len(set(trial.calls)) + 1


def test_of_near_equals_in_other_numerics_the_simpler_one_is_chosen() -> None:
    """Processes are tried with channels_last before threads, being faster without it."""
    times = {
        "threads 4": 0.102,
        "processes 4x1": 0.1,
        "threads 4, channels_last": 0.0902,
        "processes 4x1, channels_last": 0.09,
    }
    trial = FakeTrial(lambda entry: times.get(entry.name, 0.2))
    results = race(trial, NODES, EVERY[:2])
    tried = [name for name in trial.calls if name.endswith("channels_last")]
    assert tried[0] == "processes 4x1, channels_last"
    chosen = pick(results, ())
    assert chosen is not None
    assert chosen.name == "threads 4, channels_last"


def test_finals_have_time_of_their_own() -> None:
    """One turn each takes longer than the race may: the order must not be left to it."""
    trial = FakeTrial(lambda entry: 0.1 if entry.name == "replicas 4x1" else 0.105, noise=0.1)
    race(trial, NODES, seconds=10.0)
    assert trial.calls.count("replicas 4x1") >= 3


def test_who_was_disturbed_in_its_first_turn_has_another() -> None:
    """A quarter behind by one turn, on a machine whose speed wanders, and yet the best."""

    def seconds(entry: Candidate) -> float:
        if entry.name != "threads 4":
            return 0.1
        return 0.125 if trial.calls.count("threads 4") == 1 else 0.08

    trial = FakeTrial(seconds)
    chosen = pick(race(trial, NODES[:6]), ())
    assert chosen is not None
    assert chosen.name == "threads 4"


def test_speed_is_what_finals_gave_on_average() -> None:
    """One is fast most of the time and slow for the rest, another is steady, and better by that."""

    def seconds(entry: Candidate) -> float:
        if entry.name == "threads 4":
            return 0.14 if trial.calls.count("threads 4") % 3 == 0 else 0.1
        return 0.105 if entry.name == "replicas 4x1" else 0.2

    trial = FakeTrial(seconds, noise=0.05)
    results = race(trial, NODES[:6])
    chosen = pick(results, ())
    assert chosen is not None
    assert chosen.name == "replicas 4x1"
    assert trial.calls.count("threads 4") >= 4


def test_a_candidate_that_cannot_run_is_kept_with_its_reason() -> None:
    trial = FakeTrial(lambda entry: 0.1 if entry.name == "threads 4" else 0.2)
    trial.broken["threads 4"] = 0
    results = race(trial, NODES, EVERY)
    failed = next(c for c in results if c.name == "threads 4")
    assert failed.images_per_second is None
    assert failed.reason == "threads 4 cannot be built here"
    assert trial.calls.count("threads 4") == 1
    chosen = pick(results, ())
    assert chosen is not None
    assert chosen.name != "threads 4"


def test_a_candidate_that_fails_in_the_finals_is_not_chosen() -> None:
    trial = FakeTrial(lambda entry: 0.1 if entry.name == "threads 4" else 0.105)
    trial.broken["threads 4"] = 1
    results = race(trial, NODES)
    failed = next(c for c in results if c.name == "threads 4")
    assert failed.images_per_second is None
    assert "cannot be built" in failed.reason
    assert pick(results, ()) not in (None, failed)


def test_nothing_works() -> None:
    trial = FakeTrial(lambda entry: 0.1)
    trial.broken = {candidate(node).name: 0 for node in NODES}
    results = race(trial, NODES)
    assert pick(results, ()) is None
    assert all("cannot be built" in c.reason for c in results)


def entry(name: str, speed: float | None, precision: str = "fp32") -> Candidate:
    return Candidate(
        name=name, images_per_second=speed, precision=precision, exact=precision == "fp32"
    )


@pytest.mark.parametrize(
    ("allowed", "expected"), [((), "threads"), (("bf16",), "threads, bf16"), (("fp32",), "threads")]
)
def test_bf16_is_chosen_only_where_it_is_allowed(allowed: tuple[str, ...], expected: str) -> None:
    entries = [entry("sequential", 10), entry("threads", 20), entry("threads, bf16", 40, "bf16")]
    chosen = pick(entries, allowed)
    assert chosen is not None
    assert chosen.name == expected


def test_of_near_equals_the_simpler_structure_is_chosen_and_of_one_the_fastest() -> None:
    threads = NodePlan(strategy="threads", threads=2)
    processes = NodePlan(strategy="processes", processes=2)

    def measured(node: NodePlan, variant: tuple[str, str], speed: float) -> Candidate:
        return dataclasses.replace(candidate(node, *variant), images_per_second=speed)

    entries = [
        measured(NodePlan(), EVERY[0], 50),
        measured(threads, EVERY[0], 98.5),
        measured(processes, EVERY[0], 100),
        measured(threads, EVERY[1], 99),
    ]
    chosen = pick(entries, ())
    assert chosen is not None
    assert chosen.name == "threads 2, channels_last"
    clear = pick([*entries, measured(processes, EVERY[1], 101.5)], ())
    assert clear is not None
    assert clear.node == processes
    assert clear.memory_format == "channels_last"


def test_of_level_ones_that_which_moves_far_less_between_the_cores_is_chosen() -> None:
    def measured(node: NodePlan, speed: float, error: float, crossing: float) -> Candidate:
        return dataclasses.replace(
            candidate(node, *EVERY[0]), images_per_second=speed, error=error, crossing_mb=crossing
        )

    def chosen_beside_threads(
        speed: float, error: float, crossing: float
    ) -> tuple[Candidate, tuple[Candidate, Candidate]]:
        threads = measured(NodePlan(strategy="threads", threads=2), 100, 0.01, 77)
        processes = NodePlan(strategy="processes", processes=2)
        entries = (threads, measured(processes, speed, error, crossing))
        chosen = pick(entries, ())
        assert chosen is not None
        return chosen, entries

    chosen, entries = chosen_beside_threads(99.5, 0.0, 5.6)
    assert chosen.node.strategy == "processes"
    text = decision(Race(candidates=entries), chosen, gradient_mb=2.8)
    assert "as fast as threads 2 (100), and only 6 MB go between the cores" in text
    assert text.endswith("in every update, not 77")
    chosen, entries = chosen_beside_threads(96, 0.03, 5.6)
    assert chosen.node.strategy == "processes"
    text = decision(Race(candidates=entries), chosen, gradient_mb=2.8)
    assert "within the noise of threads 2 (100), and only 6 MB" in text
    reasons = [c.reason for c in explain(list(entries), chosen, gradient_mb=2.8, allowed=())]
    assert reasons[0].startswith("4% faster, within the noise; threads wait for each other")
    assert reasons[1].startswith("4% behind, within the noise, and only 6 MB")
    for speed, error, crossing in (
        (96, 0.01, 5.6),  # clearly slower
        (93, 0.10, 5.6),  # who knows, but much
        (99.5, 0.0, 50.0),  # moves not much less
    ):
        chosen, _ = chosen_beside_threads(speed, error, crossing)
        assert chosen.node.strategy == "threads"


def test_of_those_within_their_noise_the_simplest_is_chosen() -> None:
    threads = candidate(NodePlan(strategy="threads", threads=2), *EVERY[0])
    processes = candidate(NodePlan(strategy="processes", processes=2), *EVERY[0])
    for speed, error, strategy in (
        (97.4, 0.03, "threads"),
        (97.4, 0.005, "processes"),  # clearly slower
        (96.5, 0.10, "processes"),  # who knows, but much
    ):
        entries = [
            dataclasses.replace(threads, images_per_second=speed, error=error),
            dataclasses.replace(processes, images_per_second=100, error=error),
        ]
        chosen = pick(entries, ())
        assert chosen is not None
        assert chosen.node.strategy == strategy


def test_finalists_of_long_updates_have_a_second_turn_however_late_it_is() -> None:
    trial = FakeTrial(lambda entry: 9.0)
    race(trial, NODES, EVERY, seconds=1.0)
    assert trial.now > LONGEST  # it was late
    again = [name for name in set(trial.calls) if trial.calls.count(name) > 1]
    assert sum("bf16" not in name for name in again) == FINALISTS


FEW = [
    NodePlan(),
    NodePlan(strategy="threads", threads=2),
    NodePlan(strategy="replicas", replicas=2),
    NodePlan(strategy="processes", processes=2),
]


@pytest.mark.parametrize("period", range(17, 97, 10))
def test_long_updates_on_a_machine_whose_speed_wanders(period: int) -> None:
    """It is 7% slower in every second period: turns of different minutes tell nothing."""

    def seconds(entry: Candidate) -> float:
        slow = 1.07 if int(trial.now / period) % 2 else 1.0
        return slow * {"sequential": 6.0, "processes 2x1": 2.9}.get(entry.name, 3.0)

    trial = FakeTrial(seconds)
    alternation = FakeAlternation(trial)
    results = race(trial, FEW, seconds=40.0, alternation=alternation)
    chosen = pick(results, ())
    assert chosen is not None
    assert chosen.name == "processes 2x1"
    assert alternation.most > 1
    assert not alternation.built, "all were taken down"
    assert all((c.images_per_second or 0) <= (chosen.images_per_second or 0) for c in results)


def test_who_is_behind_in_alternation_is_left_there() -> None:
    times = {"sequential": 6.0, "replicas 2x1": 3.03, "processes 2x1": 3.18}
    trial = FakeTrial(lambda entry: times.get(entry.name, 3.0))
    alternation = FakeAlternation(trial)
    results = {c.name: c for c in race(trial, FEW, alternation=alternation)}
    everyone = ["threads 2", "replicas 2x1", "processes 2x1"] * (COLD + LOOK)
    assert alternation.calls[: len(everyone)] == everyone
    assert set(alternation.calls[len(everyone) :]) == {"threads 2", "replicas 2x1"}
    counts = {name: alternation.calls.count(name) for name in results}
    assert counts["threads 2"] == counts["replicas 2x1"] == COLD + MOST
    turns = {name: trial.calls.count(name) for name in results}
    assert set(turns.values()) == {1}, "no finals beside"
    assert results["threads 2"].images_per_second == pytest.approx(BATCH / 3.0)
    assert results["processes 2x1"].images_per_second == pytest.approx(BATCH / 3.18)


def test_updates_alternate_often_enough_however_late_it_is() -> None:
    trial = FakeTrial(lambda entry: 9.0)
    alternation = FakeAlternation(trial)
    race(trial, NODES, EVERY, seconds=1.0, alternation=alternation)
    assert trial.now > LONGEST  # it was late
    counts = {name: alternation.calls.count(name) for name in alternation.calls}
    assert set(counts.values()) == {COLD + LEAST}


def test_as_many_alternate_as_fit_into_memory() -> None:
    for room_mb, most in ((1000.0, 3), (650.0, 2), (450.0, 0)):
        # 300 MB each
        trial = FakeTrial(lambda entry: 6.0 if entry.name == "sequential" else 3.0)
        alternation = FakeAlternation(trial)
        race(trial, FEW, alternation=alternation, room_mb=room_mb)
        assert alternation.most == most
        assert (len(trial.calls) == len(FEW)) == (most > 0), "else they have turns"


def test_who_cannot_be_built_beside_others_is_out() -> None:
    trial = FakeTrial(lambda entry: 6.0 if entry.name == "sequential" else 3.0)
    alternation = FakeAlternation(trial)
    alternation.broken.add("threads 2")
    results = {c.name: c for c in race(trial, FEW, alternation=alternation)}
    assert results["threads 2"].images_per_second is None
    assert "cannot be built again" in results["threads 2"].reason
    assert set(alternation.calls) == {"replicas 2x1", "processes 2x1"}


def test_of_those_over_a_process_group_one_alternates() -> None:
    nodes = [
        NodePlan(strategy="pipeline", stages=2, micro_batches=2),
        NodePlan(strategy="pipeline", stages=2, micro_batches=4),
        *FEW[1:],
    ]
    trial = FakeTrial(lambda entry: 2.95 if entry.node.micro_batches == 4 else 3.0)
    alternation = FakeAlternation(trial)
    race(trial, nodes, alternation=alternation)
    built = {name for name in alternation.calls if name.startswith("pipeline")}
    assert built == {"pipeline 2 stages x4"}


def test_the_error_of_a_speed_is_that_of_its_turns() -> None:
    results = race(FakeTrial(lambda entry: 0.1), NODES)
    errors = [c.error for c in results if c.error is not None]
    assert errors
    assert max(errors) < 1e-9
    drawn = random.Random(1)
    noisy = race(FakeTrial(lambda entry: drawn.uniform(0.1, 0.11)), NODES)
    assert max(c.error or 0.0 for c in noisy) > 0.001


def test_every_candidate_gets_a_reason_and_the_plan_carries_it() -> None:
    times = {"sequential": 0.4, "threads 4": 0.1, "threads 4, bf16": 0.05}
    trial = FakeTrial(lambda entry: times.get(entry.name, 0.15))
    results = race(trial, NODES, EVERY)
    chosen = pick(results, ())
    assert chosen is not None
    explained = explain(results, chosen, gradient_mb=228.0, allowed=())
    assert [c.name for c in explained if c.chosen] == ["threads 4"]
    assert all(c.reason for c in explained)
    reasons = {c.name: c.reason for c in explained}
    assert reasons["threads 4"] == "the fastest"
    assert 'numerics.allow = ["bf16"]' in reasons["threads 4, bf16"]
    assert "228.0 MB of gradients" in reasons["processes 4x1"]
    assert "idle" in next(text for name, text in reasons.items() if name.startswith("pipeline"))
    whole = Race(candidates=tuple(explained), batch_size=BATCH, decision="because")
    text = decision(whole, chosen, gradient_mb=2.8)
    assert text.startswith("threads 4: 1,000 images/s, 4.00x sequential; next replicas 2x2 at 667")
    assert "because" in text
    plan = plan_from_race(Config(), whole)
    assert plan.nodes == (NodePlan(strategy="threads", threads=4),)
    assert (plan.precision, plan.memory_format, plan.batch_size) == ("fp32", "contiguous", BATCH)
    assert plan.predicted["update_seconds"] == pytest.approx(0.1)
    assert {r.option for r in plan.rejected} == {c.name for c in explained if not c.chosen}


def test_a_near_equal_rival_is_said_to_be_one() -> None:
    speeds = {"sequential": 50.0, "threads 4": 99.0, "replicas 2x2": 100.0}
    entries = [
        dataclasses.replace(candidate(node, *EVERY[0]), images_per_second=speed)
        for node in NODES
        if (speed := speeds.get(candidate(node, *EVERY[0]).name))
    ]
    chosen = pick(entries, ())
    assert chosen is not None
    text = decision(Race(candidates=tuple(entries)), chosen, gradient_mb=2.8)
    assert text == "threads 4: 99.0 images/s; as fast as replicas 2x2 (100), and simpler"


def test_the_next_best_has_numerics_of_the_choice() -> None:
    trial = FakeTrial(
        lambda entry: (
            (0.1 if entry.precision == "bf16" else 0.3)
            * (1.0 if entry.node.strategy == "threads" else 1.25)
        )
    )
    results = race(trial, NODES, EVERY)
    chosen = pick(results, ("bf16",))
    assert chosen is not None
    text = decision(Race(candidates=tuple(results)), chosen, gradient_mb=2.8)
    assert text.startswith("threads 4, bf16: 1,000 images/s")
    assert " at 800" in text


def test_long_updates_skip_the_options_of_a_structure_that_is_far_behind() -> None:
    trial = FakeTrial(lambda entry: 9.0 if entry.node.strategy == "pipeline" else 2.0)
    results = {c.name: c for c in race(trial, NODES)}
    tried = [name for name in trial.calls if name.startswith("pipeline 2")]
    assert tried == ["pipeline 2 stages x4"]
    assert "far behind" in results["pipeline 2 stages x1"].reason
    short = FakeTrial(lambda entry: 0.09 if entry.node.strategy == "pipeline" else 0.02)
    race(short, NODES)
    assert {name for name in short.calls if name.startswith("pipeline 2")} == {
        f"pipeline 2 stages x{m}" for m in (1, 2, 4, 8)
    }


def test_long_updates_leave_out_options_that_cannot_catch_up() -> None:
    """A pipeline a third behind with 4 micro-batches gains a tenth with 8."""
    trial = FakeTrial(lambda entry: 3.0 if entry.node.strategy in ("pipeline", "hybrid") else 2.0)
    race(trial, NODES)
    tried = [name for name in trial.calls if name.startswith(("pipeline", "hybrid"))]
    assert set(tried) == {
        "pipeline 2 stages x4",
        "hybrid 2 x 2 stages x4",
        "pipeline 4 stages x4",
    }


def test_long_updates_try_other_numerics_for_three_structures() -> None:
    times = {"replicas 4x1": 2.0, "threads 2": 2.1, "processes 4x1": 2.2}
    trial = FakeTrial(lambda entry: times.get(entry.name.split(",")[0], 2.3))
    race(trial, NODES, EVERY)
    others = {name for name in trial.calls if "," in name}
    assert others == {
        f"{structure}, {variant}"
        for structure in times
        for variant in ("channels_last", "bf16", "channels_last, bf16")
    }


def test_long_updates_that_were_disturbed_once_are_looked_at_again() -> None:
    trial = FakeTrial(
        lambda entry: (
            19.0
            if entry.name == "threads 4" and trial.calls.count("threads 4") == 1
            else {"threads 4": 11.0, "sequential": 36.0}.get(entry.name, 13.0)
        )
    )
    chosen = pick(race(trial, NODES), ())
    assert chosen is not None
    assert chosen.name == "threads 4"
    assert trial.calls.count("sequential") == 1


@pytest.mark.parametrize("update", [0.1, 3.0, 30.0])
def test_a_race_lasts_longer_where_updates_are_long(update: float) -> None:
    """Ten that nothing tells apart: the finals would go on for all rounds."""
    nodes = [NodePlan(strategy="threads", threads=t) for t in range(2, 12)]
    trial = FakeTrial(lambda entry: update, noise=0.05)
    race(trial, nodes, seconds=1.0)
    end = min(UPDATES * update, LONGEST)
    looks = 2 * len(nodes) * (WARMUP + 1) * update * 1.5
    assert trial.now < max(end, looks) + 10 * update, "a turn that has begun is ended"
    assert trial.now > min(end, ROUNDS * FINALISTS * WARMUP * update)


def test_turns_of_short_updates_last_longer_than_a_moment() -> None:
    nodes = [NodePlan(), NodePlan(strategy="threads", threads=2)]
    trial = FakeTrial(lambda entry: 0.05 if entry.name == "sequential" else 0.03)
    trials = {c.name: c.trials for c in race(trial, nodes)}
    assert trials["sequential"] == 5, "the first has nothing to go by"
    assert trials["threads 2"] >= 12, "0.6 seconds"
    fast = FakeTrial(lambda entry: 0.001 if entry.name == "sequential" else 0.002)
    assert {c.name: c.trials for c in race(fast, nodes)}["threads 2"] == 3, "far behind"


def test_who_was_timed_long_enough_is_not_said_to_be_far_behind() -> None:
    times = {"sequential": 14.0, "threads 4": 4.0}
    trial = FakeTrial(lambda entry: times.get(entry.name, 9.0))
    by_name = {c.name: c for c in race(trial, NODES)}
    assert by_name["threads 4"].trials == 2, "not the five that short updates have"
    assert by_name["threads 4"].reason == by_name["sequential"].reason == ""
    assert by_name["replicas 4x1"].reason == "stopped early: far behind"


def test_finals_are_among_those_who_come_near_each_other() -> None:
    """The best in bf16 has nobody near: only the two in fp32 run again."""
    times = {
        "threads 4": 4.0,
        "replicas 4x1": 4.1,
        "processes 4x1": 4.4,
        "threads 4, bf16": 2.0,
    }
    trial = FakeTrial(lambda entry: times.get(entry.name, 6.0))
    race(trial, NODES, [("fp32", "contiguous"), ("bf16", "contiguous")])
    twice = {name for name in trial.calls if trial.calls.count(name) > 1}
    assert twice == {"threads 4", "replicas 4x1"}


def test_precisions_that_come_near_each_other_meet_in_the_finals() -> None:
    times = {"threads 4": 0.10, "threads 4, bf16": 0.101}
    trial = FakeTrial(lambda entry: times.get(entry.name, 0.2), noise=0.02)
    race(trial, NODES, [("fp32", "contiguous"), ("bf16", "contiguous")])
    assert trial.calls.count("threads 4") > 1
    assert trial.calls.count("threads 4, bf16") == trial.calls.count("threads 4")


def test_a_thorough_race_stops_nobody_and_has_time_for_finals() -> None:
    """The first round alone takes longer than the seconds that were asked for."""
    times = {"threads 4": 4.0, "replicas 4x1": 4.1}
    trial = FakeTrial(lambda entry: times.get(entry.name, 9.0), noise=0.01)
    contest = Contest(trial, batch_size=BATCH, seconds=60.0, thorough=True, clock=trial.clock)
    results = contest.run(NODES, EVERY)
    assert all(c.images_per_second and not c.reason for c in results)
    assert len(results) == 1 + len(NODES[1:]) * len(EVERY)
    assert min(trial.calls.count(name) for name in times) > 1


def test_quartiles_of_two_times() -> None:
    """The speed shown is of the faster one, and within the spread that is shown."""
    drawn = iter([8.0, 7.0, 7.0, 6.0])
    nodes = [NodePlan(strategy="threads", threads=2)]
    [entry] = race(FakeTrial(lambda entry: next(drawn)), nodes, seconds=0.0)
    assert entry.trials == 2
    assert (entry.low or 0) <= (entry.images_per_second or 0) <= (entry.high or 0)
