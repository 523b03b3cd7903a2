"""How a trial is timed, on several ranks at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds
        self.updates = 0

    def scale_rate(self, _: float) -> None: ...

    def update(self, *_: Any) -> None:
        time.sleep(self.seconds(self.updates))
        self.updates += 1


def timed(ranks: int, seconds: Callable[[int, int], float]) -> list[tuple[int, int]]:
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
        strategy = Paced(lambda update: seconds(rank, update))
        found = ground._time(
            cast(LocalStrategy, strategy), ground.inputs, ground.targets, 2, 5, None
        )
        return strategy.updates, len(found)

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))
    finally:
        os.close(memory)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_agree_on_what_is_a_long_update(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks see a long update and some do not: all make the same number of them."""
    monkeypatch.setattr(trial, "LONG_STEP", 0.02)
    for long in (0, ranks - 1):

        def seconds(rank: int, update: int, long: int = long) -> float:
            return 0.03 if rank == long and update < 2 else 0.0

        found = timed(ranks, seconds)
        # The first rank decides: a long first update is warm-up enough.
        assert found == [(6, 5) if long == 0 else (7, 5)] * ranks
