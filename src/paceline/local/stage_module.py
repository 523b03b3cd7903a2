"""One stage of a cut model, as `torch.distributed.pipelining` runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.local.base import Job, autocast
from paceline.local.cut_graph import ModelGraph, Value

StageLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Which stage of which row this rank runs."""

    stage: int
    stages: int
    group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


class StageModule(nn.Module):
    """A stage's operations in the plan's precision, between tensors that can be sent."""

    def __init__(
        self, graph: fx.GraphModule, job: Job, place: StagePlace, outputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.graph = graph
        self._trained = [output.requires_grad for output in outputs]
        self._job = job
        self._place = place

    def forward(self, *inputs: torch.Tensor) -> Any:
        if not self._place.is_first:
            inputs = tuple(unpack(self._job, tensor) for tensor in inputs)
        with autocast(self._job):
            outputs = self.graph(*inputs)
        if self._place.is_last:
            return outputs[0]
        # What no later stage has a gradient for would get zeros, where PyTorch gives it none.
        return tuple(
            pack(self._job, tensor if trained else tensor.detach())
            for tensor, trained in zip(outputs, self._trained, strict=True)
        )


def pack(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it crosses a cut: in one piece, in the order in which it lies in memory.

    Gloo takes contiguous tensors only, and the neighbour receives raw bytes, so a
    channels-last image travels as what it is in memory, channels last.
    """
    if _channels_last(job, tensor):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous()


def unpack(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 3, 1, 2) if _channels_last(job, tensor) else tensor


def _channels_last(job: Job, tensor: torch.Tensor) -> bool:
    return job.memory_format == "channels_last" and tensor.dim() == 4


def build_schedule(
    job: Job,
    graph: ModelGraph,
    cuts: list[int],
    place: StagePlace,
    micro_batches: int,
    loss: StageLoss,
) -> ScheduleGPipe | Schedule1F1B:
    """The schedule of one rank for micro-batches of the size that `graph` was run with.

    All metadata is given, so that torch does not find it out by training on noise,
    which would spoil running statistics.
    """
    bounds = [0, *cuts, len(graph.order)]
    first, end = bounds[place.stage], bounds[place.stage + 1]
    inputs = [_example(graph.values[node.name]) for node in graph.crossing(first)]
    outputs = [_example(graph.values[node.name]) for node in graph.crossing(end)]
    module = StageModule(graph.stage(first, end), job, place, outputs)
    stage = PipelineStage(
        module,
        place.stage,
        place.stages,
        job.device,
        input_args=tuple(inputs if place.is_first else [pack(job, each) for each in inputs]),
        output_args=tuple(outputs if place.is_last else [pack(job, each) for each in outputs]),
        group=place.group,
    )
    # 1F1B starts with as many micro-batches as there are stages; with fewer it is GPipe.
    alternating = job.node.schedule == "1f1b" and micro_batches >= place.stages
    kind = Schedule1F1B if alternating else ScheduleGPipe
    # The loss of a micro-batch is weighted with its samples already.
    return kind(stage, micro_batches, loss_fn=loss, scale_grads=False)


def _example(value: Value | None) -> torch.Tensor:
    assert value is not None
    return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(
        value.requires_grad
    )
