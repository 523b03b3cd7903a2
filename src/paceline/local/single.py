"""`sequential` and `threads`: one process, one copy of the model, T intra-op threads."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.data.samples import Samples
from paceline.errors import PacelineError, UnsupportedError
from paceline.local.base import (
    Job,
    StepResult,
    autocast,
    gradients,
    layout,
    prepare_model,
    seed_step,
)
from paceline.local.batch_norm import whole_batch
from paceline.local.common import WholeOptimizer
from paceline.local.cores import set_threads
from paceline.local.steps import Step, Supervised


class Threads(WholeOptimizer):
    """One process with T intra-op threads: PyTorch's own way, hard to beat on few cores."""

    name = "threads"
    summary = "one process, T intra-op threads"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        self._model = prepare_model(job)
        if job.partition is not None:
            job.partition.place(self._model)
            self.job = dataclasses.replace(job, step=_after_forward(job))
        self._forward: nn.Module = _compiled(self._model) if job.compile else self._model
        if job.exchange is not None:
            self._forward = job.exchange.wrap(self._forward)
        self._optimize(self._model)
        self._whole = whole_batch(job, self._model)

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        if self.job.partition is not None:
            self.job.partition.begin(samples.count, total, self.least)
            if samples.count == 0:
                return self._features_only(samples.inputs, total, step)
        result = gradients(self.job, self._forward, samples, total, step, self.worker, self._whole)
        self._apply(result, total)
        return result

    def _features_only(self, inputs: torch.Tensor, total: int, step: int) -> StepResult:
        """A node without samples of its own computes its features of everyone's."""
        seed_step(self.job.seed, step, self.job.first_worker + self.worker)
        assert self.job.partition is not None
        whole = self._whole
        try:
            with contextlib.nullcontext() if whole is None else whole.update(self._model):
                with autocast(self.job):
                    outputs = self._forward(layout(self.job, inputs))
                self.job.partition.forward_is_over()
                backward_of_none(outputs)
        except (PacelineError, MemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UnsupportedError(
                f"the model cannot compute 0 samples ({reason}), and this node has none of this"
                " batch: use exchange.partition = 'none', or a workload.batch_size that leaves no"
                " node without samples, the last batch of an epoch included"
            ) from error
        self._apply(StepResult(), total)
        return StepResult()

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def parameters(self) -> int:
        partition = self.job.partition
        return super().parameters if partition is None else partition.parameters(self._model)

    def prepare_evaluation(self) -> None:
        if self.job.partition is not None:
            self.job.partition.gather()


class Sequential(Threads):
    """One process, one thread: the baseline of every speedup."""

    name = "sequential"
    summary = "one process, one thread"


def _after_forward(job: Job) -> Step:
    """The step, after whose loss no split layer may be left that this update has not called."""
    step = job.step
    if not isinstance(step, Supervised):
        raise UnsupportedError(
            "layers that are split over hosts need a model of one input and a loss of its outputs,"
            " not a step of your own: use exchange.partition = 'none'"
        )

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        value = step.loss(outputs, targets)
        if torch.is_grad_enabled() and job.partition is not None:
            job.partition.forward_is_over()
        return value

    return dataclasses.replace(step, loss=loss)


def _compiled(model: nn.Module) -> nn.Module:
    """The compiled model; its compiler is told too whether results must repeat."""
    repeat = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(repeat, warn_only=True)
    return torch.compile(model)  # type: ignore[return-value]


def backward_of_none(outputs: Any) -> None:
    """The backward pass of a node without samples: through all layers, and it adds nothing."""
    given = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
    given = [one for one in given if one.requires_grad]
    torch.autograd.backward(given, [torch.zeros_like(one) for one in given])
