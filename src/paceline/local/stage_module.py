"""One stage of a cut model, as `torch.distributed.pipelining` runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.local.base import Job, autocast
from paceline.local.cut_graph import ModelGraph, Value

StageLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class StageModule(nn.Module):
    """A stage's operations in the plan's precision, its outputs in the agreed memory format."""

    def __init__(self, graph: fx.GraphModule, job: Job, *, last: bool) -> None:
        super().__init__()
        self.graph = graph
        self._job = job
        self._last = last

    def forward(self, *inputs: torch.Tensor) -> Any:
        with autocast(self._job):
            outputs = self.graph(*inputs)
        if self._last:
            return outputs[0]
        # The neighbour receives raw bytes: both sides must mean the same order by them.
        return tuple(
            output.contiguous(memory_format=wire_format(self._job, output)) for output in outputs
        )


def wire_format(job: Job, tensor: torch.Tensor) -> torch.memory_format:
    """The memory format in which a tensor crosses a cut."""
    if job.memory_format == "channels_last" and tensor.dim() == 4:
        return torch.channels_last
    return torch.contiguous_format


@dataclass(frozen=True, kw_only=True)
class Place:
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


def build_schedule(
    job: Job, graph: ModelGraph, cuts: list[int], place: Place, micro_batches: int, loss: StageLoss
) -> ScheduleGPipe | Schedule1F1B:
    """The schedule of one rank for micro-batches of the size that `graph` was run with.

    All metadata is given, so that torch does not find it out by training on noise,
    which would spoil running statistics.
    """
    bounds = [0, *cuts, len(graph.order)]
    first, end = bounds[place.stage], bounds[place.stage + 1]
    module = StageModule(graph.stage(first, end), job, last=place.is_last)
    outputs = [graph.result] if place.is_last else graph.crossing(end)
    stage = PipelineStage(
        module,
        place.stage,
        place.stages,
        job.device,
        input_args=tuple(_example(job, graph.values[n.name]) for n in graph.crossing(first)),
        output_args=tuple(_example(job, graph.values[n.name]) for n in outputs),
        group=place.group,
    )
    kind = Schedule1F1B if job.node.schedule == "1f1b" else ScheduleGPipe
    # The loss of a micro-batch is weighted with its samples already.
    return kind(stage, micro_batches, loss_fn=loss, scale_grads=False)


def _example(job: Job, value: Value | None) -> torch.Tensor:
    assert value is not None
    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
    empty = empty.contiguous(memory_format=wire_format(job, empty))
    return empty.requires_grad_(value.requires_grad)
