"""How long a silent host is waited for: by table, and what holds of every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.suspicion import LEAST_SECONDS, cost_of_going_on, patience

# with it, without, handover, back, limit: seconds that it is waited for
TABLE = {
    "four alike": ((0.20, 0.27, 1.0, 15.0, 10.0), 2 + 15 * (1 - 0.20 / 0.27)),
    "two alike": ((0.20, 0.40, 1.0, 15.0, 10.0), 9.5),
    "it does nearly all": ((0.10, 1.00, 2.0, 15.0, 60.0), 17.5),
    "a heavy model": ((5.0, 6.0, 20.0, 60.0, 120.0), 50.0),
    "it saves nothing": ((0.30, 0.30, 7.0, 15.0, 10.0), 7.0),
    "it holds the others up": ((0.40, 0.30, 7.0, 15.0, 10.0), 7.0),
    "the limit": ((5.0, 6.0, 20.0, 60.0, 10.0), 10.0),
    "a busy moment is no loss": ((0.20, 0.21, 0.1, 5.0, 10.0), LEAST_SECONDS),
    "a limit below that": ((0.20, 0.21, 0.1, 5.0, 2.0), 2.0),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    (with_it, without, handover, back, limit), expected = TABLE[name]
    found = patience(with_it=with_it, without=without, handover=handover, back=back, limit=limit)
    assert found == pytest.approx(expected)


seconds = st.floats(0.001, 1000.0)


@given(with_it=seconds, without=seconds, handover=seconds, back=seconds, silent=seconds)
def test_never_more_than_twice_what_knowing_would_cost(
    with_it: float, without: float, handover: float, back: float, silent: float
) -> None:
    """Whenever the host speaks again: beside the cheaper of waiting and going on at once."""
    how = {"with_it": with_it, "without": without, "handover": handover, "back": back}
    cost = cost_of_going_on(**how)
    waited = patience(**how, limit=1e9)
    paid = silent if silent <= waited else waited + cost
    assert paid <= 2 * max(min(silent, cost), LEAST_SECONDS) + 1e-6
