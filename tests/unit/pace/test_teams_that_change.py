"""What a loop in legs says when another team goes on."""

from __future__ import annotations

import pytest

from paceline.pace.carrying import Carrying
from paceline.pace.legs import Legs
from paceline.pace.meter import Meter
from paceline.pace.ranks import Ranks
from paceline.plan.pilot import Decision
from paceline.schema.legs import Leg

BOTH, ALONE = "all 2 ranks", "rank 0 alone"


def decision(name: str, role: str = "keep") -> Decision:
    return Decision(name=name, updates=5, role=role, best=name)  # type: ignore[arg-type]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def legs(said: list[str]) -> Legs:
    """A loop whose epochs have five batches: four are the first leg, one is a leg of its own."""
    ranks = Ranks()
    found = Legs(ranks, Meter(ranks), lambda: None, [1.0], said.append, Carrying(lambda: 0))
    found._kept = BOTH
    found.legs = [
        Leg(name=BOTH, updates=4, role="first", best=BOTH, update_seconds=0.2),
        Leg(name=BOTH, updates=1, role="keep", best=BOTH),
        Leg(name=ALONE, updates=5, role="trial", best=BOTH, update_seconds=0.1),
    ]
    return found


def test_a_leg_of_one_batch_that_tells_no_speed_does_not_hide_the_change(
    legs: Legs, said: list[str]
) -> None:
    legs._tell(decision(ALONE))
    assert said == [f"paceline: {ALONE} from now on: 0.1 s per batch, 0.2 with {BOTH}"]
    legs._tell(decision(ALONE))
    assert len(said) == 1


def test_trials_of_others_between_do_not_hide_it(legs: Legs, said: list[str]) -> None:
    """A trial after which the best one is another already when it is kept."""
    legs.legs.append(Leg(name="a third", updates=5, role="trial", best=ALONE, update_seconds=0.3))
    legs._tell(decision(ALONE))
    assert len(said) == 1
