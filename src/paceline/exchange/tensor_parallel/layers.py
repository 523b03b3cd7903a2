"""Per-layer partition: linear layers split by feature over nodes, everything else by batch.

The loss of a node's samples is weighted with samples over all samples, so the gradient of a
split weight, computed from the rows of the whole batch, is that of one process. Weights that
are not split go through the plan's exchange, under the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.cost.split import Chain, Division, Placed, arrange, can_split
from paceline.data.sampler import apportion
from paceline.errors import UnsupportedError
from paceline.exchange.network import Network
from paceline.exchange.tensor_parallel.activations import Moves
from paceline.exchange.tensor_parallel.chains import find_chains
from paceline.exchange.tensor_parallel.split_linear import SplitLinear
from paceline.exchange.tensor_parallel.splittable import Seen, look_at

OptimizerState = dict[str, dict[str, Any]]


class Partition:
    """One node's part of the split layers."""

    def __init__(
        self,
        network: Network,
        layers: Sequence[str],
        shares: Sequence[float],
        batch_size: int,
        seen: Seen | None = None,
    ) -> None:
        """`seen`: what a trial of such a model has shown; what can be seen without one if None."""
        self.network = network
        self.moves = Moves(network)
        self.counts: list[int] = []
        """Samples of every node in the update that is under way."""
        self._names = tuple(layers)
        self._shares = list(shares)
        # Features stay where they are when shares of the batch change later.
        self._feature_shares = list(shares)
        self._batch_size = batch_size
        self._seen = seen
        self._layers: dict[str, SplitLinear] = {}
        self._order: list[str] = []
        """The split layers as every update must call them; empty where nobody has tried."""
        self._calls: int | None = 0
        """Those that this update has called; None once its forward pass is over."""

    def place(self, model: nn.Module) -> None:
        """Replace the layers of the plan by their parts, in place."""
        names = frozenset(self._names)
        structure = look_at(model)
        seen = structure if self._seen is None else self._seen
        chains = find_chains(model, seen=seen)
        known = {layer.name: layer for chain in chains for layer in chain}
        for name in self._names:
            why = (structure.obstacles | seen.obstacles).get(name, "")
            if why or name not in known or not can_split(known[name], self.network.size):
                raise UnsupportedError(self._refusal(name, why, chains))
        division = Division(
            parts=tuple(apportion(self._batch_size, self._shares)),
            shares=tuple(self._feature_shares),
        )
        for chain in chains:
            for placed in arrange(chain, division, split=names):
                if placed.way != "batch":
                    self._replace(model, placed)
        self._order = [name for name in seen.order or () if name in self._layers]

    def _refusal(self, name: str, why: str, chains: Sequence[Chain]) -> str:
        if why:
            return (
                f"the layer {name!r} cannot be split over nodes, because {why}: leave it out of"
                " exchange.layers, or use exchange.partition = 'none'"
            )
        size = self.network.size
        valid = [layer.name for chain in chains for layer in chain if can_split(layer, size)]
        return (
            f"the layer {name!r} cannot be split over {size} nodes; layers that can:"
            f" {', '.join(valid) or 'none'}"
        )

    def _replace(self, model: nn.Module, placed: Placed) -> None:
        parent, _, name = placed.name.rpartition(".")
        owner = model.get_submodule(parent)
        linear = getattr(owner, name)
        split = SplitLinear(linear, placed, self, self._feature_shares).train(linear.training)
        setattr(owner, name, split)
        self._layers[placed.name] = split

    def placed(self) -> list[Placed]:
        """How the split layers are run."""
        return [layer.placed for layer in self._layers.values()]

    def is_split(self, name: str) -> bool:
        """Whether a node holds only a part of the parameter of this name."""
        layer, _, entry = name.rpartition(".")
        return layer in self._layers and self._layers[layer].is_split(entry)

    def parameters(self, model: nn.Module) -> int:
        """How many weights the whole model has."""
        total = sum(parameter.numel() for parameter in model.parameters())
        for layer in self._layers.values():
            own = sum(parameter.numel() for parameter in layer.parameters())
            biases = layer.out_features if layer._parameters.get("bias") is not None else 0
            total += layer.in_features * layer.out_features + biases - own
        return total

    # --- every update -----------------------------------------------------------

    def begin(self, count: int, total: int, least: int = 1) -> None:
        """An update of `count` samples here and `total` on all nodes, in parts of `least` or 0."""
        for layer in self._layers.values():
            layer.forget()
        self._calls = 0
        self.counts = apportion(total, self._shares, least)
        assert self.counts[self.network.rank] == count, "all nodes divide a batch alike"

    def called(self, name: str) -> None:
        """A split layer is about to send: all nodes call the same layers in the same order.

        Else what one node sends for a layer would be taken for another's. A forward pass that is
        run again under the backward one (checkpointing) is the same on every node.
        """
        if self._calls is None or not self._order:
            return
        due = self._order[self._calls] if self._calls < len(self._order) else "none"
        if name != due:
            raise UnsupportedError(self._other_order(f"calls {name} where {due} was due"))
        self._calls += 1

    def forward_is_over(self) -> None:
        """Every split layer must have been called by now."""
        if self._order and self._calls is not None and self._calls < len(self._order):
            left_out = self._order[self._calls]
            raise UnsupportedError(self._other_order(f"does not call {left_out}"))
        self._calls = None

    def _other_order(self, what: str) -> str:
        return (
            f"the model {what} in this update: layers that are left out by chance or by what the"
            " samples are cannot be split over nodes, because every node must call them alike;"
            " use exchange.partition = 'none'"
        )

    def reshare(self, shares: Sequence[float]) -> None:
        """Divide batches like this from now on; features stay where they are."""
        self._shares = list(shares)

    def clip(self, named: Sequence[tuple[str, torch.Tensor]], limit: float | None) -> None:
        """Shorten the whole gradient to `limit` where it is longer.

        Its norm is that over all nodes: squares of split weights are added up over nodes, those
        of replicated weights, which are the same everywhere, are counted once.
        """
        if limit is None:
            return
        gradients = [(self.is_split(name), p.grad) for name, p in named if p.grad is not None]
        squares = {True: 0.0, False: 0.0}
        for split, gradient in gradients:
            squares[split] += float(torch.linalg.vector_norm(gradient)) ** 2
        over_nodes = self.network.total([squares[True]], "the norm of the gradient")[0]
        factor = limit / (math.sqrt(over_nodes + squares[False]) + 1e-6)
        if factor < 1:
            for _, gradient in gradients:
                gradient.mul_(factor)

    # --- whole weights ------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Whole weights on every node, to evaluate and to save."""
        for layer in self._layers.values():
            layer.gather()

    @torch.no_grad()
    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """The optimizer's state with whole tensors on the first node; every node calls it."""
        return self._converted(
            state,
            lambda split, part, value: (
                split.whole_part(part, value, root=0)
                if value.shape == split.part(part).shape
                else value
            ),
        )

    def own_state(self, state: OptimizerState) -> OptimizerState:
        """This node's part of a state with whole tensors."""
        return self._converted(
            state,
            lambda split, part, value: (
                split.own_part(part, value)
                if value.dim() == (2 if part == "weight" else 1)
                else value
            ),
        )

    def _converted(
        self, state: OptimizerState, convert: Callable[[SplitLinear, str, torch.Tensor], Any]
    ) -> OptimizerState:
        """A state with the tensors of split layers as `convert` makes them."""
        found = dict(state)
        for name in filter(self.is_split, state):
            layer, _, part = name.rpartition(".")
            found[name] = {
                key: convert(self._layers[layer], part, value)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state[name].items()
            }
        return found
