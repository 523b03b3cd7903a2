"""Stock PyTorch: DistributedDataParallel over Gloo under torchrun, as its tutorial writes it.

    python -m benchmarks.peers.ddp CONFIG --result FILE [--processes N]

`DistributedSampler`, `DataLoader` without workers of its own, `DistributedDataParallel`, one
process per visible core unless N says otherwise, torchrun's own number of threads unless
`local.threads` says otherwise. Model, data and optimizer are those of CONFIG; the learning rate
grows with `reference_batch` but there is neither warm-up nor schedule, as in the tutorial.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers import common

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.schema import Config


def main() -> None:
    request = common.read_request(__doc__)
    if request.worker:
        train(request)
        return
    hosts = common.lab_hosts()
    processes = request.processes or common.visible_cores()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    worker = ["-m", "benchmarks.peers.ddp", *request.words]
    if len(hosts) < 2:
        sys.exit(common.run_together([[*torchrun, "--standalone", *worker]]))
    meeting = ["--nnodes", str(len(hosts)), "--master-addr", hosts[0], "--master-port", "29500"]
    commands = [
        [*torchrun, *meeting, "--node-rank", str(rank), *worker] for rank in range(len(hosts))
    ]
    away = [common.on_host(*each) for each in zip(hosts[1:], commands[1:], strict=True)]
    sys.exit(common.run_together([commands[0], *away]))


def train(request: common.Request) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from paceline.config import load_config
    from paceline.training.optimizers import batch_factor
    from paceline.training.parts import make_parts

    config = load_config(request.config)
    if config.local.threads:
        torch.set_num_threads(config.local.threads)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    begun = time.perf_counter()
    parts = make_parts(config)
    read_seconds = time.perf_counter() - begun
    torch.manual_seed(config.seed)
    batch = config.workload.global_batch(world)
    samples: Any = Samples(parts.dataset.train, augment=config.data.augment)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=config.seed)
    loader: DataLoader[Any] = DataLoader(samples, batch_size=batch // world, sampler=sampler)
    model = DistributedDataParallel(parts.build_model().train())
    optimizer = plain_optimizer(config, model, batch_factor(config.optimizer, batch))

    sent, busy, start = common.sent_bytes(), cpu_seconds(), time.perf_counter()
    clock = train_epochs(config, loader, model, optimizer, parts.loss, batch)
    seconds = time.perf_counter() - start
    used = cpu_seconds() - busy
    after = common.sent_bytes()
    traffic = after - sent if sent is not None and after is not None else 0
    first = os.environ["LOCAL_RANK"] == "0"
    totals = torch.tensor([used, float(traffic if first else 0)], dtype=torch.float64)
    dist.all_reduce(totals)
    test_loss, accuracy = evaluate(model.module, parts, rank=dist.get_rank(), world=world)
    if dist.get_rank() == 0:
        hosts = max(1, len(common.lab_hosts()))
        result = common.summary(clock) | {
            "seconds": seconds,
            "read_seconds": read_seconds,
            "train_loss": clock.epochs[-1]["train_loss"],
            "test_loss": test_loss,
            "test_accuracy": accuracy,
            "processes": world,
            "threads": torch.get_num_threads(),
            "batch_size": batch,
            "cpu_utilisation": float(totals[0]) / seconds / (hosts * common.visible_cores()),
            "bytes_sent": float(totals[1]),
            "version": torch.__version__,
        }
        common.write_result(request.result, result)
    dist.barrier()
    dist.destroy_process_group()


def train_epochs(
    config: Config,
    loader: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    batch: int,
) -> common.Clock:
    """Every epoch, or as many updates as are asked for, as PyTorch's tutorials write it."""
    clock, done, asked = common.Clock(), 0, config.train.steps
    for epoch in range(config.train.epochs):
        loader.sampler.set_epoch(epoch)
        loader.dataset.epoch = epoch
        clock.start()
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            clock.update()
            done += 1
            if done == asked:
                break
        clock.epoch(batch * len(losses), train_loss=sum(losses) / len(losses))
        if done == asked:
            break
    return clock


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


def evaluate(model: Any, parts: Any, *, rank: int, world: int) -> tuple[float, float]:
    """Loss and accuracy on the test data, every rank its part."""
    import torch
    import torch.distributed as dist

    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    test = parts.dataset.test
    own = np.arange(rank, len(test), world)
    with torch.inference_mode():
        for start in range(0, len(own), 256):
            inputs, targets = test.fetch(own[start : start + 256], epoch=0, augment=False)
            outputs = model(inputs)
            loss = float(parts.loss(outputs, targets)) * len(targets)
            correct = int((outputs.argmax(1) == targets).sum())
            sums += torch.tensor([loss, correct, len(targets)], dtype=torch.float64)
    dist.all_reduce(sums)
    loss_sum, hits, count = sums.tolist()
    return loss_sum / count, hits / count


def cpu_seconds() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
