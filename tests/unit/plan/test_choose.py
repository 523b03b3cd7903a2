"""From the times of a race to its choice."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.plan.candidates import candidate
from paceline.plan.choose import decided, pick, plan_from_race
from paceline.schema import Candidate, Config, NodePlan, Race

SEQUENTIAL = NodePlan()
THREADS = NodePlan(strategy="threads", threads=2)
PROCESSES = NodePlan(strategy="processes", processes=2)


def entry(
    node: NodePlan,
    speed: float | None,
    precision: str = "fp32",
    layout: str = "contiguous",
    **more: object,
) -> Candidate:
    made = candidate(node, precision, layout)
    return dataclasses.replace(made, images_per_second=speed, **more)  # type: ignore[arg-type]


def race(*entries: Candidate, allowed: tuple[str, ...] = ()) -> Race:
    found = decided(Race(candidates=entries, batch_size=64, gradient_mb=2.8), allowed=allowed)
    assert found is not None
    return found


def test_the_fastest_is_chosen_and_the_others_are_told_why_not() -> None:
    found = race(
        entry(SEQUENTIAL, 100.0, speedup=1.0),
        entry(THREADS, 150.0, speedup=1.5),
        entry(PROCESSES, 200.0, speedup=2.0),
        entry(PROCESSES, None, layout="channels_last", reason="view size is not compatible"),
    )
    assert [each.chosen for each in found.candidates] == [False, False, True, False]
    assert found.candidates[0].reason == "50% slower: one core of several"
    assert found.candidates[1].reason.startswith("25% slower: threads wait for each other")
    assert found.candidates[2].reason == "the fastest"
    assert found.candidates[3].reason == "view size is not compatible"
    assert found.decision.startswith(
        "processes 2x1: 200 images/s, 2.00x sequential; next threads 2"
    )


@pytest.mark.parametrize(("error", "name"), [(0.002, "processes 2x1"), (0.03, "threads 2")])
def test_of_ties_the_simplest_is_chosen(error: float, name: str) -> None:
    found = race(entry(THREADS, 190.0, error=error), entry(PROCESSES, 200.0, error=error))
    chosen = next(each for each in found.candidates if each.chosen)
    assert chosen.name == name
    if name == "threads 2":
        assert chosen.reason == "as fast as the fastest, and simpler"
        assert found.decision.endswith("as fast as processes 2x1 (200), and simpler")


def test_noise_does_not_make_half_the_speed_a_tie() -> None:
    slow, fast = entry(THREADS, 100.0, error=0.5), entry(PROCESSES, 200.0, error=0.5)
    assert pick([slow, fast], ()) is fast


def test_what_rounds_is_chosen_only_where_it_is_allowed() -> None:
    exact, rounded = entry(PROCESSES, 200.0), entry(PROCESSES, 400.0, "bf16")
    assert pick([exact, rounded], ()) is exact
    assert pick([exact, rounded], ("bf16",)) is rounded
    reason = race(exact, rounded).candidates[1].reason
    assert (
        reason == '2.00x the choice, but changes results: allow it with numerics.allow = ["bf16"]'
    )


def test_where_nothing_ran_nothing_is_chosen() -> None:
    assert decided(Race(candidates=(entry(THREADS, None),)), allowed=()) is None
    assert pick([entry(THREADS, 100.0, out=True)], ()) is None


def test_the_plan_of_a_race_has_what_was_measured() -> None:
    found = race(entry(THREADS, 100.0), entry(PROCESSES, 200.0, memory_mb=500.0))
    plan = plan_from_race(Config(), found)
    assert plan.nodes[0].strategy == "processes"
    assert plan.predicted == {
        "images_per_second": 200.0,
        "update_seconds": 0.32,
        "memory_mb": 500.0,
    }
    assert [each.option for each in plan.rejected] == ["threads 2"]
