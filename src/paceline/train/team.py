"""What the loop asks of the other ranks; with one rank, nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.local.board import Board
from paceline.schema import RankContext


class Team:
    """All ranks of a run, seen from one of them."""

    def __init__(self, context: RankContext, board: Board | None) -> None:
        self.context = context
        self.board = board
        self._stop = False

    @property
    def is_first(self) -> bool:
        return self.context.is_first

    def enter(self, phase: str, update: int) -> None:
        """Say where this rank is."""
        if self.board is not None:
            self.board.enter(phase, update)

    def sum(self, values: Sequence[float], name: str) -> list[float]:
        """Element by element over all ranks."""
        if self.board is None:
            return list(values)
        return self.board.sum(values, name)

    def barrier(self, name: str) -> None:
        """Wait for all ranks."""
        if self.board is not None:
            self.board.barrier(name)

    def request_stop(self) -> None:
        """Called from a signal handler: stop soon, all at the same update."""
        self._stop = True
        if self.board is not None:
            self.board.request_stop()

    def should_stop(self, updates_done: int) -> bool:
        """True when all ranks stop after this update."""
        if self.board is not None:
            return self.board.should_stop(updates_done)
        return self._stop
