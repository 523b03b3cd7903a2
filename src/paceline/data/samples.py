"""Samples that are computed together: what a step is called with, and how it is divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UnsupportedError


@dataclass(frozen=True)
class Samples:
    """A batch, or a part of one, of any structure."""

    values: Any
    """What a step gets; None of no samples."""
    count: int
    parts: tuple[Samples, ...] = ()
    """The same samples in parts, where whoever read them was asked for parts."""

    def divided(self, sizes: Sequence[int]) -> list[Samples]:
        """The same samples in parts of these sizes."""
        if [part.count for part in self.parts] == list(sizes):
            return list(self.parts)
        if list(sizes) == [self.count]:
            return [self]
        raise ValueError(f"{self.count} samples were not read in parts of {list(sizes)}")

    @property
    def inputs(self) -> torch.Tensor:
        """The one input of a model, where samples are pairs."""
        return self._pair()[0]

    @property
    def targets(self) -> torch.Tensor:
        """What the loss compares with, where samples are pairs."""
        return self._pair()[1]

    def _pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.values
        if isinstance(values, tuple | list) and len(values) == 2:
            first, second = values
            if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
                return first, second
        raise UnsupportedError(
            "the data gives no pairs (input, target), which only a step takes: give workload.step,"
            " or a dataset of pairs"
        )


class Stacked(Samples):
    """Tensors whose first dimension is the samples."""

    def __init__(self, *tensors: torch.Tensor, count: int | None = None) -> None:
        # As a DataLoader gives them: in a list.
        super().__init__(list(tensors), len(tensors[-1]) if count is None else count)

    def divided(self, sizes: Sequence[int]) -> list[Samples]:
        ends = list(itertools.accumulate(sizes, initial=0))
        return [
            Stacked(*(tensor[start:end] for tensor in self.values), count=end - start)
            for start, end in itertools.pairwise(ends)
        ]
