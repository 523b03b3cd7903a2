"""Losses that look across the samples of a batch, as far as their graph shows it.

A rank computes the loss on its part of the batch. Where what one sample adds depends on others
(contrastive losses, mining, a dice over the batch, the balance of experts), parts add up to other
gradients than one process has, in silence. Between the loss and what the last layers gave, z, a
batch of a loss that is a sum over samples falls apart: its second derivative by the rows of two
samples is zero. Where it is not, the loss is refused. Choices and bends, whose second derivative is
zero (the hardest sample, a hinge), are asked instead which samples they choose from.

The operations of the graph are called one by one, and not by torch's backward pass: so it ends at
z, no hook of anybody's runs, and no gradient of a weight is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from paceline.errors import ConfigError
from paceline.pace.counted import near

MOST = 4096
"""Operations between a loss and the layers; a loss of more is not judged."""
KINDS = 64
"""Losses that are told apart by the operations at their end; more count as one."""
BENT = 4
"""Choices and bends that are looked at, the loss's own first."""
ROUNDING = 8
"""Second derivatives below so many times the last digit, relative to all of them, are none."""
ALIKE = 0.01
"""How far the two halves' answers may differ that must be the same unless they are rounding."""

VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze",
         "Squeeze", "ToCopy", "Alias", "Clone")  # fmt: skip
PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "Convolution",
            "MkldnnConvolution", "SlowConv2D", "SlowConv3D", "NativeLayerNorm", "NativeBatchNorm",
            "NativeGroupNorm", "FusedRmsNorm", "MkldnnRnnLayer", "Prelu", "PreluKernel")  # fmt: skip
LOOKUPS = ("Embedding", "EmbeddingBag", "IndexSelect")
SHIFTS = ("Add", "Sub", "Mul", "Div")
"""Layers where they have a vector of weights."""
CHOICES = ("Max", "Min", "Amax", "Amin", "Topk", "Sort", "Kthvalue", "Median", "Nanmedian")
BENDS = ("Relu", "Abs", "Threshold", "ClampMin", "ClampMax", "Clamp", "LeakyRelu", "Hardtanh",
         "Maximum", "Minimum")  # fmt: skip

Edge = tuple[Any, int]
"""An operation, and the number of one of its results."""
Ends = Callable[[Any], bool]


class Across:
    """Looks at the first, second, fourth, eighth ... pass of every kind of loss."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights`: of everything that is trained."""
        self._weights = weights
        self._passes: dict[tuple[str, ...], int] = {}
        self.rows = 0
        """Samples of this rank's part where no loader is at work."""

    def refuse(self, loss: torch.Tensor, sizes: Collection[tuple[float, float]]) -> None:
        """Refuse a loss that looks across samples. `sizes`: of the parts of the batches that are
        worked on, and of these batches."""
        rows, whole = next(iter(sizes)) if len(sizes) == 1 else (0 if sizes else self.rows, 0)
        if rows < 2 or not self._is_due(loss):
            return
        generator = torch.Generator().manual_seed(len(self._passes))
        weights = {id(each) for each in self._weights.values()}
        try:
            crosses = looks_across(loss, int(rows), weights, generator)
        except Exception:  # an operation without second derivative, say: the loss is not judged
            return
        if crosses:
            of = f" of {whole:g}" if whole else ""
            raise ConfigError(
                "pace.backward(loss): what a sample adds to the loss depends on other samples of"
                f" the batch, of which this rank has {rows:g}{of}, so that parts of it would not"
                " add up: use one rank, or a loss that is a sum over samples;"
                " Pace(exact=False) takes it of each rank's part"
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
    """Whether this loss of a part of so many samples is no sum over them; False where that cannot
    be told. `weights`: by id, what the layers are known by."""
    if loss.grad_fn is None or loss.numel() != 1 or rows < 2:
        return False
    layers = _Layers(rows, weights)
    for ends in (layers.gives_samples, layers.gives_multiples):
        head = _Head(loss.grad_fn, ends)
        if head.reached:
            break
    else:
        return False
    with torch.enable_grad():
        first, arrived = head.flow({(loss.grad_fn, loss.output_nr): torch.ones_like(loss)})
    if not all(bool(each.isfinite().all()) for each in first.values()):
        return False
    if ends == layers.gives_multiples:
        return _couples_all(first, rows, head)
    dims = [_Rows(rows, first, last, generator) for last in (False, True)]
    if not dims[0].is_ambiguous:
        del dims[1]
    return all(
        each.curved(head) or any(each.chosen(node, given, head) for node, given in arrived)
        for each in dims
    )


class _Layers:
    """What layers of a model gave, seen in the graph."""

    def __init__(self, rows: int, weights: Collection[int]) -> None:
        self._rows, self._weights = rows, weights

    def gives_samples(self, node: Any) -> bool:
        return any(_dims(each.shape, self._rows) for each in node._input_metadata) and (
            isinstance(node, BackwardCFunction) or self._is_layer(node)
        )

    def gives_multiples(self, node: Any) -> bool:
        """Several rows for each sample, in whatever order."""
        shapes = [each.shape for each in node._input_metadata]
        several = any(s and s[0] > self._rows and s[0] % self._rows == 0 for s in shapes)
        return several and (isinstance(node, BackwardCFunction) or self._is_layer(node))

    def _is_layer(self, node: Any) -> bool:
        while _stem(node) in VIEWS and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        stem, shape = _stem(node), node._input_metadata[0].shape
        found = [self._weight(each) for each, _ in node.next_functions]
        used = [each for each in found if each is not None and each.numel() > 1]
        if stem in LOOKUPS:
            return bool(used)
        if stem in SHIFTS:  # more dimensions, or a weight made of weights
            is_vector = all(each.dim() == 1 < len(shape) for each in used)
            return bool(used) and is_vector and None in found
        return stem in PRODUCTS and bool(used) and None in found

    def _weight(self, node: Any) -> torch.Tensor | None:
        while node is not None and _stem(node) in VIEWS:
            node = node.next_functions[0][0]
        found = getattr(node, "variable", None)
        return found if id(found) in self._weights else None


class _Head:
    """The operations between a loss and where it `ends`, in the order of a backward pass."""

    def __init__(self, root: Any, ends: Ends) -> None:
        self._ends = ends
        self._leads: dict[Any, bool] = {}
        self.reached: list[Any] = []
        order, waiting = [], [(root, False)]
        while waiting:
            node, is_done = waiting.pop()
            following = [each for each, _ in node.next_functions if each is not None]
            if is_done:
                self._leads[node] = any(self._leads[each] for each in following)
                if self._leads[node]:
                    order.append(node)
            elif node not in self._leads:
                if len(self._leads) >= MOST:
                    raise ValueError("too many operations")
                self._leads[node] = node is not root and ends(node)
                if self._leads[node]:
                    self.reached.append(node)
                else:
                    waiting += [(node, True), *((each, False) for each in following)]
        self.order = order[::-1]
        if any(isinstance(node, BackwardCFunction) for node in order):
            raise ValueError("an operation of the user's own, which may do anything when it is run")

    def flow(
        self, seeds: Mapping[Edge, torch.Tensor]
    ) -> tuple[dict[Edge, torch.Tensor], list[tuple[Any, Any]]]:
        """Gradients where the head ends, and what came to choices and bends on the way."""
        held, arrived = dict(seeds), []
        for node in self.order:
            given = [held.pop((node, each), None) for each in range(len(node._input_metadata))]
            if all(each is None for each in given):
                continue
            if _stem(node) in CHOICES + BENDS:
                arrived.append((node, given[0]))
            found = node(*given)
            found = found if isinstance(found, tuple) else (found,)
            for edge, value in zip(node.next_functions, found, strict=True):
                if value is not None and self._leads.get(edge[0]):
                    value = _fitted(value, edge)
                    held[edge] = held[edge] + value if edge in held else value
        return held, arrived

    def again(self, total: torch.Tensor) -> dict[Edge, torch.Tensor]:
        """Of a sum over first derivatives: the second ones, where the head ends."""
        if total.grad_fn is None:
            return {}
        known = set(self.reached)
        head = _Head(total.grad_fn, lambda node: node in known)
        with torch.no_grad():
            return head.flow({(total.grad_fn, 0): torch.ones_like(total)})[0]

    def of(self, seeds: Mapping[Edge, torch.Tensor]) -> dict[Edge, torch.Tensor]:
        """What a result inside of the head was made of."""
        (root, _), known = next(iter(seeds)), set(self.reached)
        if root in known:
            return dict(seeds)
        with torch.no_grad():
            return _Head(root, lambda node: node in known).flow(seeds)[0]


class _Rows:
    """The derivatives by z, in rows that belong to samples."""

    def __init__(
        self, rows: int, first: dict[Edge, torch.Tensor], last: bool, generator: torch.Generator
    ) -> None:
        """`last`: where the first and the second dimension could be the samples', the second."""
        self._rows, self._generator = rows, generator
        found = {edge: _dims(value.shape, rows) for edge, value in first.items()}
        self.is_ambiguous = any(len(each) > 1 for each in found.values())
        self._dims = {edge: each[-1 if last else 0] for edge, each in found.items() if each}
        self._first = {edge: first[edge] for edge in self._dims}
        order = torch.randperm(rows, generator=generator)
        self._half = torch.zeros(rows, dtype=torch.bool)
        self._half[order[: rows // 2]] = True

    def _over(self, edge: Edge, samples: torch.Tensor) -> torch.Tensor:
        """These samples, in the shape of a derivative."""
        value = self._first[edge]
        shape = [1] * value.dim()
        shape[self._dims[edge]] = self._rows
        return samples.to(value.device).view(shape)

    def curved(self, head: _Head) -> bool:
        """Whether the second derivative by samples of both halves is other than zero."""
        random = {
            edge: torch.randn(each.shape, generator=self._generator).to(each)
            for edge, each in self._first.items()
        }
        answers = []
        for half in (self._half, ~self._half):
            sides = {edge: each * self._over(edge, half) for edge, each in random.items()}
            with torch.enable_grad():
                total = sum((each * sides[edge]).sum() for edge, each in self._first.items())
            second = {k: v for k, v in head.again(total).items() if k in random}  # type: ignore[arg-type]
            beyond = {edge: each * self._over(edge, ~half) for edge, each in second.items()}
            apart = _size(beyond)
            if not apart or not apart > ROUNDING * _digit(self._first) * _size(second):
                return False
            with torch.no_grad():
                product = sum(float((each * random[edge]).sum()) for edge, each in beyond.items())
            answers.append((product, apart))
        # The second derivative is symmetric: what is left of rounding is not.
        (one, size), (other, other_size) = answers
        room = max(ALIKE, ROUNDING * _digit(self._first)) * (size + other_size)
        return abs(one - other) <= room

    def chosen(self, node: Any, given: Any, head: _Head) -> bool:
        """Whether a choice is one among samples, or a bend one of several samples together."""
        if given is None or not float(given.abs().max()) > 1e-3 * _largest(self._first):
            return False
        shape = _shape(node.next_functions[0])
        if _stem(node) in BENDS:
            return self._bends(node, given, shape, head)
        return self._chooses(node, shape, head)

    def _chooses(self, node: Any, shape: torch.Size, head: _Head) -> bool:
        dims = _chosen_dims(node, len(shape))
        if not dims or all(shape[dim] < 2 for dim in dims):
            return False
        for _ in range(2):
            place = [self._below(size) for size in shape]
            other = list(place)
            while other == place:
                for dim in dims:
                    other[dim] = self._below(shape[dim])
            one, another = (self._touched(node, each, head) for each in (place, other))
            if one and another and one != another:
                return True
        return False

    def _bends(self, node: Any, given: torch.Tensor, shape: torch.Size, head: _Head) -> bool:
        with torch.no_grad():
            slopes = node(torch.ones_like(given))
        slopes = slopes[0] if isinstance(slopes, tuple) else slopes
        if slopes is None or slopes.shape != shape or slopes.min() == slopes.max():
            return False
        for side in (slopes == slopes.min(), slopes == slopes.max()):
            places = side.nonzero()
            picked = [places[self._below(len(places))].tolist() for _ in range(3)]
            if all(len(self._touched(node, each, head)) < 2 for each in picked):
                return False
        return True

    def _below(self, size: int) -> int:
        return int(torch.randint(size, (), generator=self._generator))

    def _touched(self, node: Any, place: list[int], head: _Head) -> set[int]:
        """The samples of which one number that goes into an operation was made."""
        edge = node.next_functions[0]
        meta = edge[0]._input_metadata[edge[1]]
        seed = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
        seed[tuple(place)] = 1
        found: set[int] = set()
        for end, value in head.of({edge: seed}).items():
            if end in self._dims:
                others = [dim for dim in range(value.dim()) if dim != self._dims[end]]
                used = (value != 0).any(dim=others) if others else value != 0
                found |= set(used.nonzero().flatten().tolist())
        return found


def _couples_all(first: dict[Edge, torch.Tensor], rows: int, head: _Head) -> bool:
    """Where each sample has several rows nobody knows which: whether one row depends on all others.

    Rows of one sample may well depend on each other.
    """
    for edge, each in first.items():
        with torch.enable_grad():
            total = each[0].sum() if each.dim() == 1 else (each[0] * _signs(each[0])).sum()
        second = head.again(total).get(edge)
        if second is None or len(second) % rows or len(second) == rows:
            continue
        sizes = second.detach().abs().flatten(1).amax(dim=1) if second.dim() > 1 else second.abs()
        if bool((sizes > ROUNDING * _digit({edge: each}) * sizes.max()).all()):
            return True
    return False


def _signs(row: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(row.shape, generator=generator).to(row)


def _dims(shape: Any, rows: int) -> tuple[int, ...]:
    """Which dimensions may be that of the samples."""
    if shape and shape[0] == rows:
        return (0, 1) if len(shape) > 1 and shape[1] == rows else (0,)
    return (1,) if len(shape) == 3 and shape[1] == rows and shape[0] % rows else ()


def _stem(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def _shape(edge: Edge) -> torch.Size:
    return torch.Size(edge[0]._input_metadata[edge[1]].shape)


def _chosen_dims(node: Any, count: int) -> list[int]:
    """Along which dimensions an operation chooses: all, where it names none."""
    found = getattr(node, "_saved_dim", None)
    if found is None or found == ():
        return list(range(count))
    every = found if isinstance(found, tuple) else (found,)
    return [(dim - 2**64 if dim >= 2**63 else dim) % count for dim in every] if count else []


def _fitted(value: torch.Tensor, edge: Edge) -> torch.Tensor:
    """As torch's backward pass hands a gradient on: in the shape and type of what it is for."""
    meta = edge[0]._input_metadata[edge[1]]
    if value.shape != meta.shape:
        value = value.sum_to_size(tuple(meta.shape))
    return value if value.dtype == meta.dtype else value.to(meta.dtype)


def _size(values: Mapping[Edge, torch.Tensor]) -> float:
    return float(sum(float(each.detach().abs().double().square().sum()) for each in values.values()) ** 0.5)


def _largest(values: Mapping[Edge, torch.Tensor]) -> float:
    return max(float(each.detach().abs().max()) for each in values.values())


def _digit(values: Mapping[Edge, torch.Tensor]) -> float:
    return max(torch.finfo(each.dtype).eps for each in values.values())
