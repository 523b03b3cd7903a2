"""What a loop's body does with each batch: whether ranks that stand by may come back to it.

A rank that has stood by has not seen some batches. That changes nothing where every batch is
treated as the one before it, and where nothing of one batch is needed for the next but what was
handed to `pace.prepare`, which the rank is given when it comes back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.pace.carrying import Carrying

SAMPLED = 8
"""Numbers of every gradient by which ranks see that theirs are the same."""
SAME = 1e-3
"""By how much of themselves these may differ between machines that round differently."""


class Bodies:
    """Watches one loop body after the other."""

    def __init__(self, carrying: Carrying) -> None:
        self._carrying = carrying
        self._reason = ""
        self._events: list[str] = []
        self._usual: dict[int, list[str]] = {}
        self._loader = 0
        self._digest = hashlib.sha256()
        self._size = 0.0
        self._stale: set[int] = set()
        """Parameters whose gradients are still those of the batch before."""
        self.is_open = False
        """A batch is being worked on."""

    @property
    def reason(self) -> str:
        """Why a rank must not miss a batch of this loop, once that has been seen."""
        return self._reason or self._carrying.reason

    @property
    def has_trained(self) -> bool:
        """Whether gradients were taken in the loop over this loader."""
        return "backward" in self._usual.get(self._loader, ())

    @property
    def is_known(self) -> bool:
        """Whether a body of the loop over this loader has ended."""
        return self._loader in self._usual

    def use(self, loader: int) -> None:
        """A loop over a loader begins."""
        self._loader = loader
        trained = {key for key, events in self._usual.items() if "backward" in events}
        if len(trained) > 1 and not self._reason:
            self._reason = "several loaders are trained on in turn"

    def note(self, event: str) -> None:
        """Something that every rank does in the same order."""
        if self.is_open:
            self._events.append(event)

    def takes_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward pass begins, which adds to the gradients of these."""
        if not self.is_open:
            return
        if "backward" not in self._events:
            self._stale = {id(each) for each in parameters}
        for each in parameters:
            gradient = each.grad
            if id(each) in self._stale and (gradient is None or not gradient.any()):
                self._stale.discard(id(each))
        self._events.append("backward")

    def updates(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if not self.is_open:
            return
        self._events.append(f"step {number}")
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if isinstance(v, int | float)}
            self._digest.update(json.dumps(plain, sort_keys=True).encode())
            for parameter in group["params"]:
                if id(parameter) in self._stale and parameter.grad is not None:
                    self._reason = "gradients are carried from batch to batch"
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    flat = parameter.grad.detach().reshape(-1)
                    some = flat[:: max(1, flat.numel() // SAMPLED)]
                    self._size += float(some.abs().double().sum())

    def begin_leg(self) -> None:
        self._digest, self._size = hashlib.sha256(), 0.0

    def begin(self) -> None:
        """A batch is handed out."""
        self._events = []
        self._stale.clear()
        self.is_open = True

    def end(self) -> None:
        """The body is done with its batch."""
        if not self.is_open:
            return
        self.is_open = False
        self._digest.update("|".join(self._events).encode())
        usual = self._usual.setdefault(self._loader, self._events)
        if self._events != usual and not self._reason:
            self._reason = "the loop does not treat every batch in the same way"

    def forget(self) -> None:
        """The loop has ended, or was left in the middle of a body."""
        self.is_open = False

    def report(self) -> list[Any]:
        """What ranks of a leg compare."""
        return [self._digest.hexdigest()[:16], self._size]


def differing(reports: Sequence[Sequence[Any]]) -> int | None:
    """The first rank of a leg that did otherwise than the first of all."""
    digest, size = reports[0]
    for place, (other, other_size) in enumerate(reports):
        close = abs(other_size - size) <= SAME * max(abs(size), abs(other_size), 1e-30)
        nan = other_size != other_size and size != size
        if other != digest or not (close or nan):
            return place
    return None
