"""Batches read ahead: in order, each once, errors where they belong, no thread left."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from paceline.data.base import Source
from paceline.data.feed import Feed, evaluation_batches
from paceline.data.sampler import GlobalSampler


class Numbers(Source):
    """Sample i is the number i; remembers what was asked of it."""

    def __init__(self, count: int, *, concurrent: bool = True, broken_after: int = 10**9) -> None:
        self.sample_shape = (1,)
        self.concurrent = concurrent
        self.calls: list[tuple[list[int], int, bool]] = []
        self.threads: set[str] = set()
        self._count, self._broken_after = count, broken_after

    def __len__(self) -> int:
        return self._count

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.calls) >= self._broken_after:
            raise OSError("the disk is gone")
        self.calls.append((indices.tolist(), epoch, augment))
        self.threads.add(threading.current_thread().name)
        values = torch.from_numpy(np.asarray(indices))
        return values.float().unsqueeze(1), values


def make_feed(source: Source, *, worker: int = 0, shares: tuple[float, ...] = (1.0,)) -> Feed:
    sampler = GlobalSampler(samples=len(source), batch_size=8, seed=1)
    return Feed(source=source, sampler=sampler, shares=shares, worker=worker)


@pytest.mark.parametrize("concurrent", [True, False])
def test_batches_come_in_order_with_their_totals(concurrent: bool) -> None:
    source = Numbers(30, concurrent=concurrent)
    feed = make_feed(source)
    batches = list(feed.epoch(2))
    assert [b.total for b in batches] == [8, 8, 8, 6]
    assert [b.count for b in batches] == [8, 8, 8, 6]
    order = [int(i) for b in batches for i in b.targets]
    assert order == feed.sampler.order(2).tolist()
    assert all(epoch == 2 and augment for _, epoch, augment in source.calls)
    assert source.threads == ({"paceline-feed"} if concurrent else {"MainThread"})


def test_workers_with_unequal_shares_see_every_sample_once() -> None:
    seen: list[int] = []
    for worker in range(3):
        feed = make_feed(Numbers(50), worker=worker, shares=(20.0, 1.0, 0.0))
        batches = list(feed.epoch(0))
        assert [b.total for b in batches] == [8] * 6 + [2]
        assert worker < 2 or all(b.count == 0 for b in batches)
        seen += [int(i) for b in batches for i in b.targets]
    assert sorted(seen) == list(range(50))


def test_goes_on_in_the_middle_of_an_epoch_and_reads_nothing_before_it() -> None:
    source = Numbers(64)
    whole = [b.targets.tolist() for b in make_feed(Numbers(64)).epoch(1)]
    assert [b.targets.tolist() for b in make_feed(source).epoch(1, 5)] == whole[5:]
    assert len(source.calls) == 3


def test_stays_only_a_little_ahead() -> None:
    source = Numbers(8 * 40)
    batches = make_feed(source).epoch(0)
    next(batches)
    time.sleep(0.3)
    # One handed over, two ready, one in the thread's hand.
    assert len(source.calls) <= 4
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("concurrent", [True, False])
def test_an_error_comes_after_the_batches_before_it(concurrent: bool) -> None:
    batches = make_feed(Numbers(40, concurrent=concurrent, broken_after=2)).epoch(0)
    assert next(batches).count == 8
    assert next(batches).count == 8
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_leaving_early_ends_the_reading_thread() -> None:
    for batch in make_feed(Numbers(800)).epoch(0):
        assert batch.count == 8
        break
    # The leak check fails this test if a paceline-feed thread is left.


def test_reading_does_not_change_the_threads_of_the_model() -> None:
    before = torch.get_num_threads()
    list(make_feed(Numbers(30)).epoch(0))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_evaluation_covers_every_sample_once_in_order_unaugmented(workers: int) -> None:
    seen: list[int] = []
    for worker in range(workers):
        source = Numbers(31)
        batches = evaluation_batches(source, batch_size=4, worker=worker, shares=[1.0] * workers)
        seen += [int(i) for b in batches for i in b.targets]
        assert not any(augment for _, _, augment in source.calls)
    assert seen == list(range(31))


def test_evaluation_with_fewer_samples_than_workers() -> None:
    assert list(evaluation_batches(Numbers(2), batch_size=4, worker=5, shares=[1.0] * 6)) == []
