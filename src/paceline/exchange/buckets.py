"""Gradients gathered into buckets that leave while the backward pass still runs.

The buckets are filled from the last parameter to the first, as the backward
pass fills them, and always leave in the same order, so that every node starts
the same operations in the same order. A large gradient is a bucket by itself
and is not copied. A parameter without a gradient on this node (it took no part,
or the node has no samples) counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline.cost.overlap import FIRST_BUCKET
from paceline.local.shared import divided, memory_view


class Waitable(Protocol):
    """An operation that can be waited for."""

    def wait(self) -> None: ...


class Bucket:
    """Some weights whose gradients travel together."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights
        self.missing = len(weights)
        self.pending: Waitable | None = None
        self.flat: torch.Tensor | None = None
        self._room = (
            torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype)
            if len(weights) > 1
            else None
        )

    def pack(self) -> torch.Tensor:
        """The gradients as one vector."""
        if self._room is None:
            weight = self.weights[0]
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            return memory_view(weight.grad, weight)
        for weight, place in divided(self._room, self.weights):
            if weight.grad is None:
                place.zero_()
            else:
                place.copy_(memory_view(weight.grad, weight))
        return self._room

    def unpack(self) -> None:
        """The summed vector back into the gradients."""
        assert self.flat is not None
        for weight, part in divided(self.flat, self.weights):
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
            view = memory_view(weight.grad, weight)
            if view.data_ptr() != part.data_ptr():
                if view.data_ptr() == weight.grad.data_ptr():
                    view.copy_(part)
                else:  # the gradient lies in another order than the weight
                    ordered = torch.empty_like(weight)
                    memory_view(ordered, weight).copy_(part)
                    weight.grad = ordered
        self.release()

    def release(self) -> None:
        """Be ready for the next update."""
        self.flat, self.pending, self.missing = None, None, len(self.weights)


class Buckets:
    """All weights of a model, divided into buckets."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        start: Callable[[torch.Tensor, int], Waitable],
        *,
        capacity: int,
        overlap: bool = True,
        returns: bool = True,
    ) -> None:
        """`returns`: what `start` leaves in the vectors goes back into the gradients."""
        self._start, self._returns = start, returns
        self._buckets = [Bucket(members) for members in divide(weights, capacity)]
        self._next = 0
        self._hooks: list[Any] = []
        if overlap:
            for bucket in self._buckets:
                for weight in bucket.weights:
                    parameter: Any = weight
                    hook = parameter.register_post_accumulate_grad_hook(
                        lambda _, bucket=bucket: self._arrived(bucket)
                    )
                    self._hooks.append(hook)

    def close(self) -> None:
        """Let go of the weights: Python does not see a circle that leads through a hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        """The weights of every bucket, in the order in which buckets leave."""
        return [bucket.weights for bucket in self._buckets]

    def _arrived(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        bucket = self._buckets[self._next]
        bucket.flat = bucket.pack()
        bucket.pending = self._start(bucket.flat, self._next)
        self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left yet, wait for all, and put the sums into the gradients."""
        while self._next < len(self._buckets):
            self._leave()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            if self._returns:
                bucket.unpack()
            else:
                bucket.release()
        self._next = 0


def bounds(weights: Sequence[torch.Tensor], capacity: int) -> list[tuple[int, int]]:
    """Where every bucket lies among all weights laid end to end, in the order in which they leave.

    >>> bounds([torch.empty(2), torch.empty(8), torch.empty(6)], 40)
    [(10, 16), (0, 10)]
    """
    end = sum(weight.numel() for weight in weights)
    found = []
    for group in divide(weights, capacity):
        start = end - sum(weight.numel() for weight in group)
        found.append((start, end))
        end = start
    return found


def divide(weights: Sequence[torch.Tensor], capacity: int) -> list[list[torch.Tensor]]:
    """Weights from the last to the first, in groups of at most `capacity` bytes and one type.

    The first group is closed as soon as it has FIRST_BUCKET bytes: the network need not stand idle
    until the backward pass has filled a whole bucket, which for a small model is when it ends.
    """
    groups: list[list[torch.Tensor]] = []
    room = 0
    for weight in reversed(list(weights)):
        size = weight.nbytes
        fits = groups and size <= room and groups[-1][0].dtype == weight.dtype
        if fits:
            groups[-1].append(weight)
            room -= size
        else:
            groups.append([weight])
            room = capacity - size
        if len(groups) == 1 and sum(each.nbytes for each in groups[0]) >= FIRST_BUCKET:
            room = 0
    return groups
