"""Gradients that leave for the other ranks while the backward pass still runs.

Which parameters a pass will reach is not known before it ends. What is expected follows from what
all ranks have agreed on after the passes before (`Rhythm`), so that it is the same on every rank;
what a pass reaches beyond that is added up after it, as everything is without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.errors import UnsupportedError
from paceline.exchange.buckets import divide
from paceline.local.shared import divided

CAPACITY = 16 * 2**20
"""Bytes of gradients that travel together."""
MOST_CHANGES = 256
"""Changes that a rhythm remembers: loops that have so many have none."""

Reached = tuple[int, ...]
"""Which parameters a backward pass reaches on any rank, by number."""


class Rhythm:
    """Which parameters the next backward pass is expected to reach.

    A loop repeats itself: a GAN's passes reach one network several times in a row and then the
    other. So what comes next is what came when the same was reached as many times in a row before.

    >>> rhythm = Rhythm()
    >>> for reached in [(0, 1), (0, 1), (2,), (0, 1), (0, 1)]:
    ...     rhythm.note(reached)
    >>> rhythm.expected
    (2,)
    """

    def __init__(self) -> None:
        self._last: Reached | None = None
        self._times = 0
        self._after: dict[tuple[Reached, int], Reached] = {}

    @property
    def expected(self) -> Reached:
        """Nothing before the first pass."""
        if self._last is None:
            return ()
        return self._after.get((self._last, self._times), self._last)

    def note(self, reached: Reached) -> None:
        """What a pass has reached."""
        if self._last is not None:
            place = (self._last, self._times)
            if reached == self._last:
                self._after.pop(place, None)
            else:
                if len(self._after) >= MOST_CHANGES:
                    self._after.clear()
                self._after[place] = reached
        self._times = self._times + 1 if reached == self._last else 1
        self._last = reached


class _Bucket:
    """Gradients that leave together, when the last of them is there."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.missing = {id(each) for each in parameters}
        self.had: set[int] = set()
        """Parameters that had a gradient here when the bucket left."""
        self.flat = torch.empty(0)
        self.work: Any = None

    def pack(self) -> torch.Tensor:
        """The gradients as one vector; they are taken, so that one that comes late stands alone."""
        first = self.parameters[0]
        gradient = first.grad
        if len(self.parameters) == 1 and gradient is not None and gradient.is_contiguous():
            first.grad = None
            self.had.add(id(first))
            self.flat = gradient.view(-1)
            return self.flat
        size = sum(each.numel() for each in self.parameters)
        self.flat = torch.empty(size, dtype=first.dtype, device=first.device)
        for each, place in self.places():
            if each.grad is None:
                place.zero_()
                continue
            place.copy_(strided(each.grad))
            self.had.add(id(each))
            each.grad = None
        return self.flat

    def places(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every parameter, and where its gradient lies in the vector."""
        for each, part in divided(self.flat, self.parameters):
            yield each, part.view(each.shape)


class Departure:
    """The gradients of one backward pass, on their way while it runs."""

    def __init__(
        self,
        expected: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor, Sequence[torch.Tensor]], Any],
        *,
        counts: bool,
    ) -> None:
        """`start`: begins to add the vector of some parameters up over all ranks. `counts`:
        whether this rank's part counts; of one that does not, zeros are sent (0 x NaN is not 0)."""
        self._start, self._counts = start, counts
        self._buckets = [_Bucket(members) for members in divide(expected, CAPACITY)]
        self._of = {id(each): bucket for bucket in self._buckets for each in bucket.parameters}
        self._next = 0

    def arrived(self, parameter: torch.Tensor) -> None:
        """A gradient is there: buckets that are whole leave, in the same order on every rank."""
        bucket = self._of.get(id(parameter))
        if bucket is None:
            return
        bucket.missing.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        bucket = self._buckets[self._next]
        flat = bucket.pack()
        if not self._counts:
            flat.zero_()
        bucket.work = self._start(flat, bucket.parameters)
        self._next += 1

    def finish(self) -> set[int]:
        """The pass has ended: all leave. Parameters (by id) that had a gradient here."""
        while self._next < len(self._buckets):
            self._leave()
        return {each for bucket in self._buckets for each in bucket.had}

    def sums(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every expected parameter with the sum over all ranks of its gradient."""
        for bucket in self._buckets:
            bucket.work.wait()
            for each, total in bucket.places():
                yield each, total if each.is_contiguous() else torch.empty_like(each).copy_(total)


def strided(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself; one that is sparse is refused."""
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"a gradient has the layout {gradient.layout}, which ranks cannot add up: use"
            " sparse=False"
        )
    return gradient
