"""Times by batch size, and shares: by hand, and by what must always hold."""

from __future__ import annotations

import pytest
from cost_cases import curves, figure, host
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost.compute import (
    UpdateCurve,
    deviation,
    expected_maximum,
    host_curve,
    shares,
    update_curve,
)
from paceline.errors import ConfigError
from paceline.schema import decode, encode
from paceline.schema.machines import Machines, Measured


def test_between_and_beyond_the_measured_sizes() -> None:
    curve = update_curve([(32, 0.2), (64, 0.3), (128, 0.6)])
    assert curve.seconds(64) == 0.3
    assert curve.seconds(96) == pytest.approx(0.45)
    assert curve.fixed == pytest.approx(0.1)
    assert curve.seconds(16) == pytest.approx(0.15)
    assert curve.seconds(0) == 0.0
    assert curve.seconds(224) == pytest.approx(0.6 + 96 * 0.4 / 96)


def test_one_point_alone_is_proportional() -> None:
    curve = update_curve([(64, 0.5)])
    assert curve.fixed == 0.0
    assert curve.seconds(32) == 0.25
    assert curve.seconds(256) == 2.0


def test_a_larger_batch_that_was_faster_is_noise() -> None:
    curve = update_curve([(32, 0.2), (64, 0.19), (128, 0.3)])
    assert curve.seconds(64) == 0.2
    assert curve.fixed == 0.2


def test_times_that_cannot_be_are_refused() -> None:
    for points in ([], [(0, 1.0)], [(32, 0.0)]):
        with pytest.raises(ConfigError, match="measure again"):
            update_curve(points)


@given(curves, st.floats(0.01, 2000), st.floats(0, 2000))
def test_more_samples_are_never_faster(curve: UpdateCurve, samples: float, more: float) -> None:
    assert curve.seconds(samples) <= curve.seconds(samples + more) * (1 + 1e-9)
    assert 0 <= curve.fixed <= curve.seconds(samples) * (1 + 1e-9)


@given(curves, st.floats(0.01, 2000))
def test_the_inverse_is_one(curve: UpdateCurve, samples: float) -> None:
    seconds = curve.seconds(samples)
    assert curve.seconds(curve.samples_in(seconds)) <= seconds * (1 + 1e-6)
    assert curve.samples_in(seconds * (1 + 1e-6)) >= samples * (1 - 1e-3)


@given(st.lists(st.tuples(curves, st.integers(1, 50)), min_size=1, max_size=4), st.integers(1, 999))
def test_shares_add_up_and_no_single_move_helps(
    kinds: list[tuple[UpdateCurve, int]], batch: int
) -> None:
    portions = shares(kinds, batch)
    assert sum(p.count * p.samples for p in portions) == batch
    assert sum(p.count for p in portions) == sum(count for _, count in kinds)
    assert all(p.samples >= 0 for p in portions)
    slowest = max(kinds[p.kind][0].seconds(p.samples) for p in portions)
    last = [p for p in portions if kinds[p.kind][0].seconds(p.samples) == slowest]
    if len(last) == 1 and last[0].count == 1:
        for other in portions:
            if other is not last[0]:
                grown = kinds[other.kind][0].seconds(other.samples + 1)
                assert grown >= slowest * (1 - 1e-6)


def test_shares_follow_speed() -> None:
    fast = update_curve([(128, 1.0)])
    sizes = {p.kind: p.samples for p in shares([(fast, 1), (fast.slower(4), 1)], 100)}
    assert sizes == {0: 80, 1: 20}
    sizes = {p.kind: p.samples for p in shares([(fast, 1), (fast.slower(21), 1)], 128)}
    assert sizes == {0: 123, 1: 5} or sizes == {0: 122, 1: 6}


def test_four_thousand_equal_nodes_are_one_kind() -> None:
    portions = shares([(update_curve([(64, 0.5), (128, 0.9)]), 4096)], 8192 + 100)
    assert sorted((p.count, p.samples) for p in portions) == [(100, 3), (3996, 2)]


def test_the_expected_maximum_grows_slowly() -> None:
    values = [expected_maximum(n) for n in (1, 2, 16, 4096)]
    assert values == sorted(values)
    assert values[0] == 0
    assert values[1] == pytest.approx(0.589, abs=0.01)  # exactly 1/sqrt(pi) = 0.564
    assert 3.5 < values[3] < 3.7


def test_levels_of_a_host() -> None:
    noisy = host(spread=0.2)
    assert host_curve(noisy, "low").seconds(128) == pytest.approx(0.09)
    assert host_curve(noisy, "high").seconds(128) == pytest.approx(0.11)
    assert deviation(noisy) == pytest.approx(0.2 / 1.349)
    assert deviation(host()) == 0


def test_machines_survive_json() -> None:
    found = Machines(hosts=(host(spread=0.1),))
    assert decode(Machines, encode(found)) == found
    with pytest.raises(ConfigError, match="must lie between"):
        Measured(median=2.0, low=3.0, high=4.0)
    with pytest.raises(ConfigError, match="has: a"):
        found.host("b")
    assert figure(0.0).spread == 0
