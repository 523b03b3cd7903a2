"""`sequential` and `threads`: one process, one copy of the model, T intra-op threads."""

from __future__ import annotations

import torch
from torch import nn

from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.cores import set_threads
from paceline.local.whole import WholeOptimizer


class Threads(WholeOptimizer):
    """One process with T intra-op threads: PyTorch's own way, hard to beat on few cores."""

    name = "threads"
    summary = "one process, T intra-op threads"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        self._model = prepare_model(job)
        self._forward: nn.Module = torch.compile(self._model) if job.compile else self._model  # type: ignore[assignment]
        if job.exchange is not None:
            self._forward = job.exchange.wrap(self._forward)
        self._optimize(self._model)

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        result = gradients(
            self.job, self._forward, inputs, targets, total, step, worker=self.worker
        )
        self._apply()
        return result

    @property
    def model(self) -> nn.Module:
        return self._model


class Sequential(Threads):
    """One process, one thread: the baseline of every speedup."""

    name = "sequential"
    summary = "one process, one thread"
