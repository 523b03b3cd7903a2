"""Activations that change hands between nodes, forward and backward.

Everything goes through one operation, `all_to_all` with parts of any size: Gloo's all-gather
refuses uneven parts and its reduce-scatter sends a whole all-reduce. Values travel in the type
they have. Sums are taken in the order of nodes, so that every node gets the same bits.

`rows` are the rows of every node and `features` the features of every node, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.exchange.network import Network

Move = Callable[[torch.Tensor], torch.Tensor]


class Moves:
    """The changes of hands; each has an opposite, which is its backward pass."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.rank, self.nodes = network.rank, network.size

    def gather_rows(self, own: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Own rows -> the rows of all nodes. Opposite: `add_rows`."""
        width = own.shape[1]
        flat = own.reshape(-1).repeat(self.nodes)
        found = self._exchange(flat, [own.numel()] * self.nodes, [count * width for count in rows])
        return found.view(sum(rows), width)

    def add_rows(self, partial: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Partial sums of all rows -> own rows, summed over nodes. Opposite: `gather_rows`."""
        width, own = partial.shape[1], rows[self.rank]
        found = self._exchange(
            partial.reshape(-1), [count * width for count in rows], [own * width] * self.nodes
        )
        return found.view(self.nodes, own, width).sum(dim=0)

    def gather_features(self, own: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
        """Own features of all rows -> all features of all rows. Opposite: `add_features`."""
        rows = own.shape[0]
        flat = own.reshape(-1).repeat(self.nodes)
        found = self._exchange(
            flat, [own.numel()] * self.nodes, [rows * count for count in features]
        )
        return _beside(found, rows, features)

    def add_features(self, partial: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
        """Partial sums -> own features of all rows, summed. Opposite: `gather_features`."""
        rows, own = partial.shape[0], features[self.rank]
        found = self._exchange(
            _apart(partial, features),
            [rows * count for count in features],
            [rows * own] * self.nodes,
        )
        return found.view(self.nodes, rows, own).sum(dim=0)

    def to_features(
        self, own: torch.Tensor, rows: Sequence[int], features: Sequence[int]
    ) -> torch.Tensor:
        """All features of own rows -> own features of all rows. Opposite: `to_rows`."""
        mine, part = rows[self.rank], features[self.rank]
        found = self._exchange(
            _apart(own, features),
            [mine * count for count in features],
            [count * part for count in rows],
        )
        return found.view(sum(rows), part)

    def to_rows(
        self, own: torch.Tensor, rows: Sequence[int], features: Sequence[int]
    ) -> torch.Tensor:
        """Own features of all rows -> all features of own rows. Opposite: `to_features`."""
        mine, part = rows[self.rank], features[self.rank]
        found = self._exchange(
            own.reshape(-1), [count * part for count in rows], [mine * count for count in features]
        )
        return _beside(found, mine, features)

    def collect(
        self, own: torch.Tensor, sizes: Sequence[int], *, dim: int, root: int | None
    ) -> torch.Tensor:
        """The parts of all nodes along `dim`: on every node, or on `root` alone (others: empty)."""
        nodes = range(self.nodes)
        wanted = [root is None or root == node for node in nodes]
        other = own.numel() // own.shape[dim]
        flat = own.reshape(-1).repeat(sum(wanted))
        mine = wanted[self.rank]
        found = self._exchange(
            flat,
            [own.numel() if wanted[node] else 0 for node in nodes],
            [size * other if mine else 0 for size in sizes],
            name="gathering the split weights",
        )
        if not mine:
            return found
        if dim == 0:
            return found.view(sum(sizes), *own.shape[1:])
        return _beside(found, own.shape[0], sizes)

    def _exchange(
        self,
        sent: torch.Tensor,
        sent_sizes: list[int],
        received_sizes: list[int],
        name: str = "an exchange of activations",
    ) -> torch.Tensor:
        received = sent.new_empty(sum(received_sizes))
        self._network.all_to_all(received, sent, received_sizes, sent_sizes, name).wait()
        return received


def _apart(whole: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
    """One vector with the features of each node together."""
    return torch.cat(
        [part.reshape(-1) for part in torch.split_with_sizes(whole, list(features), dim=1)]
    )


def _beside(flat: torch.Tensor, rows: int, features: Sequence[int]) -> torch.Tensor:
    """The opposite of `_apart`."""
    parts = torch.split_with_sizes(flat, [rows * count for count in features])
    return torch.cat(
        [part.view(rows, count) for part, count in zip(parts, features, strict=True)], dim=1
    )


class _Moved(torch.autograd.Function):
    """One change of hands, and its opposite for the gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        return ctx.back(gradients[0]), None, None


def moved(values: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
    """`there(values)`, whose gradient is `back` of the gradient."""
    result: torch.Tensor = _Moved.apply(values, there, back)  # type: ignore[no-untyped-call]
    return result
