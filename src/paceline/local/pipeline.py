"""`pipeline` and `hybrid`: the model cut into stages, one process each, in R rows."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.sampler import apportion
from paceline.data.samples import Samples
from paceline.errors import DataError, DeadlineError, StrategyError, WorkerError
from paceline.local.base import (
    Job,
    StepResult,
    autocast,
    layout,
    least_part,
    prepare_model,
    seed_step,
)
from paceline.local.batch_norm import ALLOW, batch_norms, whole_batch
from paceline.local.common import PiecewiseOptimizer
from paceline.local.cores import set_threads
from paceline.local.cut_graph import ModelGraph, probe, trace
from paceline.local.cut_measure import Room, balanced_cuts
from paceline.local.cutting import micro_batch_count
from paceline.local.faithful import watched
from paceline.local.gradient_hooks import GradientHooks, refuse_module_hooks
from paceline.local.group import init_gloo, measure_bandwidth, row_groups
from paceline.local.pieces import PieceUpdate
from paceline.local.shared import SharedModel
from paceline.local.stage_module import StagePlace, build_schedule
from paceline.local.steps import Supervised, is_about_one_sample, one_sample
from paceline.local.values import full_precision


class Hybrid(PiecewiseOptimizer):
    """R rows of S stages: every row takes its part of the batch in M micro-batches.

    The weights are shared in memory by all ranks; a rank computes the gradients of
    its stage, and ranks of the same stage sum them. Activations and their gradients
    travel over Gloo, in bf16 where the stage computes in it.

    Dropout draws different numbers on each rank. BatchNorm needs M = 1, and then the rows
    add up its statistics; where `local_batch_norm` is allowed it normalises every micro-batch by
    itself, its running statistics move once per micro-batch, and the first row's are kept.

    A part that M does not divide is cut into the nearest number of equal
    micro-batches, 1 if need be: the gradient is exact in any case.
    """

    name = "hybrid"
    summary = "R rows x S stages, M micro-batches"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._step = _check(job)
        set_threads(job.node.threads)
        model = prepare_model(job)
        refuse_module_hooks(model, self.name, "its stages are traced, which loses hooks")
        hooks = GradientHooks(dict(model.named_parameters()))
        try:
            self._build(model, hooks)
        except BaseException:
            hooks.close()
            raise
        self._total, self._result = 0, StepResult()

    # --- building -------------------------------------------------------------

    def _build(self, model: nn.Module, hooks: GradientHooks) -> None:
        job = self.job
        stages, replicas = job.node.stages, job.node.replicas
        _check_batch_norm(job, model)
        self._least = least_part(model)
        size = self._sizes(job.batch_size)[0]
        sample = _sample(job, model, size)
        self._shared = SharedModel(model, job)
        self._board = self._shared.board
        init_gloo(job)
        rows = [[row * stages + stage for stage in range(stages)] for row in range(replicas)]
        self._place = StagePlace(
            stage=job.context.stage(stages),
            stages=stages,
            group=row_groups(rows, self._board.rank),
        )
        self._sample_type = sample.dtype
        self._graphs = {size: self._trace(sample)}
        whole = [] if self._graphs[size].any_size else [job.batch_size]
        for other in (*self._sizes(job.batch_size), *self._sizes(job.last_batch), *whole):
            self._graph(other)  # what it refuses, it refuses now, not after the first epoch
        self._cuts = self._agree_on_cuts(self._graphs[size], sample)
        self._schedules: dict[int, Any] = {}
        self._owners = self._find_owners(self._graphs[size])
        group = [row * stages + self._place.stage for row in range(replicas)]
        self._pieces = PieceUpdate(
            self._shared,
            job,
            names=[n for n, stage in self._owners.items() if self._trains(n, stage)],
            group=group,
            hooks=hooks,
        )
        self._whole = whole_batch(job, model, group=group) if replicas > 1 else None

    def _sizes(self, count: int) -> list[int]:
        """Samples of a micro-batch of each row that has any, for a batch of `count`."""
        parts = apportion(count, [1.0] * self.job.node.replicas, self._least)
        return [part // self._micro_batches(part) for part in parts if part]

    def _micro_batches(self, count: int) -> int:
        return micro_batch_count(count, self.job.node.micro_batches, self._least)

    def _trace(self, sample: torch.Tensor) -> ModelGraph:
        return trace(
            self.model, sample, stages=self._place.stages, context=partial(autocast, self.job)
        )

    def _agree_on_cuts(self, graph: ModelGraph, sample: torch.Tensor) -> list[int]:
        """The first rank measures and chooses; all cut at the same places."""
        node, board = self.job.node, self._board
        if node.split_at:
            return graph.resolve(node.split_at)
        room = Room(
            bytes_per_second=measure_bandwidth(self.job),
            memory_limit=_device_memory(self.device),
            micro_batches=node.micro_batches,
        )
        chosen = [0] * (node.stages - 1)
        board.enter("measuring layers")
        if board.rank == 0:
            chosen = balanced_cuts(graph, sample, node.stages, room, partial(autocast, self.job))
        return [int(position) for position in board.sum([float(c) for c in chosen], "cuts")]

    def _find_owners(self, graph: ModelGraph) -> dict[str, int]:
        """The stage that uses each parameter and buffer; the first where none does."""
        bounds = [0, *self._cuts, len(graph.order)]
        stages: dict[int, int] = {}
        for stage in range(self._place.stages):
            for node in graph.order[bounds[stage] : bounds[stage + 1]]:
                stages |= {id(tensor): stage for tensor in graph.tensors_of(node)}
        tensors = [*self._shared.parameters.items(), *self.model.named_buffers()]
        return {name: stages.get(id(tensor), 0) for name, tensor in tensors}

    def _trains(self, name: str, stage: int) -> bool:
        parameter = self._shared.parameters.get(name)
        return parameter is not None and parameter.requires_grad and stage == self._place.stage

    def _schedule(self, count: int) -> Any:
        """The schedule for `count` samples; kept, since an epoch has few different counts."""
        if count not in self._schedules:
            micro_batches = self._micro_batches(count)
            graph = self._graph(count // micro_batches)
            self._schedules[count] = build_schedule(
                self.job, graph, self._cuts, self._place, micro_batches, self._loss
            )
        return self._schedules[count]

    def _graph(self, size: int) -> ModelGraph:
        if size not in self._graphs:
            sample = _filled(self.job, size, self._sample_type)
            known = next(iter(self._graphs.values()))
            if known.any_size:
                try:
                    values = probe(known.module, sample, partial(autocast, self.job))
                except ValueError as error:
                    if is_about_one_sample(error):
                        raise DataError(one_sample(error)) from error
                    raise
                self._graphs[size] = ModelGraph(known.module, values, any_size=True)
            else:
                self._graphs[size] = self._trace(sample)
                if self._graphs[size].signature != known.signature:
                    first = next(iter(self._graphs))
                    raise StrategyError(
                        f"{type(self.model).__name__} computes {size} samples by other operations"
                        f" than {first}, so that its stages cannot be cut alike: use another"
                        " local.strategy, or make its forward pass the same for any batch size"
                    )
        return self._graphs[size]

    # --- training -------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self.job.context.replica(self._place.stages)

    @property
    def least(self) -> int:
        # What a part looks like between stages is tried on a part by itself.
        return self._least

    @property
    def reads_inputs(self) -> bool:
        return self._place.is_first

    def update(self, samples: Samples, total: int, step: int) -> StepResult:
        count, place = samples.count, self._place
        worker = self.job.first_worker + self.worker
        seed_step(self.job.seed, step, worker * place.stages + place.stage)
        self._total, self._result = total, StepResult()
        if count > 0:
            arguments = (layout(self.job, samples.inputs),) if place.is_first else ()
            target = samples.targets.to(self.device) if place.is_last else None
            schedule, whole = self._schedule(count), self._whole
            try:
                with contextlib.nullcontext() if whole is None else whole.update(self.model):
                    schedule.step(*arguments, target=target, return_outputs=False)
            except RuntimeError as error:
                raise self._explained(error) from error
        elif self._whole is not None:
            self._whole.join(self.model)
        self._pieces.step(self._result, total)
        return self._result

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A micro-batch's part of the mean over the global batch."""
        found = self._step.of(full_precision(outputs), targets)
        factor, counted = found.part_of(len(targets), self._total)
        if not factor and not math.isfinite(float(found.loss.detach())):
            raise StrategyError(
                "a micro-batch has the weight 0 and a loss that is not a number: divide by the"
                " weight only where it is above 0, as weight.clamp(min=1)"
            )
        self._result += StepResult.of(found, len(targets), counted)
        return found.loss if factor == 1.0 else found.loss * factor

    def _explained(self, error: RuntimeError) -> BaseException:
        """What a failed transfer means, or what the model itself raised."""
        if error.__cause__ is not None:  # torch wraps what a stage raises
            cause = error.__cause__
            return DataError(one_sample(cause)) if is_about_one_sample(cause) else cause
        text = str(error)
        if "imed out" in text:
            return DeadlineError(
                f"stage {self._place.stage} (rank {self._board.rank}) waited"
                f" {self._board.deadline:.0f} s for a neighbouring stage in update"
                f" {self._board.update(self._board.rank)}: it hangs or is far slower; raise"
                " train.deadline if it only needs time"
            )
        if "onnection" in text or "gloo" in text:
            return WorkerError("another rank failed")
        return error

    # --- state ----------------------------------------------------------------

    def prepare_evaluation(self) -> None:
        self._shared.share_buffers(lambda name: self._owners[name])

    def close(self) -> None:
        super().close()
        self._schedules.clear()
        self._graphs.clear()


class Pipeline(Hybrid):
    """S stages, one process each: one row of `hybrid`."""

    name = "pipeline"
    summary = "S stages in a row, M micro-batches"


def _check_batch_norm(job: Job, model: nn.Module) -> None:
    """Micro-batches come one after the other: none knows the statistics of those that follow."""
    if job.local_batch_norm or not batch_norms(model):
        return
    if job.node.micro_batches > 1:
        raise StrategyError(
            f"BatchNorm normalises by the whole batch, of which local.micro_batches ="
            f" {job.node.micro_batches} shows it a part at a time: set local.micro_batches = 1,"
            f" {ALLOW}"
        )
    if job.nodes > 1:
        raise StrategyError(
            f"BatchNorm normalises by the whole batch, but the stages of {job.node.strategy!r} have"
            f" no sums with other hosts: use local.strategy = 'processes' or 'threads', {ALLOW}"
        )


def _check(job: Job) -> Supervised:
    node = job.node
    if not isinstance(job.step, Supervised):
        raise StrategyError(
            f"local.strategy = {node.strategy!r} cuts a model of one input into stages, which a"
            " step of your own calls as a whole: use 'processes', 'replicas' or 'threads', or a"
            " loss of (outputs, targets) instead of the step"
        )
    if node.stages < 2:
        raise StrategyError(
            f"local.stages = {node.stages} leaves nothing to cut for {node.strategy!r}: set it to 2"
            " or more, or use local.strategy = 'threads'"
        )
    if not job.elementwise:
        raise StrategyError(
            "the optimizer does something else to pieces of parameters than to whole ones (tried),"
            f" and {node.strategy!r} divides them: use one that treats every number by itself, or"
            " local.strategy = 'threads'"
        )
    if job.compile:
        raise StrategyError(
            f"numerics.compile = true does not go with local.strategy = {node.strategy!r}, whose"
            " stages are traced already: leave it out"
        )
    return job.step


def _filled(job: Job, size: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (size, *job.sample_shape)
    generator = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        # The indices that any table has.
        return torch.randint(2, shape, generator=generator).to(job.device, dtype)
    return layout(job, torch.randn(shape, generator=generator).to(dtype))


def _sample(job: Job, model: nn.Module, size: int) -> torch.Tensor:
    """Made inputs of the data's shape and type, on which the model has been seen to run."""
    faults: list[Exception] = []
    for dtype in (job.sample_type,) if job.sample_type else (torch.float32, torch.int64):
        sample = _filled(job, size, dtype)
        try:
            with watched(model) as seen, autocast(job):
                model(sample.clone())
        except Exception as error:  # the model's own code: anything may come out
            faults.append(error)
            continue
        if seen:
            raise StrategyError(
                f"{type(model).__name__} cannot be cut into stages ({seen[0]}, which stages in"
                " different processes cannot keep): use another local.strategy"
            )
        return sample
    # One of the two is only about the type that the model does not take.
    fault = next((error for error in faults if "type" not in str(error)), faults[0])
    if is_about_one_sample(fault):
        raise DataError(one_sample(fault)) from fault
    reason = str(fault).strip().split("\n")[0]
    raise DataError(
        f"{type(model).__name__} does not run on {size} samples of shape {list(job.sample_shape)},"
        f" which the data has ({type(fault).__name__}: {reason}): make the model fit the data"
    ) from fault


def _device_memory(device: torch.device) -> float:
    """Stages of one machine share its memory; only GPUs have one each."""
    if device.type != "cuda":
        return math.inf
    return float(torch.cuda.get_device_properties(device).total_memory)
