"""Sums over all parts of a global batch, in the middle of a forward or backward pass.

Every part of a batch asks for the same sums in the same order; the answer is the same everywhere.

    round   every part of the node shows what it asks for, and its numbers
            all wait; who asks for something else than the others is refused
            (several nodes: the leader passes the node's sum on, and shows the answer; all wait)

A part without samples does not compute: it stays in `join` and adds nothing to whatever is asked
for, until the others say that they have finished.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.errors import StrategyError, WorkerError

if TYPE_CHECKING:
    from paceline.local.board import Arena, Board

NOTHING, BEGIN, END, REST, FIRST = range(5)
"""What a part may ask for: nothing of its own; whether all have samples; the end of the update;
what parts without samples have missed; and from FIRST on, the sums of layers."""
_HEAD = 2
"""Numbers before those that are added up: what is asked for, and how many there are."""


class NodeSums(Protocol):
    """Goes on to add up over nodes what a node has added up."""

    def begin(self, *, empty: bool) -> None:
        """Before every update: whether this node has no samples in it."""

    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        """What all nodes ask for, and its sum; `values` is None where a node has nothing to add."""


class PartSums(ABC):
    """One part's way to sums over all parts."""

    def __init__(self, nodes: NodeSums | None) -> None:
        self._nodes = nodes

    @contextlib.contextmanager
    def update(self, statistics: Callable[[], torch.Tensor]) -> Iterator[None]:
        """An update to which this part has samples.

        `statistics`: what parts without samples take over from this one at the end.
        """
        someone_missed_it = self._begin(empty=False)
        yield
        if someone_missed_it:
            own = statistics()
            self.round(REST, torch.cat([own.new_ones(1), own]))
        self.round(END, torch.zeros(0, dtype=torch.float64))

    def add(self, asked: int, values: torch.Tensor) -> torch.Tensor:
        """A vector (float64) added up over all parts, in the same order everywhere."""
        return self.round(asked, values)[1]

    def join(self) -> torch.Tensor:
        """The same update for a part without samples; gives the `statistics` of the others."""
        self._begin(empty=True)
        found = torch.zeros(0, dtype=torch.float64)
        asked = NOTHING
        while asked != END:
            asked, total = self.round(NOTHING, None)
            if asked == REST:
                # All have the same: the mean is exact, and nobody need know who comes first.
                found = total[1:] / total[0]
        return found

    def _begin(self, *, empty: bool) -> bool:
        count = self.round(BEGIN, torch.tensor([float(empty), 1.0], dtype=torch.float64))[1]
        return bool(count[0] > 0)

    @abstractmethod
    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        """What all parts ask for, and its sum; every part calls it equally often."""

    def _combine(
        self, parts: Sequence[tuple[int, torch.Tensor | None]], names: Sequence[str]
    ) -> tuple[int, torch.Tensor | None]:
        """The node's own sum; (NOTHING, None) where none of its parts asks for anything."""
        asking = [(number, each) for number, each in enumerate(parts) if each[0] != NOTHING]
        if not asking:
            return NOTHING, None
        asked = asking[0][1][0]
        for number, (other, _) in asking:
            if other != asked:
                raise StrategyError(other_order(names[asking[0][0]], names[number]))
        total = torch.stack([values for _, (_, values) in asking if values is not None]).sum(dim=0)
        return asked, total

    def _over_nodes(self, asked: int, total: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        """The same over all nodes, on a node's leader."""
        if self._nodes is None:
            assert total is not None
            return asked, total
        if asked == BEGIN and total is not None:
            self._nodes.begin(empty=bool(total[0] == total[1]))
        return self._nodes.round(asked, total)


def other_order(one: str, other: str) -> str:
    """What is said where parts of a batch take other ways through a model."""
    return (
        f"{one} and {other} do not call the model's BatchNorm layers in the same order, so that"
        " their statistics of the whole batch cannot be added up: use local.strategy = 'threads' on"
        ' one machine, or allow those of each part with numerics.allow = ["local_batch_norm"]'
    )


class NodesOnly(PartSums):
    """One part per node: nothing is to be added up inside of it."""

    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        return self._over_nodes(asked, values)


class RankSums(PartSums):
    """The ranks of a node, through shared memory.

    A rank writes into one of two rows in turns: who is at the next round has read all of this one,
    so that one wait for the others is enough.
    """

    def __init__(
        self,
        board: Board,
        arena: Arena,
        group: Sequence[int],
        *,
        capacity: int,
        nodes: NodeSums | None,
        several_nodes: bool,
    ) -> None:
        """`group`: the ranks whose parts are added up; `capacity`: of the longest vector."""
        super().__init__(nodes)
        self._board, self._group, self._several = board, list(group), several_nodes
        self._capacity, self._turn = capacity, 0
        rows, width = board.ranks + 1, _HEAD + capacity
        memory = arena.allocate(2 * rows * width * 8)
        every = torch.frombuffer(memory, dtype=torch.float64, count=2 * rows * width)
        self._rows = every.view(2, rows, width)
        self._names = [f"rank {rank}" for rank in self._group]
        board.begin_parts()

    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        self._turn = 1 - self._turn
        rows = self._rows[self._turn]
        self._write(rows[self._board.rank], asked, values)
        self._board.wait_for_parts(self._group)
        parts = [self._read(rows[rank]) for rank in self._group]
        found, total = self._combine(parts, self._names)
        if not self._several:
            assert total is not None
            return found, total
        answer = rows[self._board.ranks]
        if self._board.rank == 0:
            found, total = self._over_nodes(found, total)
            self._write(answer, found, total)
        self._board.wait_for_parts(self._group)
        found, total = self._read(answer)
        assert total is not None
        return found, total.clone()

    def _write(self, row: torch.Tensor, asked: int, values: torch.Tensor | None) -> None:
        count = 0 if values is None else len(values)
        if count > self._capacity:
            raise ValueError(f"{count} numbers do not fit into {self._capacity}")
        row[0], row[1] = asked, count
        if values is not None:
            row[_HEAD : _HEAD + count] = values

    def _read(self, row: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        asked, count = row[:_HEAD].tolist()
        if int(asked) == NOTHING:
            return NOTHING, None
        return int(asked), row[_HEAD : _HEAD + int(count)]


class ThreadSums(PartSums):
    """The threads of one process, each with a replica of the model."""

    def __init__(self, parts: int, *, deadline: float, nodes: NodeSums | None) -> None:
        super().__init__(nodes)
        self._asked: list[tuple[int, torch.Tensor | None]] = [(NOTHING, None)] * parts
        self._answer: tuple[int, torch.Tensor] | BaseException | None = None
        self._deadline = deadline
        self._own = threading.local()
        self._barrier = threading.Barrier(parts, action=self._agree)
        self._names = [f"replica {number}" for number in range(parts)]

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        """This thread is part `number` from now on; where it fails, nobody waits for it."""
        self._own.number = number
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise

    def start(self) -> None:
        """Be ready for an update, whatever became of the one before."""
        self._barrier.reset()

    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        self._asked[self._own.number] = (asked, values)
        try:
            self._barrier.wait(self._deadline)
        except threading.BrokenBarrierError:
            raise LeftAloneError("another replica failed, or hangs") from None
        # The next answer is made when all have come again, this thread too.
        if isinstance(self._answer, BaseException):
            raise self._answer
        assert self._answer is not None
        return self._answer

    def _agree(self) -> None:
        """What one of the threads does while the others wait."""
        try:
            self._answer = self._over_nodes(*self._combine(self._asked, self._names))
        except BaseException as error:
            self._answer = error


class LeftAloneError(WorkerError):
    """A replica gives up because another has failed, whose error is the one to tell."""


def shared_capacity(layers: Sequence[Any]) -> int:
    """Room for the longest vector that some BatchNorm layers ask for."""
    widest: int = max((layer.num_features for layer in layers), default=1)
    rest: int = sum(2 * layer.num_features + 1 for layer in layers)
    return max(1 + 2 * widest, 1 + rest)
