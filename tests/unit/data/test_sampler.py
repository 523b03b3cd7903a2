"""The global shuffle: every sample once, in any division, from any position."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampler import GlobalSampler, apportion
from paceline.errors import ConfigError

SHARE = st.one_of(st.just(0.0), st.floats(0.01, 20.0), st.integers(1, 20).map(float))
SHARES = st.lists(SHARE, min_size=1, max_size=9).filter(lambda shares: sum(shares) > 0)


@given(count=st.integers(0, 5000), shares=SHARES)
def test_apportion_is_whole_and_in_proportion(count: int, shares: list[float]) -> None:
    parts = apportion(count, shares)
    assert sum(parts) == count
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - count * share / math.fsum(shares)) < 1 + 1e-6
        assert part >= 0
        assert share > 0 or part == 0


@given(count=st.integers(0, 60), shares=SHARES, least=st.integers(1, 4))
def test_no_part_is_smaller_than_the_least(count: int, shares: list[float], least: int) -> None:
    parts = apportion(count, shares, least)
    assert sum(parts) == count
    assert all(share > 0 or part == 0 for part, share in zip(parts, shares, strict=True))
    if count >= least:
        assert all(part == 0 or part >= least for part in parts)
    else:
        assert sorted(parts)[:-1] == [0] * (len(parts) - 1), "what is too small stays in one piece"
    plain = apportion(count, shares)
    if all(part == 0 or part >= least for part in plain):
        assert parts == plain, "nothing is changed without need"


@given(count=st.integers(0, 5000), workers=st.integers(1, 12))
def test_equal_shares_differ_by_at_most_one_the_first_getting_more(
    count: int, workers: int
) -> None:
    parts = apportion(count, [1.0] * workers)
    assert parts == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] <= 1


@pytest.mark.parametrize(
    ("count", "shares", "parts"),
    [
        (10, [2, 1], [7, 3]),
        (128, [20, 1], [122, 6]),
        (3, [0, 1, 0], [0, 3, 0]),
        (1, [1, 1, 1], [1, 0, 0]),
        (21, [20, 1], [20, 1]),
        (0, [1, 2], [0, 0]),
        # A third of three is one, whatever the rounding of 1/3 says.
        (3, [1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        (100, [0.1, 0.2, 0.7], [10, 20, 70]),
    ],
)
def test_apportion_table(count: int, shares: list[float], parts: list[int]) -> None:
    assert apportion(count, shares) == parts


@pytest.mark.parametrize("shares", [[], [0, 0], [-1, 2], [math.nan], [math.inf, 1]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        apportion(10, shares)


@settings(deadline=None)
@given(
    samples=st.integers(1, 400),
    batch_size=st.integers(1, 450),
    seed=st.integers(0, 2**63 - 1),
    shares=SHARES,
    epoch=st.integers(0, 5),
)
def test_parts_are_disjoint_and_complete(
    samples: int, batch_size: int, seed: int, shares: list[float], epoch: int
) -> None:
    sampler = GlobalSampler(samples=samples, batch_size=batch_size, seed=seed)
    seen: list[int] = []
    for step in range(sampler.steps_per_epoch):
        batch = sampler.batch(epoch, step)
        parts = [sampler.part(epoch, step, shares, worker) for worker in range(len(shares))]
        # In order, end to end: the parts of a batch are the batch.
        assert np.concatenate(parts).tolist() == batch.tolist()
        last = step == sampler.steps_per_epoch - 1
        assert len(batch) == (samples - step * sampler.batch_size if last else sampler.batch_size)
        assert 0 < len(batch) <= batch_size
        seen += batch.tolist()
    assert sorted(seen) == list(range(samples))


@given(samples=st.integers(2, 300), batch_size=st.integers(1, 64), data=st.data())
def test_a_fresh_sampler_goes_on_from_any_position(
    samples: int, batch_size: int, data: st.DataObject
) -> None:
    first = GlobalSampler(samples=samples, batch_size=batch_size, seed=3)
    epoch = data.draw(st.integers(0, 4))
    step = data.draw(st.integers(0, first.steps_per_epoch - 1))
    for earlier in range(epoch + 1):
        first.order(earlier)
    second = GlobalSampler(samples=samples, batch_size=batch_size, seed=3)
    assert second.batch(epoch, step).tolist() == first.batch(epoch, step).tolist()


def test_epochs_and_seeds_differ() -> None:
    one = GlobalSampler(samples=100, batch_size=10, seed=0)
    orders = {tuple(one.order(epoch).tolist()) for epoch in range(5)}
    orders.add(tuple(GlobalSampler(samples=100, batch_size=10, seed=1).order(0).tolist()))
    assert len(orders) == 6


def test_order_is_the_same_on_every_machine_and_version() -> None:
    # A run that is continued elsewhere must go on in the same order.
    order = GlobalSampler(samples=8, batch_size=4, seed=7).order(2).tolist()
    assert order == np.random.default_rng([7, 2]).permutation(8).tolist()


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples"):
        GlobalSampler(samples=0, batch_size=4, seed=0)
