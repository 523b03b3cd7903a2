"""Factors of a loss that were made of a rank's part of the batch, outside of the loss's graph.

The balance of experts multiplies the mean chance of each expert by how many samples chose it: a
count, of which no derivative is taken. What is multiplied with a mean over samples must be the same
on every rank: a mean of each rank's part with a factor of this part is not that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.pace.heads import Edge, Head, shape_of, stem

PRODUCTS = ("Mul", "Div", "Dot", "Mv", "Mm", "Bmm")
MOST = 8
"""Factors that are compared, the loss's own first."""
SAMPLED = 8
"""Numbers of each, besides its norm."""
CLOSE = 1e-4
"""By how much of its norm a number may differ: machines round differently."""

Factor = list[float]


@torch.no_grad()
def factors_of(head: Head, is_of_several: Callable[[Edge, torch.Tensor], bool]) -> list[Factor]:
    """Of means over samples, what they are multiplied with. A single number is none: it may be the
    weight of a loss that a schedule gives. `is_of_several`: whether numbers of a result were made
    of several samples."""
    found: list[Factor] = []
    for node in head.order:
        if len(found) == MOST or stem(node) not in PRODUCTS:
            continue
        given = [edge for edge in node.next_functions if edge[0] in head]
        fixed = [
            each for each in _saved(node) if each.numel() > 1 and (each != each.flatten()[0]).any()
        ]
        if len(given) == len(fixed) == 1:
            everywhere = torch.ones(shape_of(given[0]), dtype=torch.bool)
            if everywhere.numel() and is_of_several(given[0], everywhere):
                found.append(_marks(fixed[0]))
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Tensors that an operation was given and that have no derivative."""
    for name in ("self", "other", "tensor", "vec", "mat2"):
        found = getattr(node, f"_saved_{name}", None)
        if isinstance(found, torch.Tensor) and not found.requires_grad:
            yield found


def _marks(factor: torch.Tensor) -> Factor:
    flat = factor.double().flatten()
    some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
    return [float(flat.numel()), float(flat.norm()), *some.tolist()]


def differ(ranks: Sequence[Sequence[Factor]]) -> bool:
    """Whether a factor is not the same on all ranks. Where they have others, nothing is said.

    >>> differ([[[2.0, 5.0, 3.0, 4.0]], [[2.0, 5.0, 3.0, 4.0]]])
    False
    >>> differ([[[2.0, 5.0, 3.0, 4.0]], [[2.0, 5.0, 4.0, 3.0]]])
    True
    """
    first = ranks[0]
    alike = [each for each in ranks[1:] if [f[0] for f in each] == [f[0] for f in first]]
    return any(
        abs(one - other) > CLOSE * max(mine[1], theirs[1])
        for each in alike
        for mine, theirs in zip(first, each, strict=True)
        for one, other in zip(mine[1:], theirs[1:], strict=True)
    )
