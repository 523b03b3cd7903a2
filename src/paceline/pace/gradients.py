"""Gradients of all ranks added up, so that each has that of the whole batch.

A rank's loss l is the mean over its part, which weighs w of the whole W. Every rank takes the
gradient of l w / W, and the sum over ranks is what one process computes of the whole batch. What
`.grad` held before is added to afterwards, as `backward` does: several losses, and batches that are
accumulated, come out as in one process, and clipping sees the whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parameter import is_lazy

from paceline.errors import UnsupportedError, UserError
from paceline.local.batch_norm import BatchNormMode, batch_norms, use_plain_synchronised
from paceline.pace.compressed import Compressed
from paceline.pace.overlap import Departure, Rhythm, strided
from paceline.pace.ranks import Ranks


class Gradients:
    """The parameters of everything that is trained, and the backward pass over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.named: dict[str, torch.Tensor] = {}
        """Every parameter once."""
        self._known: set[int] = set()
        self._inside = False
        self._before: dict[int, torch.Tensor | None] = {}
        self._rhythm = Rhythm()
        self._departure: Departure | None = None
        self.compressed: Compressed | None = None
        """Where gradients are made smaller between hosts."""

    def add(self, name: str, parameter: torch.Tensor) -> bool:
        """One more parameter, if it is not there already."""
        if id(parameter) in self._known:
            return False
        self._known.add(id(parameter))
        self.named[name] = parameter
        if self._ranks.size > 1 and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._watch)  # type: ignore[no-untyped-call]
        return True

    def forget(self) -> None:
        """Expect nothing: ranks have come who do not know what the passes before have reached."""
        self._rhythm = Rhythm()

    def _watch(self, parameter: torch.Tensor) -> None:
        if not self._inside:
            raise UserError(
                "loss.backward() gives each rank the gradient of its own part alone: call"
                " pace.backward(loss)"
            )
        if self._departure is not None:
            self._departure.arrived(parameter)

    def backward(self, loss: torch.Tensor, factor: float, **options: Any) -> None:
        """The backward pass of this rank's part; gradients are not added up yet."""
        trained = self._trained()
        self._before = {number: each.grad for number, each in trained.items()}
        for each in trained.values():
            each.grad = None
        self._departure = self._depart(trained, counts=factor != 0.0)
        self._inside = True
        try:
            (loss if factor == 1.0 else loss * factor).backward(**options)  # type: ignore[no-untyped-call]
        except BaseException:
            for number, each in trained.items():
                each.grad = self._before[number]
            raise
        finally:
            self._inside = False
        if factor == 0.0:  # 0 x NaN is not 0, and nothing of this part counts
            for each in trained.values():
                if each.grad is not None:
                    each.grad.zero_()

    def _depart(self, trained: Mapping[int, torch.Tensor], *, counts: bool) -> Departure | None:
        """What is expected to leave during the pass; nothing between ranks of one machine."""
        if not self._ranks.has_background:
            return None
        expected = [trained[number] for number in self._rhythm.expected if number in trained]
        if not expected:
            return None
        return Departure(expected, self._begin, counts=counts)

    def _begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Any:
        """A bucket leaves for the other ranks."""
        if self.compressed is not None and self.compressed.is_open:
            return self.compressed.begin(flat, parameters)
        return self._ranks.begin_adding_up(flat)

    @torch.no_grad()
    def add_up(self) -> None:
        """The sum over ranks of what `backward` left, into every parameter's gradient."""
        trained = self._trained()
        departure, self._departure = self._departure, None
        gone = departure.finish() if departure is not None else set()
        # Which parameters the loss depends on may differ by the data: whoever has one, all add it.
        here = [float(each.grad is not None) for each in trained.values()]
        left = [float(id(each) in gone) for each in trained.values()]
        sums = self._ranks.sum(here + left if departure is not None else here)
        here, left = sums[: len(trained)], sums[len(trained) :]
        self._add_up([each for each, count in zip(trained.values(), here, strict=True) if count])
        if departure is not None:
            needed = {id(each) for each, count in zip(trained.values(), left, strict=True) if count}
            for each, total in departure.sums():
                if id(each) in needed:
                    each.grad = total if each.grad is None else each.grad.add_(total)
                elif self.compressed is not None:
                    self.compressed.give_back(each, total)
        self._rhythm.note(tuple(n for n, each in trained.items() if each.grad is not None))
        for number, each in trained.items():
            before = self._before[number]
            if before is not None:
                each.grad = before if each.grad is None else before.add_(each.grad)

    def _add_up(self, parameters: Sequence[torch.Tensor]) -> None:
        """Their gradients over all ranks; one bucket is filled while another travels."""
        for each in parameters:
            each.grad = strided(torch.zeros_like(each) if each.grad is None else each.grad)
        if len(self._ranks.members) == 1:
            return
        departure = Departure(parameters, self._begin, counts=True)
        departure.finish()
        for each, total in departure.sums():
            each.grad = total

    def _trained(self) -> dict[int, torch.Tensor]:
        """Parameters by number."""
        named = enumerate(self.named.values())
        return {number: each for number, each in named if each.requires_grad}


class _Statistics:
    """What BatchNorm asks for: sums over all ranks, asked for in the same order by each."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def add(self, asked: int, values: torch.Tensor) -> torch.Tensor:
        return self._ranks.add_up(values.clone())


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Let every BatchNorm of a model normalise by the whole batch, not by this rank's part."""
    if ranks.size == 1:
        return
    use_plain_synchronised(model)
    for layer in batch_norms(model):
        forward = getattr(layer.forward, "__func__", None)
        if forward not in (_BatchNorm.forward, SyncBatchNorm.forward):
            raise UnsupportedError(
                f"{type(layer).__name__} is a BatchNorm with a forward of its own, which would see"
                " parts of a batch: use another, or Pace(exact=False) to have it so"
            )
        answering = BatchNormMode(_Statistics(ranks), layer)  # type: ignore[arg-type]
        layer.register_forward_pre_hook(lambda *_, mode=answering: mode.__enter__() and None)
        layer.register_forward_hook(
            lambda *_, mode=answering: mode.__exit__(None, None, None), always_call=True
        )


def check_trainable(model: nn.Module) -> None:
    """Refuse what has no weights yet."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"{name} has no shape before a first batch: call the model once before pace.prepare"
            )
