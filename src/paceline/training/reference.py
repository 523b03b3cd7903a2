"""Plain PyTorch in one process: what every plan is held against.

Written out here, apart from what the strategies share, so that a fault of theirs is none of the
reference's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.base import Source
from paceline.data.samples import Samples
from paceline.local.base import OptimizerState
from paceline.local.steps import OwnStep, Supervised, users_code
from paceline.local.still import settle, still
from paceline.local.tiles import check_bf16
from paceline.local.values import full_precision, mapped
from paceline.schema import Config
from paceline.training import lean
from paceline.training.outside import Outside
from paceline.training.parts import Parts

Divide = Callable[[int], Sequence[int]]
"""How many samples of a batch each part has."""

MOVES = (0.003, 0.3)
"""How far two updates should move the weights, as a part of their norm.

Less than this would be lost in the last digits of the weights; where it is more, the second update
starts from weights that rounding alone has led apart.
"""
TARGET = 0.02
"""How far they are to move where the learning rate alone would move them less or more."""
TRIES = 4
FUSED_FROM = 5_000_000
"""Weights from which a step of an optimizer that is not fused would take most of the time."""
CARRIED = 2.0**-22
"""Relative; by how much a loss may differ that nothing but rounding has led apart."""
NUDGE = 2.0**-22
"""A change of the weights, relative to them, in about their last digit."""


@dataclass(frozen=True)
class Drawn:
    """Real samples of one update, read as they are needed, without augmentation."""

    source: Source
    numbers: np.ndarray

    @property
    def count(self) -> int:
        return len(self.numbers)

    def parts(self, sizes: Sequence[int]) -> list[Samples]:
        """The samples in parts of these sizes, each a batch of its own."""
        found = self.source.samples(self.numbers, epoch=0, augment=False, sizes=sizes)
        return found.divided(sizes)

    def part(self, first: int, count: int, sizes: Sequence[int]) -> Samples:
        """Some of the samples, which whoever computes them divides into parts of these sizes."""
        numbers = self.numbers[first : first + count]
        return self.source.samples(numbers, epoch=0, augment=False, sizes=sizes)

    def whole(self) -> Samples:
        """All of them."""
        return self.parts([self.count])[0]


@dataclass(kw_only=True)
class ReferenceResult:
    """What some updates came to."""

    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """Weights and buffers, as a checkpoint has them."""
    state: OptimizerState
    rate: float = 1.0
    """The learning rate, relative to the one that was asked for."""
    outputs: torch.Tensor | None = None
    """Of the first batch, before the first update."""
    unused: set[str] = field(default_factory=set)
    """Parameters that took no part in any update."""

    def moved(self) -> float:
        """How far the weights have moved, as a part of their norm; perhaps not finite."""
        names = [name for name, tensor in self.weights.items() if moves(tensor)]
        square = sum(norm(self.weights[name] - self.start[name]) ** 2 for name in names)
        return math.sqrt(square / max(sum(norm(self.start[n]) ** 2 for n in names), 1e-30))


def norm(tensor: torch.Tensor) -> float:
    """Of any kind of tensor."""
    return float(torch.linalg.vector_norm(real_numbers(tensor).float()))


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds as a dense one of real numbers: sparse and complex ones too."""
    plain = tensor.detach()
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    return torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain


def moves(tensor: torch.Tensor) -> bool:
    """Whether an optimizer can move it: numbers that are not whole."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What of a model's state is tensors; the rest (`get_extra_state`) is not compared."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, kw_only=True)
class Plainly:
    """How the reference trains: the user's model, loss and optimizer, one process."""

    config: Config
    parts: Parts
    precision: str
    device: torch.device
    outside: Outside
    """What the user's functions keep beside the model: the same before every training."""

    def train(self, batches: Sequence[Drawn]) -> ReferenceResult:
        """Updates from these batches, at a rate at which they can be compared."""
        rate = 1.0
        for attempt in range(TRIES):
            found = self.run(batches, rate)
            moved = found.moved()
            if moved == 0.0 or MOVES[0] <= moved <= MOVES[1] or attempt + 1 == TRIES:
                return found
            rate *= TARGET / moved if math.isfinite(moved) else 1 / 1024
        return found

    def run(
        self,
        batches: Sequence[Drawn],
        rate: float,
        *,
        divide: Divide | None = None,
        nudge: int | None = None,
        settled: bool = True,
        anew: bool = True,
    ) -> ReferenceResult:
        """Updates at this rate.

        `divide`: gradients of the parts of each batch are added up by their weights.
        `nudge`: the last digits of all weights are changed first, by this seed.
        `settled`: BatchNorm uses the statistics that it has, not those of a batch.
        `anew`: what is outside of the model does not stay as the training before left it.
        """
        if anew:
            self.outside.restore()
        model = self.model(settled=settled)
        if nudge is not None:
            _nudge(model, nudge)
        start = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = self._optimizer([p for _, p in named])
        for group in optimizer.param_groups:
            group["lr"] *= rate
        outputs: torch.Tensor | None = None
        unused = {name for name, _ in named}
        for batch in batches:
            sizes = [batch.count] if divide is None else list(divide(batch.count))
            total = 0.0
            for part in batch.parts(sizes):
                loss, weight, given = self.loss(model, part)
                if outputs is None and isinstance(given, torch.Tensor):
                    outputs = given.detach()
                if len(sizes) > 1:
                    if weight == 0.0 and not loss.isfinite():  # 0 / 0
                        continue
                    loss = loss if weight is None else loss * weight
                    total += weight or 0.0
                with still():
                    loss.backward()  # type: ignore[no-untyped-call]
            for _, parameter in named if total else ():
                if parameter.grad is not None:
                    parameter.grad /= total
            unused -= {name for name, parameter in named if parameter.grad is not None}
            if self.config.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_([p for _, p in named], self.config.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return ReferenceResult(
            start=start,
            weights=tensors_of(model),
            state={name: dict(optimizer.state[p]) for name, p in named if optimizer.state.get(p)},
            rate=rate,
            outputs=outputs,
            unused=unused,
        )

    def outputs(self, batch: Drawn, sizes: Sequence[int]) -> torch.Tensor:
        """What a new model gives for a batch, part by part, BatchNorm aside."""
        model = self.model(settled=True)
        with torch.no_grad():
            return torch.cat([self._forward(model, part.inputs) for part in batch.parts(sizes)])

    def carries(self, before: Drawn, batch: Drawn) -> bool:
        """Whether what a batch gives depends on which one the model has had before.

        Not on whether it had one: what counts calls is the same wherever the batch is divided.
        """
        found = []
        for earlier in (before, batch):
            model = self.model(settled=True)
            self.outside.restore()
            self.loss(model, earlier.whole())
            found.append(float(self.loss(model, batch.whole())[0].detach()))
        return all(map(math.isfinite, found)) and not math.isclose(*found, rel_tol=CARRIED)

    def model(self, *, settled: bool) -> nn.Module:
        """A new one, in training mode."""
        model = self.parts.build_model().to(self.device).train()
        if settled:
            settle(model)
        return model

    def loss(self, model: nn.Module, part: Samples) -> tuple[torch.Tensor, float | None, Any]:
        """Of a part: the loss, its weight (None: a sum), and the model's outputs if they show."""
        step, outputs = self.parts.step, None
        values = mapped(part.values, lambda tensor: tensor.to(self.device))
        with users_code(step, model, values, part.count):
            if isinstance(step, Supervised):
                inputs, targets = values
                outputs = self._forward(model, inputs)
                with still():
                    found = step.loss(outputs, targets)
            else:
                assert isinstance(step, OwnStep)
                with self._cast(), still():
                    found = step.function(model, values)
        if not isinstance(found, Mapping):
            return found, float(part.count), outputs
        weight = found.get("weight")
        if weight is None:
            return found["loss"], float(part.count), outputs
        return found["loss"], None if isinstance(weight, str) else float(weight), outputs

    def _forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        with self._cast(), still():
            return full_precision(model(inputs.to(self.device)))

    @contextlib.contextmanager
    def _cast(self) -> Iterator[None]:
        if self.precision != "bf16":
            yield
            return
        if self.device.type == "cpu":
            check_bf16()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's own, or torch's by its name: fused, as the strategies' is, only if large."""
        settings = self.config.optimizer
        if self.parts.own_optimizer:
            return self.parts.build_optimizer(parameters)
        large = sum(parameter.numel() for parameter in parameters) > FUSED_FROM
        rest: dict[str, Any] = {"weight_decay": settings.weight_decay, "fused": large or None}
        rest["foreach"] = False if not large else None
        if settings.name == "sgd":
            rest |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
            return lean.SGD(parameters, lr=settings.learning_rate, **rest)
        kind = lean.Adam if settings.name == "adam" else lean.AdamW
        return kind(parameters, lr=settings.learning_rate, **rest)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1 + NUDGE * noise)
