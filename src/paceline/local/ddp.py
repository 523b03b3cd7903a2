"""`processes` with `sync = "ddp"`: PyTorch's DistributedDataParallel over Gloo on one node.

Slower than shared memory on one node (see docs/decisions/0005-shared-memory.md), but every
rank has whole parameters, which an optimizer of the user's own may need.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.local.base import Job, StepResult, gradients, prepare_model
from paceline.local.cores import set_threads
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
        self._parallel = DistributedDataParallel(self._model)
        # The parts are weighted with their samples already: the sum is the mean.
        self._parallel.register_comm_hook(None, _sum)
        self._optimize(self._model)

    @property
    def model(self) -> nn.Module:
        return self._model

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        if len(targets) == 0:
            # Nothing to add, but the others wait for this rank's part of the sum.
            (self._parallel(inputs).sum() * 0.0).backward()
            result = StepResult(loss_sum=0.0, correct=0, samples=0)
        else:
            result = gradients(self.job, self._parallel, inputs, targets, total, step, self.worker)
        self._apply()
        return result

    def prepare_evaluation(self) -> None:
        for buffer in self._model.buffers():
            dist.broadcast(buffer, 0)


def _sum(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares annotations with types, and ours are texts.
_sum.__annotations__.clear()
