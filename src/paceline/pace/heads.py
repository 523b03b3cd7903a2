"""What lies between a loss and the layers of the models, as the graph of the loss has it.

Layers are known by the weights that they use. The operations above them are called one by one, and
not by torch's backward pass: so it ends at the layers, no hook of anybody's runs, and no gradient
of a weight is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

MOST = 4096
"""Operations between a loss and the layers; a loss of more is not judged."""
LARGEST = 2**25
"""Numbers that a layer may give: a look takes some times their memory. Of more it is left out."""
VIEWS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze",
         "Squeeze", "ToCopy", "Alias", "Clone")  # fmt: skip
PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "Convolution",
            "MkldnnConvolution", "SlowConv2D", "SlowConv3D", "NativeLayerNorm", "NativeBatchNorm",
            "NativeGroupNorm", "FusedRmsNorm", "MkldnnRnnLayer", "PreluKernel")  # fmt: skip
LOOKUPS = ("Embedding", "EmbeddingBag", "IndexSelect")
SHIFTS = ("Add", "Sub", "Mul", "Div")
"""Layers where they use a vector of weights."""
CLOSED = ("paceline.", "torch.utils.checkpoint", "torch._functorch", "torch._dynamo")
"""Where operations come from that stand for layers: computed again, compiled, over all ranks."""

Edge = tuple[Any, int]
"""An operation, and the number of one of its results."""
Derivatives = dict[Edge, torch.Tensor]


class UnknownHeadError(Exception):
    """Nothing can be said about a loss."""


class Layers:
    """Which operations of a graph are layers, and give rows for samples."""

    def __init__(self, rows: int, weights: Collection[int]) -> None:
        """`rows`: of the batch; `weights`: by id."""
        self._rows, self._weights = rows, weights

    def gives_samples(self, node: Any) -> bool | None:
        """A row for every sample; None of a layer that is left out."""
        return self._gives(node, lambda shape: bool(sample_dims(shape, self._rows)))

    def gives_multiples(self, node: Any) -> bool | None:
        """Several rows for every sample, in whatever order."""
        rows = self._rows
        return self._gives(node, lambda s: bool(s) and s[0] > rows and s[0] % rows == 0)

    def _gives(self, node: Any, fits: Callable[[Any], bool]) -> bool | None:
        shapes = [tuple(each.shape) for each in node._input_metadata]
        if not any(fits(shape) for shape in shapes):
            return False
        is_closed = _is_python(node) and node._forward_cls.__module__.startswith(CLOSED)
        if not (is_closed or (not _is_python(node) and self._is_layer(node))):
            return False
        return True if sum(map(math.prod, shapes)) <= LARGEST else None

    def _is_layer(self, node: Any) -> bool:
        node = _below_views(node)
        kind, found = stem(node), [self._weight(each) for each, _ in node.next_functions]
        used = [each for each in found if each is not None and each.numel() > 1]
        if not used or kind in LOOKUPS:
            return bool(used)
        if None not in found:  # a weight that is made of weights
            return False
        if kind in SHIFTS:
            return all(each.dim() == 1 < len(node._input_metadata[0].shape) for each in used)
        return kind in PRODUCTS

    def _weight(self, node: Any) -> torch.Tensor | None:
        found = getattr(_below_views(node), "variable", None)
        return found if id(found) in self._weights else None


class Head:
    """The operations between a loss and where it ends, in the order of a backward pass."""

    def __init__(self, root: Any, ends: Callable[[Any], bool | None]) -> None:
        """`ends`: whether the head ends at an operation, or (None) leaves it out."""
        self.reached: set[Any] = set()
        """Where it ends."""
        self._leads: dict[Any, bool] = {}
        order: list[Any] = []
        waiting = [(root, False)]
        while waiting:
            node, is_done = waiting.pop()
            following = [each for each, _ in node.next_functions if each is not None]
            if is_done:
                self._leads[node] = any(self._leads[each] for each in following)
                if self._leads[node]:
                    order.append(node)
            elif node not in self._leads:
                if len(self._leads) >= MOST:
                    raise UnknownHeadError
                verdict = node is not root and ends(node)
                self._leads[node] = verdict is True
                if verdict:
                    self.reached.add(node)
                elif verdict is not None:
                    waiting += [(node, True), *((each, False) for each in following)]
        if any(_is_python(node) for node in order):  # it may do anything when it is run
            raise UnknownHeadError
        self.order = order[::-1]

    def __contains__(self, node: Any) -> bool:
        """Whether an operation leads to where the head ends."""
        return self._leads.get(node, False)

    def flow(
        self, seeds: Mapping[Edge, torch.Tensor], arrived: dict[Any, Any] | None = None
    ) -> Derivatives:
        """Derivatives where the head ends; `arrived`: those that come to every operation.

        An operation without a second derivative is left out: what others show is true all the same.
        """
        held = dict(seeds)
        for node in self.order:
            given = [held.pop((node, each), None) for each in range(len(node._input_metadata))]
            if all(each is None for each in given):
                continue
            if arrived is not None:
                arrived[node] = given[0]
            for edge, value in zip(node.next_functions, _called(node, given), strict=False):
                if value is not None and edge[0] in self:
                    fitted = _fitted(value, edge)
                    held[edge] = held[edge] + fitted if edge in held else fitted
        return held

    def again(self, total: torch.Tensor) -> Derivatives:
        """Of a sum of first derivatives: the second ones, where the head ends."""
        if total.grad_fn is None:
            return {}
        with torch.no_grad():
            return self.of({(total.grad_fn, 0): torch.ones_like(total)})

    def of(self, seeds: Mapping[Edge, torch.Tensor]) -> Derivatives:
        """Derivatives of one result inside of the head."""
        ((root, _),) = seeds
        if root in self.reached:
            return dict(seeds)
        with torch.no_grad():
            return Head(root, self.reached.__contains__).flow(seeds)


def sample_dims(shape: Any, rows: int) -> tuple[int, ...]:
    """Which dimensions may be that of the samples: the first, or the second where time is first."""
    if shape and shape[0] == rows:
        return (0, 1) if len(shape) == 3 and shape[1] == rows else (0,)
    return (1,) if len(shape) == 3 and shape[1] == rows and shape[0] % rows else ()


def stem(node: Any) -> str:
    """The operation's name, as AddmmBackward0 has it."""
    return str(node.name()).partition("Backward")[0]


def shape_of(edge: Edge) -> tuple[int, ...]:
    return tuple(edge[0]._input_metadata[edge[1]].shape)


def one_at(edge: Edge, place: list[int]) -> torch.Tensor:
    """Zeros in the shape of a result, but for one place."""
    meta = edge[0]._input_metadata[edge[1]]
    found = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
    found[tuple(place)] = 1
    return found


def _below_views(node: Any) -> Any:
    while node is not None and stem(node) in VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _is_python(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _called(node: Any, given: list[Any]) -> tuple[Any, ...]:
    try:
        found = node(*given)
    except RuntimeError as error:  # a NotImplementedError is one, too
        if "is not implemented" not in str(error):
            raise
        return ()
    return found if isinstance(found, tuple) else (found,)


def _fitted(value: torch.Tensor, edge: Edge) -> torch.Tensor:
    """As torch's backward pass hands a gradient on: in the shape and type of what it is for."""
    meta = edge[0]._input_metadata[edge[1]]
    if value.shape != meta.shape:
        value = value.sum_to_size(tuple(meta.shape))
    return value if value.dtype == meta.dtype else value.to(meta.dtype)
