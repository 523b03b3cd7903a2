"""The pilot with times that are made up: what it tries, what it keeps, what that costs."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.pilot import (
    FEWEST,
    Decision,
    Knowledge,
    Option,
    compare,
    expected,
    next_leg,
    saved,
    spent,
    sure_ratio,
    typical,
)
from paceline.schema.legs import Leg

PLAIN, LAYOUT, SPLIT, BOTH = "threads", "layout", "processes", "processes, layout"
OPTIONS = (
    Option(name=PLAIN),
    Option(name=LAYOUT, factors={"layout": 0.9}),
    Option(name=SPLIT, factors={"processes": 0.85}, ranks=2),
    Option(name=BOTH, factors={"processes": 0.85, "layout": 0.9}, ranks=2),
)
Speed = Callable[[str, int], float]


class Machine:
    """Runs what the pilot decides, with seconds that `speed` gives for a plan and an update."""

    def __init__(
        self,
        speed: Speed | Mapping[str, float],
        *,
        updates: int,
        noise: float = 0.0,
        setup: float = 0.2,
        broken: tuple[str, ...] = (),
        **known: object,
    ) -> None:
        self.speed: Speed = (lambda name, _: speed[name]) if isinstance(speed, Mapping) else speed
        self.noise, self.setup, self.broken = noise, setup, broken
        self.random = random.Random(0)
        self.known = Knowledge(options=OPTIONS, updates=updates, **known)  # type: ignore[arg-type]
        self.decisions: list[Decision] = []
        self.running = ""

    def run(self) -> Machine:
        while self.known.position < self.known.updates:
            decision = next_leg(self.known)
            assert decision.updates >= 1
            assert decision.updates <= self.known.updates - self.known.position
            self.decisions.append(decision)
            self.make(decision)
        return self

    def make(self, decision: Decision) -> None:
        known, fails = self.known, decision.name in self.broken
        setup = 0.0 if decision.name == self.running else self.setup
        count = 0 if fails else decision.updates
        times = [
            self.speed(decision.name, known.position + each)
            * math.exp(self.random.gauss(0, self.noise))
            for each in range(count)
        ]
        middle, error = typical(times)
        leg = Leg(
            name=decision.name,
            first=known.position,
            updates=count,
            role=decision.role,
            best=decision.best,
            ended="it was killed" if fails else "",
            setup_seconds=setup,
            seconds=sum(times),
            update_seconds=middle,
            error=error,
        )
        self.running = decision.name
        self.known = dataclasses.replace(
            known,
            legs=(*known.legs, leg),
            position=known.position + count,
            elapsed=known.elapsed + setup + sum(times),
            ready=max(known.ready, decision.ranks),
            out={**known.out, decision.name: "killed"} if fails else known.out,
        )

    @property
    def names(self) -> list[str]:
        return [leg.name for leg in self.known.legs]


def test_it_starts_at_once_and_ends_with_the_fastest() -> None:
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.09, SPLIT: 0.08, BOTH: 0.07}, updates=5000).run()
    assert machine.names[0] == PLAIN
    assert machine.known.legs[0].updates == FEWEST
    assert machine.names[-1] == BOTH
    assert spent(machine.known) <= 0.05 * machine.known.elapsed
    assert saved(machine.known) > 0.9 * 5000 * 0.03


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_what_was_saved_is_told_rightly_of_a_machine_whose_load_changes(factor: float) -> None:
    """The first plan was timed long ago, when the machine was busier, or idle."""
    times = {PLAIN: 0.1, LAYOUT: 0.05, SPLIT: 0.2, BOTH: 0.2}

    def speed(name: str, update: int) -> float:
        return times[name] * (1.0 if update < 2000 else factor)

    machine = Machine(speed, updates=5000).run()
    truly = sum(speed(PLAIN, update) - speed(LAYOUT, update) for update in range(5000))
    assert saved(machine.known) == pytest.approx(truly, rel=0.1)


def test_no_more_is_claimed_than_the_noise_allows() -> None:
    """The first plan was timed while the machine was busy: 19 times as slow, or 8, or 45."""
    machine = Machine({PLAIN: 0.95, LAYOUT: 0.05}, updates=10)
    for name, role, seconds, error in (
        (PLAIN, "first", 0.95, 0.43),
        (LAYOUT, "trial", 0.05, 0.04),
        (LAYOUT, "keep", 0.05, 0.04),
    ):
        machine.make(Decision(name=name, updates=FEWEST, role=role, best=PLAIN))
        *before, leg = machine.known.legs
        leg = dataclasses.replace(leg, update_seconds=seconds, error=error)
        machine.known = dataclasses.replace(machine.known, legs=(*before, leg))
    assert saved(machine.known) == pytest.approx(
        FEWEST * (0.95 / math.exp(2 * 0.432) - 0.05), rel=0.01
    )
    assert sure_ratio(machine.known.legs, PLAIN, LAYOUT) == 1.0


def test_a_short_training_is_left_alone() -> None:
    machine = Machine({PLAIN: 0.01, LAYOUT: 0.005, SPLIT: 0.005, BOTH: 0.001}, updates=60).run()
    assert set(machine.names) == {PLAIN}


def test_without_a_budget_nothing_is_tried() -> None:
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.01}, updates=5000, budget=0.0).run()
    assert set(machine.names) == {PLAIN}


def test_ranks_are_started_while_training_goes_on() -> None:
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.2, SPLIT: 0.05, BOTH: 0.2}, updates=5000).run()
    first = next(d for d in machine.decisions if d.ranks)
    assert (first.name, first.ranks) == (PLAIN, 2)
    assert machine.names.index(SPLIT) > machine.decisions.index(first)
    assert machine.names[-1] == SPLIT


def test_of_ties_the_simplest_is_kept() -> None:
    speed = {PLAIN: 0.1, LAYOUT: 0.1, SPLIT: 0.1, BOTH: 0.1}
    machine = Machine(speed, updates=20000, noise=0.05).run()
    kept = {leg.name for leg in machine.known.legs if leg.role == "keep" and leg.updates > 100}
    assert kept == {PLAIN}


def test_one_that_fails_costs_its_own_seconds_and_is_not_tried_again() -> None:
    speed = {PLAIN: 0.1, LAYOUT: 0.2, SPLIT: 0.05, BOTH: 0.05}
    machine = Machine(speed, updates=5000, broken=(SPLIT, BOTH)).run()
    assert machine.names.count(SPLIT) == 1
    assert machine.names[-1] == PLAIN
    assert sum(leg.updates for leg in machine.known.legs) == 5000


def test_what_a_trial_shows_of_a_trait_counts_for_all_that_have_it() -> None:
    legs = [
        Leg(name=name, best=PLAIN, role=role, first=index, update_seconds=seconds, error=0.01)
        for index, (name, role, seconds) in enumerate(
            [(PLAIN, "keep", 0.1), (LAYOUT, "trial", 0.13), (PLAIN, "keep", 0.1),
             (SPLIT, "trial", 0.08), (PLAIN, "keep", 0.1)]
        )
    ]  # fmt: skip
    known = Knowledge(options=OPTIONS, updates=5000, legs=legs, position=5, ready=2)
    assert expected(known, OPTIONS[3], PLAIN) == pytest.approx(1.3 * 0.8, rel=0.01)
    assert next_leg(known).role == "keep"


def test_the_first_leg_only_warms_up() -> None:
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.05, SPLIT: 0.2, BOTH: 0.2}, updates=5000).run()
    assert [leg.role for leg in machine.known.legs[:3]] == ["first", "keep", "trial"]


def test_trials_cost_what_those_before_them_cost() -> None:
    """One that took a minute to build is not tried again for a gain of seconds."""
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.2, SPLIT: 0.1, BOTH: 0.1}, updates=5000, setup=0.1)
    machine.known = dataclasses.replace(machine.known, budget=1.0)
    while not any(leg.role == "trial" for leg in machine.known.legs):
        machine.make(next_leg(machine.known))
    slow = dataclasses.replace(machine.known.legs[-1], setup_seconds=1000.0)
    known = dataclasses.replace(machine.known, legs=(*machine.known.legs[:-1], slow))
    assert next_leg(dataclasses.replace(known, ready=0)).role != "trial"


def test_a_drift_of_the_machine_is_no_difference() -> None:
    """Everything gets slower all the time; a trial lies between two legs of the best."""

    def speed(name: str, update: int) -> float:
        return (0.1 if name != LAYOUT else 0.097) * (1 + update / 2000)

    machine = Machine(speed, updates=8000, noise=0.01).run()
    assert machine.names[-1] == LAYOUT


def test_a_change_of_speed_makes_it_try_again() -> None:
    def speed(name: str, update: int) -> float:
        crowded = update > 4000  # another program has taken one of the cores
        return {PLAIN: 0.2 if crowded else 0.05, LAYOUT: 0.06}.get(name, 0.3)

    machine = Machine(speed, updates=20000).run()
    before = [leg.name for leg in machine.known.legs if leg.first < 4000 and leg.role == "keep"]
    assert before[-1] == PLAIN
    assert machine.names[-1] == LAYOUT


def test_it_begins_with_what_past_trainings_found() -> None:
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.09}, updates=20, start=LAYOUT).run()
    assert set(machine.names) == {LAYOUT}


def test_what_was_tried_and_is_no_option_any_more_is_not_gone_on_with() -> None:
    """A node of it was lost while the others were timed once more beside it."""
    machine = Machine({PLAIN: 0.1, LAYOUT: 0.1}, updates=10_000, noise=0.05)
    machine.known = dataclasses.replace(machine.known, options=OPTIONS[:2])
    while not (machine.known.legs and machine.known.legs[-1].role == "check"):
        machine.make(next_leg(machine.known))
    assert machine.known.legs[-2].name == LAYOUT
    machine.known = dataclasses.replace(machine.known, options=OPTIONS[:1])
    assert next_leg(machine.known).name == PLAIN


def test_one_that_needs_ranks_is_not_begun_with_before_they_stand_by() -> None:
    assert next_leg(Knowledge(options=OPTIONS, updates=10, start=SPLIT)).name == PLAIN
    assert next_leg(Knowledge(options=OPTIONS, updates=10, start=SPLIT, ready=2)).name == SPLIT


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4),
    updates=st.integers(1, 3000),
    noise=st.floats(0.0, 0.1),
    setup=st.floats(0.0, 5.0),
    broken=st.sets(st.sampled_from([LAYOUT, SPLIT, BOTH])),
    budget=st.floats(0.0, 0.2),
)
def test_whatever_the_machine(
    seconds: list[float],
    updates: int,
    noise: float,
    setup: float,
    broken: set[str],
    budget: float,
) -> None:
    """Every update is made once, and trials cost no more than the budget and what surprised."""
    speed = dict(zip((PLAIN, LAYOUT, SPLIT, BOTH), seconds, strict=True))
    machine = Machine(
        speed, updates=updates, noise=noise, setup=setup, broken=tuple(broken), budget=budget
    ).run()
    legs = machine.known.legs
    assert sum(leg.updates for leg in legs) == updates
    assert [leg.first for leg in legs] == [
        sum(leg.updates for leg in legs[:index]) for index in range(len(legs))
    ]
    trials = [leg for leg in legs if leg.role == "trial"]
    if budget == 0:
        assert not trials
    # A plan is tried at most so often, whatever the noise.
    assert len(trials) <= 4 * len(OPTIONS) * 3


def test_a_comparison_takes_the_noise_from_its_legs() -> None:
    times = ((PLAIN, 1.0, 0.03), (LAYOUT, 0.9, 0.04), (PLAIN, 1.0, 0.03))
    legs = [
        Leg(name=name, best=PLAIN, first=index, update_seconds=seconds, error=error)
        for index, (name, seconds, error) in enumerate(times)
    ]
    found = compare(legs, LAYOUT, PLAIN)
    assert found is not None
    assert found.difference == pytest.approx(math.log(0.9))
    assert found.error == pytest.approx(math.sqrt(0.04**2 + 2 * 0.03**2 / 4))
    assert found.pairs == 1
    assert found.is_faster
    assert not found.is_obvious
    assert compare(legs, SPLIT, PLAIN) is None


def test_few_long_updates_leave_room_for_a_trial() -> None:
    """Four minutes of ResNet-18: building is a small part of what the first leg was set up with."""
    speed = {PLAIN: 3.8, LAYOUT: 3.2, SPLIT: 3.9, BOTH: 3.4}
    machine = Machine(speed, updates=64, setup=5.0, built_seconds=2.0, rank_seconds=6.0).run()
    # The first leg needs no second one to be held against: its updates are long.
    assert [leg.role for leg in machine.known.legs[:2]] == ["first", "trial"]
    assert machine.names[1] == machine.names[-1] == LAYOUT
    assert spent(machine.known) <= 0.05 * machine.known.elapsed
    # Where all of it was building, a proof on a copy would cost more than it may.
    slow = Machine(speed, updates=64, setup=5.0, rank_seconds=6.0).run()
    assert set(slow.names) == {PLAIN}


def lose(machine: Machine, start: str) -> None:
    """A host is lost: from here on with `start`, as the training over hosts does it."""
    last = dataclasses.replace(machine.known.legs[-1], left=("c",), ended="c has gone")
    legs = (*machine.known.legs[:-1], last)
    machine.known = dataclasses.replace(machine.known, legs=legs, since=len(legs), start=start)
    machine.running = ""


def test_after_a_loss_nothing_is_tried_that_is_known_to_be_slower() -> None:
    options = tuple(
        Option(name=name, factors={name: took}, setup_seconds=1.0)
        for name, took in (("alone", 0.8), ("two", 0.4), ("three", 0.27), ("four", 0.2))
    )
    speeds = {"alone": 0.8, "two": 0.4, "three": 0.27, "four": 0.2}
    machine = Machine(speeds, updates=2000)
    machine.known = dataclasses.replace(machine.known, options=options)
    while not any(leg.role == "keep" and leg.name == "four" for leg in machine.known.legs):
        machine.make(next_leg(machine.known))
    finding = spent(machine.known)
    lose(machine, "three")
    machine.known = dataclasses.replace(machine.known, options=options[:3])
    for _ in range(5):
        machine.make(next_leg(machine.known))
    since = machine.known.recent
    assert {leg.name for leg in since} == {"three"}
    assert [leg.role for leg in since[:2]] == ["first", "keep"]
    assert spent(machine.known) == finding > 0  # what was spent before is still counted


def test_who_comes_back_trains_again_though_the_budget_is_spent() -> None:
    options = tuple(
        Option(name=name, factors={name: took}, setup_seconds=1.0)
        for name, took in (("alone", 0.8), ("two", 0.4))
    )
    machine = Machine({"alone": 0.8, "two": 0.4}, updates=500)
    machine.known = dataclasses.replace(machine.known, options=options)
    while not any(leg.role == "keep" and leg.name == "two" for leg in machine.known.legs):
        machine.make(next_leg(machine.known))
    lose(machine, "alone")
    machine.known = dataclasses.replace(machine.known, options=options[:1], budget=1e-6)
    for _ in range(3):
        machine.make(next_leg(machine.known))
    assert machine.running == "alone"
    machine.known = dataclasses.replace(machine.known, options=options)
    assert (next_leg(machine.known).name, next_leg(machine.known).role) == ("two", "trial")
    new = Option(name="new", factors={"new": 0.4}, setup_seconds=1.0)
    machine.known = dataclasses.replace(machine.known, options=(options[0], new))
    assert next_leg(machine.known).name == "alone"  # a search, for which nothing is left
