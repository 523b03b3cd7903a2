"""Whether numbers may touch weights: one that is not finite makes all that it is added to useless.

A gradient may be NaN while the loss is not. In one process that ends the training at the next
update; where gradients are added up it would also hide whose it was.
"""

from __future__ import annotations

import math

import torch

DIVERGED = (
    "its training has diverged (lower optimizer.learning_rate, raise optimizer.warmup, or set"
    " optimizer.clip_norm), or its memory or processor is faulty"
)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite.

    One pass that only reads: a sum is finite where all elements are, or has overflowed.
    """
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def bad_of(values: torch.Tensor) -> str:
    """How many elements are not finite, in words.

    >>> bad_of(torch.tensor([1.0, float("nan")]))
    '1 of 2'
    """
    return f"{int((~torch.isfinite(values)).sum())} of {values.numel()}"
