"""Training in legs: what is behind a training that goes on, and what memory allows."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.local import memory
from paceline.plan.candidates import candidate
from paceline.plan.pilot import Option
from paceline.run import RunDirectory
from paceline.schema import Config, NodePlan, Plan
from paceline.schema.legs import Leg, cut_at, merged, read_legs
from paceline.workflow.alone import legs_before
from paceline.workflow.legs import LegsRequest, LegTraining, write_legs
from paceline.workflow.runners import Began

THREADS = Plan(nodes=(NodePlan(strategy="threads", threads=2),), batch_size=8)
PROCESSES = Plan(nodes=(NodePlan(strategy="processes", processes=2),), batch_size=8)


def name(plan: Plan) -> str:
    return candidate(plan.nodes[0]).name


def leg(plan: Plan, first: int, updates: int) -> Leg:
    return Leg(name=name(plan), plan=plan, first=first, updates=updates)


def began(update: int, plan: Plan | None = None) -> Began:
    return Began(update=update, updates=100, finished=False, started=0.0, plan=plan)


def spans(legs: list[Leg]) -> list[tuple[str, int, int]]:
    return [(each.name, each.first, each.updates) for each in legs]


def test_legs_after_a_checkpoint_are_made_again() -> None:
    legs = [leg(THREADS, 0, 10), leg(PROCESSES, 10, 20), leg(THREADS, 30, 5)]
    assert spans(cut_at(legs, 15)) == [("threads 2", 0, 10), ("processes 2x1", 10, 5)]
    assert spans(cut_at(legs, 10)) == [("threads 2", 0, 10)]
    assert cut_at(legs, 0) == []


def test_consecutive_legs_of_a_plan_are_one() -> None:
    found = merged([leg(THREADS, 0, 4), leg(THREADS, 4, 6), leg(PROCESSES, 10, 5)])
    assert spans(found) == [("threads 2", 0, 10), ("processes 2x1", 10, 5)]


def test_a_killed_leg_is_known_by_the_checkpoint_that_it_made(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_legs(run, [leg(THREADS, 0, 10)])
    expected = [("threads 2", 0, 10), ("processes 2x1", 10, 15)]
    assert spans(legs_before(run, began(25, PROCESSES))) == expected
    assert spans(read_legs(run.legs)) == expected


def test_a_new_training_has_none_behind_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert legs_before(run, began(0)) == []
    assert run.legs.exists()  # so that it goes on in legs, wherever it is interrupted


@pytest.mark.parametrize(("free", "fits"), [(1000.0, True), (100.0, False)])
def test_plans_that_memory_does_not_allow_are_out(
    free: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    home = SimpleNamespace(config=Config(), began=0.0, view=SimpleNamespace(say=said.append))
    options = [Option(name=name(THREADS)), Option(name=name(PROCESSES), ranks=2)]
    asked = LegsRequest(
        home=home,  # type: ignore[arg-type]
        options=options,
        plans={name(plan): plan for plan in (THREADS, PROCESSES)},
        begun=began(0),
        began=time.perf_counter(),
        verbose=True,
    )
    training = LegTraining(asked, first=(name(THREADS), SimpleNamespace()))  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "available_mb", lambda: free)
    assert training._fits(500.0, [name(PROCESSES)]) == fits
    assert (name(PROCESSES) in training.known.out) == (not fits)
    assert said == ([] if fits else ["  processes 2x1: needs about 500 MB more, of 90 free"])
