"""One server's shard: weights, optimizer and its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.errors import UnsupportedError
from paceline.exchange.buckets import bounds
from paceline.exchange.seed import Seed
from paceline.exchange.servers.sharding import cut, shard_bounds, slices
from paceline.local.base import OptimizerFactory, OptimizerState, clip_gradients, scale_rate
from paceline.local.shared import divided, memory_view

Named = Sequence[tuple[str, torch.Tensor]]


class Shard:
    """The part of the weights that one server holds and updates.

    The optimizer is the same as everywhere, on slices of parameters: elementwise
    optimizers do the same to a slice as to the whole.
    """

    def __init__(
        self,
        named: Named,
        build_optimizer: OptimizerFactory,
        *,
        number: int,
        servers: int,
        clip_norm: float | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """`bucket_bytes`: workers send the gradient in buckets of this size; None: in one piece."""
        self._clip_norm = clip_norm
        for name, parameter in named:
            if parameter.dtype is not torch.float32:
                raise UnsupportedError(
                    f"the parameter {name} is {parameter.dtype}, but servers hold float32 weights:"
                    " use exchange.kind = 'allreduce'"
                )
        sizes = [parameter.numel() for _, parameter in named]
        start, end = shard_bounds(sum(sizes), servers)[number]
        self.slices = slices(sizes, start, end)
        self.weights = torch.empty(end - start)
        whole = [(0, sum(sizes))]
        if bucket_bytes is not None:
            whole = bounds([parameter for _, parameter in named], bucket_bytes)
        self.pieces = [(first - start, last - start) for first, last in cut(whole, start, end)]
        """Parts of the shard, in the order in which its gradient comes."""
        self._copy: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []
        at = 0
        for piece in self.slices:
            parameter = named[piece.parameter][1].detach()
            part = self.weights[at : at + piece.end - piece.start]
            part.copy_(memory_view(parameter, parameter)[piece.start : piece.end])
            self._parts.append(part)
            at += part.numel()
        self.optimizer = build_optimizer(self._parts) if self._parts else None
        # Shapes and layouts; the model's own weights are not held beside the shard's.
        self._named = [(name, parameter.detach().to("meta")) for name, parameter in named]

    def load(self, state: OptimizerState) -> None:
        """Go on from a whole optimizer state, of which this shard keeps its part."""
        if self.optimizer is None:
            return
        for piece, part in zip(self.slices, self._parts, strict=True):
            name, parameter = self._named[piece.parameter]
            if name in state:
                self.optimizer.state[part] = {
                    key: _cut(value, parameter, piece.start, piece.end)
                    for key, value in state[name].items()
                }

    def take(self, seed: Seed) -> None:
        """Begin with the first node's part of the weights and of the optimizer's state."""
        self.weights.copy_(seed.weights)
        self._copy = None
        at = 0
        for part, entry in zip(self._parts, seed.slices, strict=True):
            place = slice(at, at + part.numel())
            at = place.stop
            state = {key: torch.tensor(number) for key, number in entry["numbers"].items()}
            state |= {key: seed.vectors[key][place].clone() for key in entry["whole"]}
            if state and self.optimizer is not None:
                self.optimizer.state[part] = state

    def seed(self, update: int) -> Seed:
        """What another server of the same shard is to begin with."""
        found = Seed(update=update, weights=self.weights.clone(), slices=[])
        whole, numbers = self.entries()
        found.vectors = {name: self.entry(name) for name in whole}
        for part, values in zip(self._parts, numbers, strict=True):
            state = self.optimizer.state.get(part, {}) if self.optimizer is not None else {}
            found.slices.append({"whole": [k for k in whole if k in state], "numbers": values})
        return found

    def copy(self) -> torch.Tensor:
        """The weights as they are now, for reading; the same copy for all until they change."""
        if self._copy is None:
            self._copy = self.weights.clone()
        return self._copy

    def add(self, change: torch.Tensor) -> None:
        """Change the weights without an update."""
        self.weights.add_(change)
        self._copy = None

    @torch.no_grad()
    def apply(self, gradient: torch.Tensor, rate: float) -> None:
        """One update from the shard's gradient."""
        if self.optimizer is None:
            return
        for part, own in divided(gradient, self._parts):
            part.grad = own
        clip_gradients(self._parts, self._clip_norm)
        scale_rate(self.optimizer, rate)
        self.optimizer.step()
        self._copy = None

    def entries(self) -> tuple[list[str], list[dict[str, float]]]:
        """Names of the state entries that are as large as the weights; the others, by slice."""
        whole: list[str] = []
        numbers: list[dict[str, float]] = []
        for part in self._parts:
            state = self.optimizer.state.get(part, {}) if self.optimizer is not None else {}
            whole += [k for k, v in state.items() if _is_whole(v, part) and k not in whole]
            numbers.append(
                {k: float(v) for k, v in state.items() if v is not None and not _is_whole(v, part)}
            )
        return whole, numbers

    def entry(self, name: str) -> torch.Tensor:
        """One entry of the state, laid out like the weights."""
        assert self.optimizer is not None
        result = torch.zeros_like(self.weights)
        for part, place in divided(result, self._parts):
            value = self.optimizer.state.get(part, {}).get(name)
            if value is not None:
                place.copy_(value)
        return result


def whole_state(
    named: Named, shards: Iterable[tuple[list[dict[str, float]], dict[str, torch.Tensor]]]
) -> OptimizerState:
    """The optimizer's state by parameter, from every server's numbers by slice and vectors."""
    gathered = list(shards)
    sizes = [parameter.numel() for _, parameter in named]
    bounds = shard_bounds(sum(sizes), len(gathered))
    result: OptimizerState = {}
    for (start, end), (numbers, vectors) in zip(bounds, gathered, strict=True):
        at = 0
        for piece, values in zip(slices(sizes, start, end), numbers, strict=True):
            name, parameter = named[piece.parameter]
            size = piece.end - piece.start
            if vectors or values:
                entry = result.setdefault(name, {})
                entry.update({key: torch.tensor(value) for key, value in values.items()})
                for key, vector in vectors.items():
                    flat = entry.setdefault(key, torch.zeros(parameter.numel()))
                    flat[piece.start : piece.end].copy_(vector[at : at + size])
            at += size
    for name, parameter in named:
        for key, value in result.get(name, {}).items():
            if value.dim() == 1:
                result[name][key] = _shaped(value, parameter)
    return result


def _is_whole(value: Any, part: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == part.shape


def _cut(value: Any, parameter: torch.Tensor, start: int, end: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or value.dim() == 0:
        return value.clone()
    return memory_view(value, parameter)[start:end].clone()


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A vector in memory order as a tensor like `like`."""
    result = torch.empty_like(like)
    memory_view(result, like).copy_(flat)
    return result.detach()
