"""`processes` with `sync = "ddp"`: PyTorch's DistributedDataParallel over Gloo on one node.

Slower than shared memory on one node (see docs/decisions/0005-shared-memory.md), but every
rank has whole parameters, which an optimizer of the user's own may need.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import StrategyError
from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.batch_norm import whole_batch
from paceline.local.cores import set_threads
from paceline.local.gradient_hooks import GradientHooks
from paceline.local.group import init_gloo
from paceline.local.whole import WholeOptimizer, WorkerPerRank


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
        self._parallel = DistributedDataParallel(_Part(self._model), find_unused_parameters=True)
        # The parts are weighted with their samples already: the sum is the mean.
        self._parallel.register_comm_hook(None, _sum)
        self._optimize(self._model)
        self._whole = whole_batch(job, self._model, group=range(job.context.local_size))

    @property
    def model(self) -> nn.Module:
        return self._model

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        if len(targets) == 0:
            result = self._nothing(inputs)
        else:
            result = gradients(
                self.job, self._parallel, inputs, targets, total, step, self.worker, self._whole
            )
        for name, parameter in self._named:
            if name in self._hooks.names and parameter.grad is not None:
                parameter.grad = self._hooks.run(name, parameter.grad)
        self._apply()
        return result

    def _nothing(self, inputs: torch.Tensor) -> StepResult:
        """Nothing to add, but the others wait for this rank's part of both kinds of sums."""
        if self._whole is None:
            self._parallel(inputs).backward()
        else:
            # The others' gradients are summed under their backward pass, as statistics are.
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(self._whole.join, self._model)
                self._parallel(inputs).backward()
                joined.result()
        return StepResult(loss_sum=0.0, correct=0, samples=0)

    def close(self) -> None:
        self._hooks.close()

    def prepare_evaluation(self) -> None:
        for buffer in self._model.buffers():
            dist.broadcast(buffer, 0)


class _Part(nn.Module):
    """The model on a rank's part of a batch; of an empty part nothing is computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # DDP begins to sum when it sees a gradient: on an empty part that of this one.
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.model(inputs) if len(inputs) else self.nothing.sum()


def _sum(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares annotations with types, and ours are texts.
_sum.__annotations__.clear()
