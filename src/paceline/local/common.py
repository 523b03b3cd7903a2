"""What strategies have in common: where weights and optimizer states are, and who updates them."""

from __future__ import annotations

import torch
from torch import nn

from paceline.local.base import (
    LocalStrategy,
    OptimizerState,
    StepResult,
    agree_on_gradients,
    clip_gradients,
    scale_rate,
)
from paceline.local.pieces import PieceUpdate
from paceline.local.shared import SharedModel
from paceline.local.state import OwnOptimizer, read_state, write_state
from paceline.local.steps import divide_by_weight


class WholeOptimizer(LocalStrategy):
    """A strategy whose process holds an optimizer over whole parameters."""

    _named: list[tuple[str, nn.Parameter]]
    _optimizer: torch.optim.Optimizer
    _own: OwnOptimizer | None
    _counted: nn.Parameter | None = None
    """Its gradient is what this node's gradients count for, and travels with them."""
    steps_begun = 0
    """How often the optimizer has begun to change weights: until then they are as they were."""

    def _optimize(self, model: nn.Module) -> None:
        """Make the optimizer of the parameters that are trained."""
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._optimizer = self.job.build_optimizer([p for _, p in self._named])
        self._own = None if self.job.elementwise else OwnOptimizer(self._optimizer, self._named)
        if self.job.exchange is not None:
            partition = self.job.partition
            replicated = [
                p for name, p in self._named if partition is None or not partition.is_split(name)
            ]
            if self.job.step.weighs and self.job.exchange.adds_up:
                # First, and so in the bucket that leaves last: it is known after the last gradient.
                self._counted = nn.Parameter(torch.zeros(1, device=self.device))
                replicated = [self._counted, *replicated]
            self.job.exchange.attach(replicated)

    def _apply(self, result: StepResult, total: int) -> None:
        """Agree with the other nodes, divide, clip, update, forget the gradients."""
        exchange = self.job.exchange
        if exchange is None or self._finish(result, total):
            with self.job.span("optimizer"):
                self.steps_begun += 1
                if self.job.partition is None:
                    clip_gradients((p for _, p in self._named), self.job.clip_norm)
                else:
                    self.job.partition.clip(self._named, self.job.clip_norm)
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if exchange is not None:
            exchange.after_update()

    def _finish(self, result: StepResult, total: int) -> bool:
        """Agree with the other nodes on gradients, and on what they count for."""
        applied, counted = agree_on_gradients(
            self.job, self._counted, result, result.counted, total
        )
        if applied:
            divide_by_weight((p for _, p in self._named), counted, total)
        return applied

    def scale_rate(self, factor: float) -> None:
        scale_rate(self._optimizer, factor)

    def optimizer_state(self) -> OptimizerState:
        if self._own is not None:
            return self._own.read()
        state = read_state(self._optimizer, self._named)
        return state if self.job.partition is None else self.job.partition.whole_state(state)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        if self._own is not None:
            self._own.write(state)
            return
        if self.job.partition is not None:
            state = self.job.partition.own_state(state)
        write_state(self._optimizer, self._named, state)


class WorkerPerRank(LocalStrategy):
    """A strategy in which every rank works on a part of the batch of its own."""

    @property
    def worker(self) -> int:
        return self.job.context.local_rank


class SharedWeights(LocalStrategy):
    """A strategy whose ranks have one copy of the weights between them."""

    _shared: SharedModel

    @property
    def model(self) -> nn.Module:
        return self._shared.model

    def prepare_evaluation(self) -> None:
        self._shared.share_buffers(lambda name: 0)

    def spread_buffers(self) -> None:
        self._shared.share_buffers(lambda name: 0)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._shared.load(tensors)


class PiecewiseOptimizer(SharedWeights):
    """A strategy in which every rank updates pieces of the shared weights (see `pieces`)."""

    _pieces: PieceUpdate

    def scale_rate(self, factor: float) -> None:
        self._pieces.scale_rate(factor)

    def optimizer_state(self) -> OptimizerState:
        return self._pieces.state()

    def load_optimizer_state(self, state: OptimizerState) -> None:
        self._pieces.load_state(state)

    def close(self) -> None:
        self._pieces.close()
