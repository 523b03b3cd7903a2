"""`replicas`: one process, k threads, each with a replica that works on n/k of the batch."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from paceline.data.sampler import apportion
from paceline.local.base import Job, StepResult, gradients, prepare_model, step_seed
from paceline.local.cores import set_threads
from paceline.local.whole import WholeOptimizer


class ThreadDropout(nn.Module):
    """Dropout from a generator of its own: the global one would be drawn from by all threads."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.generator = torch.Generator()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0.0:
            return inputs
        kept = 1.0 - self.rate
        mask = torch.empty_like(inputs).bernoulli_(kept, generator=self.generator)
        return inputs * mask.div_(kept)


class Replicas(WholeOptimizer):
    """Replicas share the weights' memory and have gradients of their own, which are summed.

    The sum goes into the first replica's gradients, which are the optimizer's:
    no other copy is made. Dropout layers draw from one generator per replica;
    `functional.dropout` inside a model draws from the global one and does not
    repeat. BatchNorm normalises each replica's part by itself, and the running
    statistics that are kept are the first replica's.
    """

    name = "replicas"
    summary = "one process, k threads, each a replica on n/k of the batch"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        count = job.node.replicas
        set_threads(count * job.node.threads)  # of the sum and the optimizer
        self._model = prepare_model(job)
        self._optimize(self._model)
        self._replicas = [_replica(self._model) for _ in range(count)]
        names = {name for name, _ in self._named}
        self._gradients = [
            [p for n, p in replica.named_parameters() if n in names] for replica in self._replicas
        ]
        self._pool = ThreadPoolExecutor(
            count,
            thread_name_prefix="paceline-replica",
            initializer=set_threads,
            initargs=(job.node.threads,),
        )

    def update(
        self, inputs: torch.Tensor, targets: torch.Tensor, total: int, step: int
    ) -> StepResult:
        sizes = apportion(len(targets), [1.0] * len(self._replicas))
        parts = zip(
            self._replicas, torch.split(inputs, sizes), torch.split(targets, sizes), strict=True
        )
        running = [
            self._pool.submit(self._part, number, replica, part_inputs, part_targets, total, step)
            for number, (replica, part_inputs, part_targets) in enumerate(parts)
        ]
        results = [future.result() for future in running]
        self._collect()
        self._apply()
        return StepResult(
            loss_sum=sum(result.loss_sum for result in results),
            correct=sum(result.correct for result in results),
            samples=sum(result.samples for result in results),
        )

    def _part(
        self,
        number: int,
        replica: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        total: int,
        step: int,
    ) -> StepResult:
        for index, layer in enumerate(replica.modules()):
            if isinstance(layer, ThreadDropout):
                layer.generator.manual_seed(
                    step_seed(self.job.seed + index, step, self.job.first_worker * 64 + number)
                )
        return gradients(self.job, replica, inputs, targets, total, step, worker=None)

    @torch.no_grad()
    def _collect(self) -> None:
        """Sum the replicas' gradients into the first's and hand them to the optimizer."""
        first = self._gradients[0]
        for others in self._gradients[1:]:
            pairs = [(a, b) for a, b in zip(first, others, strict=True) if b.grad is not None]
            for a, b in pairs:
                if a.grad is None:
                    a.grad = b.grad
                elif b.grad is not None:
                    a.grad.add_(b.grad)
                b.grad = None
        for (_, parameter), a in zip(self._named, first, strict=True):
            parameter.grad, a.grad = a.grad, None

    @property
    def model(self) -> nn.Module:
        return self._model

    def prepare_evaluation(self) -> None:
        kept = dict(self._replicas[0].named_buffers())
        for name, buffer in self._model.named_buffers():
            buffer.copy_(kept[name])

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._model.load_state_dict(tensors)
        for replica in self._replicas:
            buffers = dict(replica.named_buffers())
            for name, buffer in self._model.named_buffers():
                buffers[name].copy_(buffer)

    def close(self) -> None:
        self._pool.shutdown()


def _replica(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are the same memory."""
    replica = copy.deepcopy(model)
    for mine, original in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = original.data
    for parent in list(replica.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Dropout):
                setattr(parent, name, ThreadDropout(layer.p).train(layer.training))
    return replica
