"""A linear layer whose weights are split over nodes: every node computes its own features."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.cost.split import Placed, divide_features
from paceline.errors import UnsupportedError
from paceline.exchange.tensor_parallel.activations import moved
from paceline.exchange.tensor_parallel.splittable import retire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.exchange.tensor_parallel.layers import Partition


class SplitLinear(nn.Module):
    """Stands where an `nn.Linear` stood; parameters and saved tensors keep their names.

    The gradient of a part of the weights is that of the global batch and needs no exchange.
    The bias that is added to own rows (`row`, leaving in state batch) is whole on every
    node, and its gradient is summed like that of any other replicated weight.

    In evaluation mode, after `gather`, it computes with the whole weights and sends nothing.
    Whoever reads `weight` from outside would take a part for the whole: computing with it raises.
    """

    def __init__(
        self, linear: nn.Linear, placed: Placed, partition: Partition, shares: Sequence[float]
    ) -> None:
        super().__init__()
        self._left: dict[str, nn.Parameter] = {}
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.placed = placed
        self._partition = partition
        self._inputs = divide_features(self.in_features, shares)
        self._outputs = divide_features(self.out_features, shares)
        self._whole: dict[str, torch.Tensor] = {}
        self.weight = self._part_of(linear, "weight")
        bias: torch.Tensor | None = linear.bias  # torch declares it as never missing
        self.bias = None if bias is None else self._part_of(linear, "bias")
        self._left = retire(linear, placed.name)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            left = self.__dict__["_left"].get(name)
            if left is not None:
                return left
        return super().__getattr__(name)

    def part(self, entry: str) -> nn.Parameter:
        """This node's part of `weight` or `bias`."""
        found = self._parameters[entry]
        assert found is not None
        return found

    def _part_of(self, linear: nn.Linear, entry: str) -> nn.Parameter:
        whole: torch.Tensor = getattr(linear, entry)
        part = self.own_part(entry, whole.detach()).clone()
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    # --- which part -------------------------------------------------------------

    def _cut(self, entry: str) -> tuple[int, list[int]] | None:
        """The dimension along which an entry is split and every node's part; None: not split."""
        if entry == "bias":
            return (0, self._outputs) if self.placed.bias_split else None
        return (0, self._outputs) if self.placed.way == "column" else (1, self._inputs)

    def is_split(self, entry: str) -> bool:
        """Whether a node holds only a part of `weight` or `bias`."""
        return self._cut(entry) is not None

    def own_part(self, entry: str, whole: torch.Tensor) -> torch.Tensor:
        """This node's part of a whole tensor that is laid out like `weight` or `bias`."""
        cut = self._cut(entry)
        if cut is None:
            return whole
        dim, sizes = cut
        rank = self._partition.moves.rank
        return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])

    def whole_part(self, entry: str, own: torch.Tensor, root: int | None = None) -> torch.Tensor:
        """The parts of all nodes put together, on every node or on `root` alone."""
        cut = self._cut(entry)
        if cut is None:
            return own
        return self._partition.moves.collect(own.detach(), cut[1], dim=cut[0], root=root)

    # --- whole weights ----------------------------------------------------------

    def gather(self) -> None:
        """Hold the whole weights too, until the next update."""
        if not self._whole:
            for entry, own in self.named_parameters():
                self._whole[entry] = self.whole_part(entry, own).detach()

    def forget(self) -> None:
        """Let go of the whole weights: they are about to change."""
        self._whole = {}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        assert self._whole, "the weights are gathered before they are saved"
        for entry, tensor in self._whole.items():
            destination[prefix + entry] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        own = dict(state_dict)
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for entry, shape in shapes.items():
            tensor = own.get(prefix + entry)
            if tensor is not None and tuple(tensor.shape) == shape:
                own[prefix + entry] = self.own_part(entry, tensor)
        self.forget()
        super()._load_from_state_dict(own, prefix, *arguments)

    # --- computing ----------------------------------------------------------------

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self._whole and not self.training:
            return F.linear(values, self._whole["weight"], self._whole.get("bias"))
        self._partition.called(self.placed.name)
        counts = self._partition.counts
        own, everyone = counts[self._partition.moves.rank], sum(counts)
        entered = own if self.placed.enter == "batch" else everyone
        if values.shape[0] != entered:
            raise UnsupportedError(
                f"{self.placed.name} got {values.shape[0]} rows where {entered} samples were"
                " expected: only layers whose first dimension is the batch can be split; leave it"
                " out of exchange.layers"
            )
        left = own if self.placed.leave == "batch" else everyone
        inner = values.shape[1:-1]
        rows = [count * math.prod(inner) for count in counts]
        flat = values.reshape(entered * math.prod(inner), values.shape[-1])
        result = self._column(flat, rows) if self.placed.way == "column" else self._row(flat, rows)
        return result.view(left, *inner, result.shape[-1])

    def _column(self, values: torch.Tensor, rows: list[int]) -> torch.Tensor:
        moves, before, after = self._partition.moves, self._inputs, self._outputs
        if self.placed.enter == "batch":
            whole = moved(
                values, lambda x: moves.gather_rows(x, rows), lambda g: moves.add_rows(g, rows)
            )
        else:
            whole = moved(
                values,
                lambda x: moves.gather_features(x, before),
                lambda g: moves.add_features(g, before),
            )
        result = F.linear(whole, self.part("weight"), self._parameters.get("bias"))
        if self.placed.leave == "feature":
            return result
        return moved(
            result,
            lambda x: moves.to_rows(x, rows, after),
            lambda g: moves.to_features(g, rows, after),
        )

    def _row(self, values: torch.Tensor, rows: list[int]) -> torch.Tensor:
        moves, before, after = self._partition.moves, self._inputs, self._outputs
        if self.placed.enter == "batch":
            values = moved(
                values,
                lambda x: moves.to_features(x, rows, before),
                lambda g: moves.to_rows(g, rows, before),
            )
        partial = F.linear(values, self.part("weight"))
        if self.placed.leave == "batch":
            result = moved(
                partial, lambda x: moves.add_rows(x, rows), lambda g: moves.gather_rows(g, rows)
            )
        else:
            result = moved(
                partial,
                lambda x: moves.add_features(x, after),
                lambda g: moves.gather_features(g, after),
            )
        bias = self._parameters.get("bias")
        return result if bias is None else result + bias.to(result.dtype)
