"""`processes` with `sync = "ddp"`: PyTorch's DistributedDataParallel over Gloo on one node.

Slower than shared memory on one node (see docs/decisions/0005-shared-memory.md), but every
rank has whole parameters, which an optimizer of the user's own may need.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data.samples import Samples
from paceline.errors import StrategyError
from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.batch_norm import whole_batch
from paceline.local.common import WholeOptimizer, WorkerPerRank
from paceline.local.cores import set_threads
from paceline.local.gradient_hooks import GradientHooks
from paceline.local.group import init_gloo
from paceline.local.steps import Measure, Step, divide_by_weight, has_gradient


class DistributedProcesses(WorkerPerRank, WholeOptimizer):
    """Every rank has its own weights and optimizer; gradients are summed by all-reduce."""

    name = "processes"
    summary = "P processes x T threads, gradients summed by DDP over Gloo"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        set_threads(job.node.threads)
        init_gloo(job)
        self._model = prepare_model(job)
        self._hooks = GradientHooks(dict(self._model.named_parameters()))
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._model.modules()):
            raise StrategyError(
                "torch's DistributedDataParallel takes no SyncBatchNorm on the CPU: set local.sync"
                " = 'shared', or use BatchNorm, whose statistics are those of the whole batch too"
            )
        # A parameter may take no part in an update, here or on every rank.
        self._part = _Part(self._model, job.step)
        self._parallel = DistributedDataParallel(self._part, find_unused_parameters=True)
        # The parts are weighted already: what is wanted is their sum.
        self._parallel.register_comm_hook(None, _sum)
        self._optimize(self._model)
        self.job = dataclasses.replace(job, step=_Through(self._parallel, job.step))
        self._whole = whole_batch(job, self._model, group=range(job.context.local_size))

    @property
    def model(self) -> nn.Module:
        return self._model

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        if samples.count == 0:
            result = self._nothing()
        else:
            self._part.sizes = (samples.count, total)
            result = gradients(
                self.job, self._model, samples, total, step, self.worker, self._whole
            )
        counted, self._part.counted.grad = self._part.counted.grad, None
        assert counted is not None
        divide_by_weight((p for _, p in self._named), float(counted), total)
        for name, parameter in self._named:
            if name in self._hooks.names and parameter.grad is not None:
                parameter.grad = self._hooks.run(name, parameter.grad)
        self._apply(result, total)
        return result

    def _nothing(self) -> StepResult:
        """Nothing to add, but the others wait for this rank's part of both kinds of sums."""
        if self._whole is None:
            self._parallel(None).backward()
        else:
            # The others' gradients are summed under their backward pass, as statistics are.
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(self._whole.join, self._model)
                self._parallel(None).backward()
                joined.result()
        return StepResult()

    def close(self) -> None:
        self._hooks.close()

    def prepare_evaluation(self) -> None:
        for buffer in self._model.buffers():
            dist.broadcast(buffer, 0)


class _Part(nn.Module):
    """The step on a rank's part of a batch; of an empty part nothing is computed."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model, self.step = model, step
        self.sizes = (0, 0)
        """Samples of the part and of the global batch."""
        # Its gradient is what the part counts for: DDP adds it up with the others. On an empty part
        # it is the only one, and without any DDP would not begin.
        self.counted = nn.Parameter(torch.zeros(1))

    def forward(self, values: Any) -> Any:
        if values is None:
            return self.counted.sum() * 0.0
        found = self.step(self.model, values)
        factor, counted = found.part_of(*self.sizes)
        if not factor and not has_gradient(found.loss, self.model):
            loss = self.counted.sum() * 0.0
        else:
            loss = found.loss + self.counted.sum() * (counted / factor if factor else 0.0)
        # DDP looks for tensors in what it is given, not inside of our own objects.
        return loss, dataclasses.replace(found, loss=found.loss.detach())


@dataclass(frozen=True)
class _Through:
    """The step, run by DistributedDataParallel."""

    parallel: nn.Module
    step: Step

    @property
    def weighs(self) -> bool:
        return self.step.weighs

    @property
    def names(self) -> tuple[str, ...] | None:
        return self.step.names

    def __call__(self, model: nn.Module, values: Any) -> Measure:
        if not torch.is_grad_enabled():
            return self.step(model, values)
        loss, found = self.parallel(values)
        assert isinstance(found, Measure)
        return dataclasses.replace(found, loss=loss)


def _sum(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares annotations with types, and ours are texts.
_sum.__annotations__.clear()
