"""What the peers on PyTorch share: the same model, batches and optimizer, one loop, one result.

A peer brings how its ranks are started, how gradients are summed, and what a step is.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers import common

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.schema import Config

Step = Callable[[Any, Any], float]
"""(inputs, targets) -> this rank's loss, after an update."""


@dataclass(kw_only=True)
class Job:
    """What one rank trains."""

    request: common.Request
    config: Config
    parts: Any
    rank: int
    world: int
    place: int
    """Which of its host's ranks this is."""
    batch: int
    """Of all ranks together."""
    loader: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    read_seconds: float


def open_job(
    request: common.Request,
    *,
    rank: int,
    world: int,
    place: int,
    whole: bool = False,
    pinned: bool = True,
) -> Job:
    """Model, batches and optimizer of the configuration; `whole`: a loader of global batches."""
    import torch
    from torch.utils.data import DataLoader

    from paceline.config import load_config
    from paceline.training.optimizers import batch_factor
    from paceline.training.parts import make_parts

    common.use_cores(request, place, pinned=pinned)
    config = load_config(request.config)
    if config.local.threads and not request.threads:
        torch.set_num_threads(config.local.threads)
    begun = time.perf_counter()
    parts = make_parts(config)
    read_seconds = time.perf_counter() - begun
    torch.manual_seed(config.seed)
    batch = config.workload.global_batch(world)
    samples: Any = Samples(parts.dataset.train, augment=config.data.augment)
    own = (0, 1) if whole else (rank, world)
    batches: Any = SameBatches(len(samples), batch, config.seed, *own)
    loader: DataLoader[Any] = DataLoader(samples, batch_sampler=batches)
    model = parts.build_model().train()
    return Job(
        request=request,
        config=config,
        parts=parts,
        rank=rank,
        world=world,
        place=place,
        batch=batch,
        loader=loader,
        model=model,
        optimizer=plain_optimizer(config, model, batch_factor(config.optimizer, batch)),
        read_seconds=read_seconds,
    )


def plain_step(job: Job) -> Step:
    """An update as PyTorch's tutorials write it, of the job's model and optimizer."""

    def step(inputs: Any, targets: Any) -> float:
        job.optimizer.zero_grad()
        loss = job.parts.loss(job.model(inputs), targets)
        loss.backward()
        job.optimizer.step()
        return float(loss.detach())

    return step


Add = Callable[["torch.Tensor"], "torch.Tensor"]
"""The sum of a vector over all ranks."""


def train(job: Job, step: Step, add: Add, more: Callable[[], dict[str, Any]] = dict) -> None:
    """Train and write the result; `more` is called by all ranks at the end."""
    meter = Meter()
    clock = run_epochs(job, step)
    finish(job, clock, meter, add, more)


def finish(
    job: Job,
    clock: common.Clock,
    meter: Meter,
    add: Add,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write the result of a training that has just ended.

    Losses are means over ranks, which have equal parts of each batch: those of one process.
    """
    import torch

    own = [*meter.stop(first=job.place == 0), *(loss / job.world for loss in clock.losses)]
    totals = add(torch.tensor(own, dtype=torch.float64)).tolist()
    extra = more()
    if job.rank == 0:
        write(job, clock, meter.seconds, totals, extra)


def write(
    job: Job, clock: common.Clock, seconds: float, totals: list[float], extra: dict[str, Any]
) -> None:
    """What the first rank knows of all."""
    import torch

    used, traffic, *losses = totals
    start = 0
    for epoch in clock.epochs:
        part = losses[start : start + epoch["updates"]]
        epoch["train_loss"] = sum(part) / len(part)
        start += epoch["updates"]
    hosts = max(1, len(common.lab_hosts()))
    result = common.summary(clock) | {
        "seconds": seconds,
        "read_seconds": job.read_seconds,
        "losses": losses,
        "train_loss": clock.epochs[-1]["train_loss"],
        "processes": job.world,
        "threads": torch.get_num_threads(),
        "batch_size": job.batch,
        "cpu_utilisation": used / seconds / (hosts * common.visible_cores()),
        "bytes_sent": traffic,
        "torch": torch.__version__,
    }
    common.write_result(job.request.result, result | extra)


class Meter:
    """Processor time of this process and traffic of its host, from now on."""

    def __init__(self) -> None:
        self.sent, self.busy = common.sent_bytes(), cpu_seconds()
        self.start, self.seconds = time.perf_counter(), 0.0

    def stop(self, *, first: bool) -> tuple[float, float]:
        """Both since the start; traffic is counted by the first process of each host."""
        self.seconds = time.perf_counter() - self.start
        after = common.sent_bytes()
        traffic = after - self.sent if self.sent is not None and after is not None else 0
        return cpu_seconds() - self.busy, float(traffic if first else 0)


def run_epochs(job: Job, step: Step) -> common.Clock:
    """Every epoch, or as many updates as are asked for."""
    clock, done, asked = common.Clock(), 0, job.config.train.steps
    for epoch in range(job.config.train.epochs):
        set_epoch(job.loader, epoch)
        clock.start()
        for inputs, targets in job.loader:
            clock.losses.append(step(inputs, targets))
            clock.update()
            done += 1
            if done == asked:
                break
        clock.epoch(job.batch * len(clock.updates))
        if done == asked:
            break
    return clock


def set_epoch(loader: Any, epoch: int) -> None:
    """The order and the augmentation of this epoch, also below what a peer wrapped around."""
    sampler = loader.batch_sampler
    getattr(sampler, "batch_sampler", sampler).epoch = epoch
    loader.dataset.epoch = epoch


class SameBatches:
    """Paceline's global batches, of which a rank takes its equal part: a batch_sampler.

    A last batch that ranks cannot divide is filled up with its first samples, as
    DistributedSampler does.
    """

    def __init__(self, samples: int, batch: int, seed: int, rank: int, world: int) -> None:
        from paceline.data.sampler import GlobalSampler

        self.order = GlobalSampler(samples=samples, batch_size=batch, seed=seed)
        self.rank, self.world, self.epoch = rank, world, 0
        self.batch_size = batch // world
        self.drop_last = False

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            batch = self.order.batch(self.epoch, number)
            each = -(-len(batch) // self.world)
            whole = np.resize(batch, each * self.world)
            yield whole[self.rank * each : (self.rank + 1) * each].tolist()


class Samples:
    """A split of the data as a map-style dataset: one sample at a time, as DataLoader asks."""

    def __init__(self, source: Any, *, augment: bool) -> None:
        self.source = source
        self.augment = augment
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        inputs, targets = self.source.fetch(
            np.array([index]), epoch=self.epoch, augment=self.augment
        )
        return inputs[0], int(targets[0])


def plain_optimizer(config: Any, model: Any, factor: float) -> Any:
    """The optimizer of the configuration with PyTorch's own defaults."""
    import torch

    settings = config.optimizer
    rate, decay = settings.learning_rate * factor, settings.weight_decay
    if settings.name == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=rate, momentum=settings.momentum, weight_decay=decay
        )
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[settings.name](model.parameters(), lr=rate, weight_decay=decay)


def cpu_seconds() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def all_reduce(vector: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of torch.distributed."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(vector)
    return vector


def leave_group() -> None:
    """End the process group, if there is one, so that the rank can end.

    Stock PyTorch aborts now and then at the very end of a training (see `paceline.gloo`): its
    result would be lost.
    """
    import torch.distributed as dist

    from paceline.gloo import settle

    if dist.is_initialized():
        dist.destroy_process_group()
        settle(ending=True)


def torchrun(module: str, request: common.Request) -> int:
    """Start `module` as ranks on this machine, or on the hosts of the lab; gives the exit code."""
    hosts = common.lab_hosts()
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nproc-per-node", str(request.processes)]
    worker = ["-m", module, *request.words]
    if len(hosts) < 2:
        return common.run_together([[*launcher, "--standalone", *worker]])
    meeting = ["--nnodes", str(len(hosts)), "--master-addr", hosts[0], "--master-port", "29500"]
    commands = [
        [*launcher, *meeting, "--node-rank", str(rank), *worker] for rank in range(len(hosts))
    ]
    away = [common.on_host(*each) for each in zip(hosts[1:], commands[1:], strict=True)]
    return common.run_together([commands[0], *away])
