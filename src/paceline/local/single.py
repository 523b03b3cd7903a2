"""`sequential` and `threads`: one process, one copy of the model, T intra-op threads."""

from __future__ import annotations

import torch
from torch import nn

from paceline.local.base import (
    Job,
    LocalStrategy,
    OptimizerState,
    StepResult,
    autocast,
    clip_gradients,
    count_correct,
    full_precision,
    layout,
    mean_loss_part,
    prepare_model,
    seed_step,
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

    def update(self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int) -> StepResult:
        job, count = self.job, len(targets)
        seed_step(job.seed, step, self.worker)
        inputs, targets = layout(job, inputs), targets.to(job.device)
        with autocast(job):
            outputs = full_precision(self._forward(inputs))
        loss = job.loss(outputs, targets)
        mean_loss_part(loss, count, total).backward()  # type: ignore[no-untyped-call]
        clip_gradients((p for _, p in self._named), job.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss_sum=float(loss.detach()) * count,
            correct=count_correct(outputs, targets),
            samples=count,
        )

    @property
    def model(self) -> nn.Module:
        return self._model

    def set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def optimizer_state(self) -> OptimizerState:
        return read_state(self._optimizer, self._named)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        write_state(self._optimizer, self._named, state)


class Sequential(Threads):
    """One process, one thread: the baseline of every speedup."""

    name = "sequential"
    summary = "one process, one thread"
