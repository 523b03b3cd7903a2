"""`hogwild`: P processes, one shared copy of the weights, no locks, no waiting."""

from __future__ import annotations

import torch
from torch import nn

from paceline.local.base import (
    Job,
    LocalStrategy,
    OptimizerState,
    StepResult,
    clip_gradients,
    gradients,
    prepare_model,
    scale_rate,
)
from paceline.local.cores import set_threads
from paceline.local.shared import SharedModel
from paceline.local.state import read_state, write_state


class Hogwild(LocalStrategy):
    """Asynchronous: each process applies its own part's gradient as soon as it has it.

    A part's gradient is weighted with its samples over all samples, so that the
    updates of one global batch add up to one synchronous update, only from
    weights of different age. Every process has its own optimizer state; the
    first one's is saved. Runs do not repeat: never chosen unless asked for.
    """

    name = "hogwild"
    synchronous = False
    summary = "P processes update one shared copy without locks; asynchronous"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        self._shared = SharedModel(prepare_model(job), job)
        self._named = [(n, p) for n, p in self._shared.parameters.items() if p.requires_grad]
        self._optimizer = job.build_optimizer([p for _, p in self._named])

    @property
    def worker(self) -> int:
        return self.job.context.local_rank

    @property
    def workers(self) -> int:
        return self.job.context.local_size

    @property
    def model(self) -> nn.Module:
        return self._shared.model

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        result = gradients(self.job, self.model, inputs, targets, total, step, self.worker)
        if result.samples:
            clip_gradients((p for _, p in self._named), self.job.clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return result

    def prepare_evaluation(self) -> None:
        # Processes drift apart; here all have reached the same update.
        self._shared.board.barrier("hogwild")
        self._shared.share_buffers(lambda name: 0)

    def scale_rate(self, factor: float) -> None:
        scale_rate(self._optimizer, factor)

    def optimizer_state(self) -> OptimizerState:
        return read_state(self._optimizer, self._named)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        write_state(self._optimizer, self._named, state)

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._shared.load(tensors)
