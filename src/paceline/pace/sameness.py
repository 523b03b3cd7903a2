"""Whether ranks still train the same model.

What a loop changes by more than the gradients that `pace.backward` adds up would lead ranks apart
in silence: a codebook or running statistics that a model keeps of each rank's part of a batch,
noise that an optimizer draws.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.errors import UserError
from paceline.pace.prepared import Prepared
from paceline.pace.ranks import Ranks

SAMPLED = 16
"""Numbers of every tensor that are compared, besides its norm."""
CLOSE = 1e-4
"""By how much of a tensor's usual number these may differ: machines round differently."""


class Sameness:
    """Looks at the first passes, and at the end of every epoch."""

    def __init__(self, ranks: Ranks, prepared: Prepared) -> None:
        self._ranks, self._prepared = ranks, prepared
        self.checks_buffers = True
        """Not where ranks keep statistics of their own, or state of their own columns."""
        self._passes = 0

    def before_pass(self) -> None:
        """A backward pass is about to begin; every rank calls it."""
        self._passes += 1
        if self._passes == 1:
            self._refuse_other_buffers()
        elif self._passes == 2:
            self.check()

    def check(self) -> None:
        """Refuse to go on where ranks are apart; every rank calls it."""
        self._refuse_other_buffers()
        if name := differing(self._ranks, list(self._weights())):
            raise UserError(
                f"the ranks have come to different weights of {name}: the optimizer or the loop"
                " moves them by something else than the gradients of pace.backward, such as random"
                " numbers that each rank draws for itself; draw them from a torch.Generator with"
                " the same seed on every rank"
            )

    def _refuse_other_buffers(self) -> None:
        if not self.checks_buffers:
            return
        if name := differing(self._ranks, list(self._buffers())):
            raise UserError(
                f"the model changes {name} by each rank's part of the batch, which is not what one"
                " process makes of the whole: add up what it takes from the batch by"
                " torch.distributed.all_reduce, train it by paceline.train, or use"
                " Pace(exact=False) to keep the first rank's"
            )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        trained = self._trained()
        for name, parameter in self._prepared.gradients.named.items():
            if id(parameter) in trained:
                yield name, parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are saved, of models that are trained: the average of another's weights may
        be the first rank's affair."""
        trained = self._trained()
        for model in self._prepared.models:
            if any(id(each) in trained for each in model.parameters()):
                yield from _saved_buffers(model)

    def _trained(self) -> set[int]:
        optimizers = self._prepared.optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        if groups:
            return {id(each) for group in groups for each in group["params"]}
        named = self._prepared.gradients.named.values()
        return {id(each) for each in named if each.requires_grad}


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for before, layer in model.named_modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if name not in layer._non_persistent_buffers_set:
                yield f"{before}.{name}" if before else name, buffer


@torch.no_grad()
def differing(ranks: Ranks, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The first tensor that some rank has otherwise than the first one; empty where none is."""
    if not named or len(ranks.members) == 1:
        return ""
    shapes = json.dumps([[name, list(tensor.shape)] for name, tensor in named])
    digests = ranks.gather(hashlib.sha256(shapes.encode()).hexdigest())
    if any(other != digests[0] for other in digests):
        every = [json.loads(text) for text in ranks.gather(shapes)]
        found = (str(each[0]) for other in every for each in every[0] if each not in other)
        return next(found, "a tensor")
    mine = torch.stack([_marks(tensor) for _, tensor in named])
    first = mine.clone()
    ranks.spread([first])
    room = CLOSE * torch.maximum(first.abs(), first[:, :1].abs())
    whole = torch.tensor([not (t.is_floating_point() or t.is_complex()) for _, t in named])
    room[whole] = 0.0
    alike = ((mine - first).abs() <= room) | (mine.isnan() & first.isnan()) | (mine == first)
    apart = ranks.add_up((~alike).any(dim=1).double())
    return next((name for (name, _), count in zip(named, apart.tolist(), strict=True) if count), "")


def _marks(tensor: torch.Tensor) -> torch.Tensor:
    """Its root mean square and some of its numbers."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().double()
    found = torch.zeros(1 + SAMPLED, dtype=torch.float64)
    if flat.numel():
        size = torch.linalg.vector_norm(flat if flat.is_floating_point() else flat.double())
        found[0] = float(size) / flat.numel() ** 0.5
    found[1 : 1 + len(some)] = some
    return found
