"""What `forecast` says to people who buy machines, on made-up gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from paceline.plan.advice import Case, Gain, advise


def case(speedup: Callable[[int], float | None], **changes: object) -> Case:
    def gain(nodes: int) -> Gain | None:
        found = speedup(nodes)
        return None if found is None else Gain(found, 0.95 * found, 1.05 * found)

    made = Case(gain=gain, capacity=float, alone_seconds=3600.0, most=8)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_where_it_stops_paying() -> None:
    """1, 1.9, 2.6, 3.05, 3.25: the fourth brings less than half of itself."""
    gains = {1: 1.0, 2: 1.9, 3: 2.6, 4: 3.05, 5: 3.25}
    text = advise(case(lambda n: gains.get(n, 3.3)), worth=1.1)
    assert text[0].startswith(
        "worth it: one more machine like this one means 31 min 35 s instead of 1 h 0 min for this"
        " training, 1.90 times as fast (1.80 to 1.99)"
    )
    assert text[1:] == ("it stops paying at 3 machines: number 4 would bring 45% of its own speed",)


def test_where_all_pay() -> None:
    text = advise(case(lambda n: 0.9 * n + 0.1), worth=1.1)
    assert text[1:] == ("each of 8 machines pays: the last brings 90% of its own speed",)


def test_memory_ends_it() -> None:
    text = advise(case(lambda n: 0.9 * n if n < 4 else None), worth=1.1)
    assert "stops at 3 machines: with 4 nothing fits" in text[1]
    assert advise(case(lambda n: None), worth=1.1)[0].startswith("not possible")


@pytest.mark.parametrize("speedup", [0.4, 1.02, 1.09])
def test_not_worth_it(speedup: float) -> None:
    found = advise(case(lambda n: 1.0 if n == 1 else speedup, cause="44 MB"), worth=1.1)
    assert len(found) == 1
    assert found[0].startswith("not worth it: one more machine like this one means ")
    assert found[0].endswith("(44 MB)")


def test_what_it_costs() -> None:
    bought = advise(case(lambda n: n, purchase=900.0, currency="EUR", most=4), worth=1.1)
    assert bought[-1] == (
        "2 machines cost 900 EUR more and save 30 min 0 s of each training,"
        " 4 machines cost 2,700 EUR more and save 45 min 0 s of each training"
    )
    hired = advise(case(lambda n: 0.8 * n, hourly=0.4, most=2), worth=1.1)
    assert hired[-1] == "a training on 2 machines costs 0.5, on one, 0.4"


def test_a_slower_machine_is_judged_by_its_own_speed() -> None:
    """One of half the speed that brings all of it pays."""
    text = advise(
        case(lambda n: 1 + 0.5 * (n - 1), capacity=lambda n: 1 + 0.5 * (n - 1), second=0.5, most=3),
        worth=1.1,
    )
    assert "of 0.5 times this one's speed" in text[0]
    assert "the last brings 100% of its own speed" in text[1]
