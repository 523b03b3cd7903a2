"""`replicas`: one process, k threads, each with a replica that works on n/k of the batch."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import operator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from paceline.data.sampler import apportion
from paceline.data.samples import Samples
from paceline.errors import StrategyError
from paceline.local.base import Job, StepResult, gradients, prepare_model, step_seed
from paceline.local.batch_norm import whole_batch
from paceline.local.common import WholeOptimizer
from paceline.local.cores import set_threads
from paceline.local.faithful import random_states
from paceline.local.gradient_hooks import (
    GradientHooks,
    refuse_module_hooks,
    refuse_shared_memory,
)
from paceline.local.part_sums import LeftAloneError, ThreadSums
from paceline.local.steps import divide_by_weight
from paceline.local.still import begin_draws_anew


class ThreadDropout(nn.Dropout):
    """Dropout from a generator of its own: the global one would be drawn from by all threads."""

    generator: torch.Generator

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same as nn.Dropout's, of other random numbers."""
        if not self.training or self.p == 0.0:
            return inputs
        kept = 1.0 - self.p
        mask = torch.empty_like(inputs).bernoulli_(kept, generator=self.generator)
        if kept > 0.0:
            mask.div_(kept)
        return inputs.mul_(mask) if self.inplace else inputs * mask


class Replicas(WholeOptimizer):
    """Replicas share the weights' memory and have gradients of their own, which are summed.

    The sum goes into the first replica's gradients, which are the optimizer's:
    no other copy is made. Gradient hooks of parameters run on the sum. Dropout layers
    draw from one generator per replica; what draws from the global one
    (`functional.dropout`) would not repeat and is refused.
    """

    name = "replicas"
    summary = "one process, k threads, each a replica on n/k of the batch"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        count = job.node.replicas
        set_threads(count * job.node.threads)  # of the sum and the optimizer
        self._model = prepare_model(job)
        refuse_module_hooks(self._model, self.name, "one function, called by several threads")
        refuse_shared_memory(self._model, "replicas")
        self._hooks = GradientHooks(dict(self._model.named_parameters()))
        self._optimize(self._model)
        self._replicas = [_replica(self._model) for _ in range(count)]
        self._whole = whole_batch(job, self._model, replicas=count)
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

    def parts(self, count: int) -> list[int]:
        return apportion(count, [1.0] * len(self._replicas), self.least)

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        parts = samples.divided(self.parts(samples.count))
        if self.job.still:  # each part begins there, which is no draw of the model
            begin_draws_anew()
        for _, parameter in self._named:
            parameter.grad = None
        drawn = random_states()
        if self._whole is not None and isinstance(self._whole.sums, ThreadSums):
            self._whole.sums.start()
        running = [
            self._pool.submit(self._part, number, replica, part, total, step)
            for number, (replica, part) in enumerate(zip(self._replicas, parts, strict=True))
        ]
        concurrent.futures.wait(running)
        faults = [fault for future in running if (fault := future.exception()) is not None]
        if faults:  # those that only waited for another have nothing to tell
            raise next((f for f in faults if not isinstance(f, LeftAloneError)), faults[0])
        results = [future.result() for future in running]
        if random_states() != drawn:
            raise StrategyError(
                f"{type(self._model).__name__} draws random numbers other than those of nn.Dropout"
                " layers (functional.dropout, torch.rand), which do not repeat with"
                " local.strategy = 'replicas': use nn.Dropout, or local.strategy = 'processes'"
            )
        self._refuse_detours()
        result = functools.reduce(operator.add, results)
        alone = self.job.exchange is None
        self._collect(result.counted if alone else float(total), total)
        self._apply(result, total)
        return result

    def _refuse_detours(self) -> None:
        """A copy must compute by its own parameters alone: a closure is not copied with it."""
        for name, parameter in self._named:
            if parameter.grad is not None:
                raise StrategyError(
                    f"{type(self._model).__name__} calls the layer of {name} through something that"
                    " a copy of the model shares with it (a lambda or function that holds the"
                    " layer), so that local.strategy = 'replicas' would lose gradients: call the"
                    " layer by its attribute, or use local.strategy = 'processes' or 'threads'"
                )

    def _part(
        self,
        number: int,
        replica: nn.Module,
        samples: Samples,
        total: int,
        step: int,
    ) -> StepResult:
        for index, layer in enumerate(replica.modules()):
            if isinstance(layer, ThreadDropout):
                layer.generator.manual_seed(
                    step_seed(self.job.seed + index, step, self.job.first_worker * 64 + number)
                )
        sums = None if self._whole is None else self._whole.sums
        with sums.part(number) if isinstance(sums, ThreadSums) else contextlib.nullcontext():
            return gradients(
                self.job, replica, samples, total, step, worker=None, whole=self._whole
            )

    @torch.no_grad()
    def _collect(self, counted: float, total: int) -> None:
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
        divide_by_weight(first, counted, total)
        for (name, parameter), a in zip(self._named, first, strict=True):
            parameter.grad, a.grad = a.grad, None
            if parameter.grad is not None and name in self._hooks.names:
                parameter.grad = self._hooks.run(name, parameter.grad)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def copies(self) -> list[nn.Module]:
        return [self._model, *self._replicas]

    def prepare_evaluation(self) -> None:
        """Give the model what changes besides weights: the first replica's."""
        for mine, kept in zip(self._model.modules(), self._replicas[0].modules(), strict=True):
            for name, buffer in kept._buffers.items():
                if buffer is not None:
                    mine._buffers[name] = buffer.clone()
            for name, value in vars(kept).items():
                counted = value is None or isinstance(value, bool | int | float | str)
                if counted and name != "training":
                    vars(mine)[name] = value

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        self._model.load_state_dict(tensors)
        for replica in self._replicas:
            for mine, saved in zip(replica.modules(), self._model.modules(), strict=True):
                for name, buffer in saved._buffers.items():
                    mine._buffers[name] = None if buffer is None else buffer.clone()

    def close(self) -> None:
        self._pool.shutdown()
        self._hooks.close()


def _replica(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are the same memory."""
    try:
        replica = copy.deepcopy(model)
    except Exception as error:  # the model's own code: anything may come out
        reason = str(error).strip().split("\n")[0]
        raise StrategyError(
            f"{type(model).__name__} cannot be copied for local.strategy = 'replicas'"
            f" ({type(error).__name__}: {reason}): use local.strategy = 'processes' or 'threads'"
        ) from error
    for mine, original in zip(replica.parameters(), model.parameters(), strict=True):
        mine.data = original.data
    for layer in replica.modules():
        if type(layer) is nn.Dropout:  # in its place: whoever holds the layer holds it still
            layer.__class__ = ThreadDropout
            layer.generator = torch.Generator()  # type: ignore[assignment]
    return replica
