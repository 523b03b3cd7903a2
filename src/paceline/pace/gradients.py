"""Gradients of all ranks added up, so that each has that of the whole batch.

A rank's loss l is the mean over its part, which weighs w of the whole W. Every rank takes the
gradient of l w / W, and the sum over ranks is what one process computes of the whole batch. What
`.grad` held before is added to afterwards, as `backward` does: several losses, and batches that are
accumulated, come out as in one process, and clipping sees the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parameter import is_lazy

from paceline.errors import UnsupportedError, UserError
from paceline.local.batch_norm import BatchNormMode, batch_norms, use_plain_synchronised
from paceline.pace.ranks import Ranks

BUCKET = 4 * 2**20
"""Numbers of a gradient that travel together: 16 MB of fp32."""


class Gradients:
    """The parameters of everything that is trained, and the backward pass over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._named: dict[str, torch.Tensor] = {}
        self._known: set[int] = set()
        self._inside = False
        self._before: list[torch.Tensor | None] = []

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every parameter once, by name."""
        return self._named

    def add(self, name: str, parameter: torch.Tensor) -> bool:
        """One more parameter, if it is not there already."""
        if id(parameter) in self._known:
            return False
        self._known.add(id(parameter))
        self._named[name] = parameter
        if self._ranks.size > 1 and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._watch)  # type: ignore[no-untyped-call]
        return True

    def _watch(self, parameter: torch.Tensor) -> None:
        if not self._inside:
            raise UserError(
                "loss.backward() gives each rank the gradient of its own part alone: call"
                " pace.backward(loss)"
            )

    def backward(self, loss: torch.Tensor, factor: float, **options: Any) -> None:
        """The backward pass of this rank's part; gradients are not added up yet."""
        trained = self._trained()
        self._before = [each.grad for each in trained]
        for each in trained:
            each.grad = None
        self._inside = True
        try:
            (loss if factor == 1.0 else loss * factor).backward(**options)  # type: ignore[no-untyped-call]
        except BaseException:
            for each, gradient in zip(trained, self._before, strict=True):
                each.grad = gradient
            raise
        finally:
            self._inside = False
        if factor == 0.0:  # 0 x NaN is not 0, and nothing of this part counts
            for each in trained:
                if each.grad is not None:
                    each.grad.zero_()

    @torch.no_grad()
    def add_up(self) -> None:
        """The sum over ranks of what `backward` left, into every parameter's gradient."""
        trained = self._trained()
        # Which parameters the loss depends on may differ by the data: whoever has one, all add it.
        needed = self._ranks.sum(float(each.grad is not None) for each in trained)
        parts: list[torch.Tensor] = []
        for each, count in zip(trained, needed, strict=True):
            if not count:
                continue
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            if each.grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"a gradient has the layout {each.grad.layout}, which ranks cannot add up: use"
                    " sparse=False"
                )
            parts.append(each.grad)
        if len(self._ranks.members) > 1:
            _add_up(parts, self._ranks)
        for each, before in zip(trained, self._before, strict=True):
            if before is not None:
                each.grad = before if each.grad is None else before.add_(each.grad)

    def _trained(self) -> list[torch.Tensor]:
        return [each for each in self._named.values() if each.requires_grad]


def _add_up(gradients: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Over all ranks, in buckets of which one is filled while another travels."""
    sent: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
    bucket: list[torch.Tensor] = []

    def send() -> None:
        flat = torch.cat([each.reshape(-1) for each in bucket])
        sent.append((list(bucket), flat, ranks.begin_adding_up(flat)))
        bucket.clear()

    for each in gradients:
        other = bucket and bucket[0].dtype is not each.dtype
        if bucket and (other or sum(e.numel() for e in bucket) + each.numel() > BUCKET):
            send()
        bucket.append(each)
    if bucket:
        send()
    for members, flat, work in sent:
        work.wait()
        at = 0
        for each in members:
            each.copy_(flat[at : at + each.numel()].view(each.shape))
            at += each.numel()


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
