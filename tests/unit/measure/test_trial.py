"""How a trial is timed, on several ranks at once."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from paceline.local.base import LocalStrategy
from paceline.local.board import Board, anonymous_memory
from paceline.measure import trial
from paceline.measure.trial import TrialGround
from paceline.train.parts import Parts


class Paced:
    """A strategy whose updates take as long as they are told to."""

    def __init__(self, seconds: Callable[[int], float], pages: Sequence[int] = ()) -> None:
        self.seconds, self.pages = seconds, pages
        self.updates = 0

    def scale_rate(self, _: float) -> None: ...

    def update(self, *_: Any) -> None:
        time.sleep(self.seconds(self.updates))
        pages = self.pages[self.updates] if self.pages else 0
        with mmap.mmap(-1, max(1, pages) * mmap.PAGESIZE) as memory:
            for number in range(pages):
                memory[number * mmap.PAGESIZE] = 1
        self.updates += 1


def timed(
    ranks: int,
    seconds: Callable[[int, int], float] = lambda rank, update: 0.0,
    give_up: float | None = None,
    pages: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Updates made and updates timed on every rank."""
    memory = anonymous_memory("board")

    def one(rank: int) -> tuple[int, int]:
        board = Board(memory, ranks=ranks, rank=rank, deadline=10.0)
        ground = TrialGround(
            parts=cast(Parts, None),
            inputs=torch.zeros(4, 1),
            targets=torch.zeros(4),
            clip_norm=None,
            seed=0,
            device=torch.device("cpu"),
            board=board,
        )
        strategy = Paced(lambda update: seconds(rank, update), pages if rank == 0 else ())
        found = ground._time(
            cast(LocalStrategy, strategy), ground.inputs, ground.targets, 2, 5, give_up
        )
        return strategy.updates, len(found)

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))
    finally:
        os.close(memory)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_agree_on_who_is_far_behind(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks see a long update and some do not: all make the same number of them."""
    monkeypatch.setattr(trial, "LONG_STEP", 0.02)
    for long in (0, ranks - 1):

        def seconds(rank: int, update: int, long: int = long) -> float:
            return 0.05 if rank == long else 0.0

        found = timed(ranks, seconds, give_up=0.03)
        # The first rank decides: so long a first update shows already that it is far behind.
        assert found == [(2, 1) if long == 0 else (7, 5)] * ranks


def test_long_updates_are_warmed_up_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update still takes memory from the system: it must not be timed."""
    monkeypatch.setattr(trial, "LONG_STEP", 0.01)
    monkeypatch.setattr(trial, "LONG_TURN", 0.05)
    slow_start = [0.05, 0.04, 0.02, 0.02, 0.02, 0.02, 0.02]
    assert timed(1, lambda _, update: slow_start[update], give_up=0.04) == [(5, 3)]


def test_a_slow_start_alone_does_not_put_anyone_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LONG_STEP", 0.01)
    slow_start = [0.05, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]
    assert timed(1, lambda _, update: slow_start[update], give_up=0.04) == [(7, 5)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("pages", "made"),
    [
        ([9000, 8000, 0, 0, 0, 0, 0], 7),
        ([9000, 8000, 4000, 2000, 0, 0, 0, 0, 0], 9),
        ([9000, 8000, 0, 5000, 0, 0, 0, 0], 8),
        ([500, 400, 400, 400, 400, 400, 400], 7),
        ([5000] * 11, 11),
    ],
    ids=["two", "four", "one in between", "few pages", "always"],
)
def test_updates_that_take_memory_are_not_timed(ranks: int, pages: list[int], made: int) -> None:
    """On whatever rank; and one that takes it anew every time is timed after a while."""
    assert timed(ranks, pages=pages) == [(made, 5)] * ranks
