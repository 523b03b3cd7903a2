"""Losses that look across the samples of a batch, as far as their graph shows it.

A rank computes the loss on its part of the batch. Where what one sample adds depends on others
(contrastive losses, mining, a dice over the batch, the balance of experts), parts add up to other
gradients than one process has, in silence. A loss that is a sum over samples falls apart above the
last layers: its second derivative by the rows of two samples is zero. Where it is not, the loss is
refused. Choices and bends, whose second derivative is zero everywhere (the hardest sample, a
hinge), are asked instead which samples they choose from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.pace.counted import near
from paceline.pace.factors import Factor, differ, factors_of
from paceline.pace.heads import (
    Derivatives,
    Edge,
    Head,
    Layers,
    UnknownHeadError,
    one_at,
    sample_dims,
    shape_of,
    stem,
)

KINDS = 64
"""Losses that are told apart by the operations at their end; more count as one."""
DRAWS = 3
"""How often what looks like a second derivative must show itself."""
ROUNDING = 8
"""Those below so many times the last digit, relative to all of them, are none."""
ALIKE = 0.01
"""Both halves see the same by each other: where they differ by more, it is rounding."""
FAINT = 1e-3
"""A choice that counts for less than this, beside the largest derivative, is rounding."""
BENT = 4
"""Choices and bends that are looked at, the loss's own first."""
PICKED = 4
"""Numbers of each of which it is seen what they were made of."""
CHOICES = ("Max", "Min", "Amax", "Amin", "Topk", "Sort", "Kthvalue", "Median", "Nanmedian")
BENDS = ("Relu", "Abs", "Threshold", "ClampMin", "ClampMax", "Clamp", "LeakyRelu", "Hardtanh",
         "Maximum", "Minimum")  # fmt: skip
DISTANCES = ("Cdist", "Pdist")
"""torch has no second derivative of these."""


class Across:
    """Looks at the first, second, fourth, eighth ... pass of every kind of loss."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights`: of everything that is trained."""
        self._weights = weights
        self._passes: dict[tuple[str, ...], int] = {}
        self._all = 0
        self.rows = 0
        """Samples of this rank's part where no loader is at work."""

    def refuse(self, loss: torch.Tensor, sizes: Collection[tuple[float, float]]) -> None:
        """Refuse a loss that looks across samples. `sizes`: of this rank's parts of the batches
        that are worked on, and of the whole ones."""
        rows, whole = self._part(sizes)
        if rows > 1 and self._is_due(loss) and self._look(looks_across, loss, rows):
            self._refuse(rows, whole)

    def refuse_factors(
        self,
        loss: torch.Tensor,
        sizes: Collection[tuple[float, float]],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """Refuse a mean over samples that is multiplied with what a rank's part alone has given.

        Every rank calls it, and is asked for its factors in the same passes.
        """
        self._all += 1
        if self._all & (self._all - 1):
            return
        rows, whole = self._part(sizes)
        mine = self._look(fixed_factors, loss, rows) if rows > 1 else None
        if differ(gather(mine or [])):
            self._refuse(rows, whole)

    def _part(self, sizes: Collection[tuple[float, float]]) -> tuple[int, float]:
        """Samples of this rank and of the batch; none where batches of several sizes are open."""
        (rows, whole), *others = set(sizes) or {(self.rows, 0)}
        return (0, 0) if others else (int(rows), whole)

    def _look(self, look: Callable[..., Any], loss: torch.Tensor, rows: int) -> Any:
        generator = torch.Generator().manual_seed(sum(self._passes.values()))
        weights = {id(each) for each in self._weights.values()}
        try:
            return look(loss, rows, weights, generator)
        except Exception:  # whatever the graph has that nobody thought of: training comes first
            return None

    def _refuse(self, rows: int, whole: float) -> None:
        of = f" of {whole:g}" if whole else ""
        raise ConfigError(
            "pace.backward(loss): what one sample adds to the loss depends on other samples of the"
            f" batch, of which this rank has {rows}{of}, so that parts of it would not add up:"
            " start one rank, take a loss that is a sum over samples, or let it see each rank's"
            " part alone by Pace(exact=False)"
        )

    def _is_due(self, loss: torch.Tensor) -> bool:
        kind = tuple(node.name() for node in near(loss))
        if kind not in self._passes and len(self._passes) >= KINDS:
            kind = ()
        count = self._passes[kind] = self._passes.get(kind, 0) + 1
        return count & (count - 1) == 0


def looks_across(
    loss: torch.Tensor, rows: int, weights: Collection[int], generator: torch.Generator
) -> bool:
    """Whether the loss of a part of so many samples is no sum over them; False where that cannot
    be told. `weights`: by id, those by which layers are known."""
    if loss.grad_fn is None or loss.numel() != 1:
        return False
    root, layers = (loss.grad_fn, loss.output_nr), Layers(rows, weights)
    arrived: dict[Any, Any] = {}
    try:
        head = Head(root[0], layers.gives_samples)
        is_exact = bool(head.reached)
        if not is_exact:
            head = Head(root[0], layers.gives_multiples)
        with torch.enable_grad():
            first = head.flow({root: torch.ones_like(loss)}, arrived)
        if not first or not all(bool(each.isfinite().all()) for each in first.values()):
            return False
        if not is_exact:
            return _depends_on_all(head, first, rows)
        by = [_Samples(head, first, rows, generator, which) for which in (0, 1)]
        asked = [node for node in arrived if stem(node) in CHOICES + BENDS + DISTANCES][:BENT]
        return all(
            each.is_curved() or any(each.is_joined(node, arrived[node]) for node in asked)
            for each in (by if by[0].is_ambiguous else by[:1])
        )
    except UnknownHeadError:
        return False


def fixed_factors(
    loss: torch.Tensor, rows: int, weights: Collection[int], generator: torch.Generator
) -> list[Factor]:
    """What means over samples are multiplied with in a loss."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    root = (loss.grad_fn, loss.output_nr)
    head = Head(root[0], Layers(rows, weights).gives_samples)
    with torch.no_grad():
        first = head.flow({root: torch.ones_like(loss)})
    samples = _Samples(head, first, rows, generator, 0)
    return factors_of(head, samples.is_of_several)


class _Samples:
    """The derivatives by what layers gave, in rows that belong to samples."""

    def __init__(
        self, head: Head, first: Derivatives, rows: int, generator: torch.Generator, which: int
    ) -> None:
        """`which`: where two dimensions could be that of the samples."""
        self._head, self._rows, self._generator = head, rows, generator
        found = {edge: sample_dims(value.shape, rows) for edge, value in first.items()}
        self.is_ambiguous = any(len(each) > 1 for each in found.values())
        self._dims = {edge: each[-which] for edge, each in found.items() if each}
        self._first = {edge: first[edge] for edge in self._dims}

    def is_curved(self) -> bool:
        """Whether the second derivative by samples of two halves is other than zero."""
        order = torch.randperm(self._rows, generator=self._generator, device="cpu")
        half = torch.zeros(self._rows, dtype=torch.bool, device="cpu")
        half[order[: self._rows // 2]] = True
        return bool(self._first) and all(self._is_coupled(half) for _ in range(DRAWS))

    def _is_coupled(self, half: torch.Tensor) -> bool:
        digit = _digit(self._first)
        random = {edge: _random(each, self._generator) for edge, each in self._first.items()}
        answers: list[tuple[complex, float]] = []
        for inside in (half, ~half):
            with torch.enable_grad():
                total = torch.stack([
                    (each * random[edge] * self._mask(edge, inside)).sum()
                    for edge, each in self._first.items()
                ]).sum()  # fmt: skip
            second = {k: v for k, v in self._head.again(total).items() if k in random}
            beyond = {edge: each * self._mask(edge, ~inside) for edge, each in second.items()}
            size = _size(beyond)
            if not size > ROUNDING * digit * _size(second):
                return False
            seen = sum(complex((each * random[edge]).sum()) for edge, each in beyond.items())
            answers.append((seen, size))
        (one, size), (other, other_size) = answers
        return abs(one - other) <= max(ALIKE, ROUNDING * digit) * (size + other_size)

    def _mask(self, edge: Edge, samples: torch.Tensor) -> torch.Tensor:
        shape = [1] * self._first[edge].dim()
        shape[self._dims[edge]] = self._rows
        return samples.to(self._first[edge].device).view(shape)

    def is_joined(self, node: Any, given: torch.Tensor) -> bool:
        """Whether an operation chooses among samples, or bends what is of several of them."""
        largest = max(float(each.detach().abs().max()) for each in self._first.values())
        given = given.detach()
        if not float(given.abs().max()) > FAINT * largest:
            return False
        if stem(node) in DISTANCES:
            return self.is_of_several((node, 0), given != 0)
        edge = node.next_functions[0]
        if stem(node) in CHOICES:
            return self._is_choice(edge, _chosen_dims(node, len(shape_of(edge))))
        with torch.no_grad():
            slopes = node(torch.ones_like(given))
        slopes = slopes[0] if isinstance(slopes, tuple) else slopes
        if slopes is None or slopes.shape != shape_of(edge):
            return False
        bent = slopes != slopes.flatten()[0]
        return self.is_of_several(edge, bent) and self.is_of_several(edge, ~bent)

    def is_of_several(self, edge: Edge, where: torch.Tensor) -> bool:
        """Whether a number of a result, from where it is true, was made of several samples."""
        places = where.nonzero()
        picked = (
            places[self._below(len(places))].tolist() for _ in range(min(PICKED, len(places)))
        )
        return any(len(self._touched(edge, place)) > 1 for place in picked)

    def _is_choice(self, edge: Edge, dims: list[int]) -> bool:
        shape = shape_of(edge)
        dims = [dim for dim in dims if shape[dim] > 1]
        for _ in range(2 if dims else 0):
            place = [self._below(size) for size in shape]
            other = list(place)
            for dim in dims:
                other[dim] = (place[dim] + 1 + self._below(shape[dim] - 1)) % shape[dim]
            one, another = self._touched(edge, place), self._touched(edge, other)
            if one and another and one != another:
                return True
        return False

    def _touched(self, edge: Edge, place: list[int]) -> set[int]:
        """The samples of which one number of a result was made."""
        found: set[int] = set()
        for end, value in self._head.of({edge: one_at(edge, place)}).items():
            if end in self._dims:
                rows = value.movedim(self._dims[end], 0).reshape(self._rows, -1)
                found |= set((rows != 0).any(dim=1).nonzero().flatten().tolist())
        return found

    def _below(self, size: int) -> int:
        return int(torch.randint(size, (), generator=self._generator, device="cpu"))


def _depends_on_all(head: Head, first: Derivatives, rows: int) -> bool:
    """Of several rows for each sample, nobody knows whose: whether one depends on all others.

    Those of one sample may well depend on each other.
    """
    for edge, each in first.items():
        if not each.dim() or len(each) == rows or len(each) % rows:
            continue
        with torch.enable_grad():
            total = (each[0] * _random(each[0], torch.Generator().manual_seed(0))).sum()
        second = head.again(total).get(edge)
        if second is not None:
            sizes = second.abs().reshape(len(second), -1).amax(dim=1)
            if bool((sizes > ROUNDING * _digit(first) * sizes.max()).all()):
                return True
    return False


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, device="cpu").to(like)


def _chosen_dims(node: Any, count: int) -> list[int]:
    """Along which dimensions an operation chooses: all, where it names none."""
    found = getattr(node, "_saved_dim", ())
    every = found if isinstance(found, tuple) else (found,)
    dims = [int(dim) - 2**64 if dim >= 2**63 else int(dim) for dim in every]
    return [dim % count for dim in dims] or list(range(count))


def _size(values: Derivatives) -> float:
    return math.hypot(*(float(each.double().norm()) for each in values.values()))


def _digit(values: Derivatives) -> float:
    return max(torch.finfo(each.dtype).eps for each in values.values())
