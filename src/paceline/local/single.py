"""`sequential` and `threads`: one process, one copy of the model, T intra-op threads."""

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
from paceline.local.state import read_state, write_state


class Threads(LocalStrategy):
    """One process with T intra-op threads: PyTorch's own way, hard to beat on few cores."""

    name = "threads"
    summary = "one process, T intra-op threads"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        self._model = prepare_model(job)
        self._forward: nn.Module = torch.compile(self._model) if job.compile else self._model  # type: ignore[assignment]
        self._named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._optimizer = job.build_optimizer([p for _, p in self._named])

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        result = gradients(
            self.job, self._forward, inputs, targets, total, step, worker=self.worker
        )
        clip_gradients((p for _, p in self._named), self.job.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return result

    @property
    def model(self) -> nn.Module:
        return self._model

    def scale_rate(self, factor: float) -> None:
        scale_rate(self._optimizer, factor)

    def optimizer_state(self) -> OptimizerState:
        return read_state(self._optimizer, self._named)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        write_state(self._optimizer, self._named, state)


class Sequential(Threads):
    """One process, one thread: the baseline of every speedup."""

    name = "sequential"
    summary = "one process, one thread"
