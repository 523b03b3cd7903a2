"""What runs on every host of a bench: `python -m benchmarks.lab.worker BENCH.json RESULT.json`.

All trials take turns in one process per host, so that noise hits all alike and
nothing is timed but updates.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lab.served import ServingThread, join_servers, served_context
from benchmarks.lab.trials import Bench, Timing, Timings, Trial
from paceline import local
from paceline.config import config_from
from paceline.config.environment import rank_context
from paceline.data.sampler import GlobalSampler, apportion
from paceline.data.samples import Stacked
from paceline.errors import PacelineError
from paceline.exchange import exchange_class
from paceline.exchange.network import Network, Traffic
from paceline.exchange.opening import open_network
from paceline.exchange.servers.client import Served
from paceline.local.cores import set_threads
from paceline.local.memory import give_back_memory, keep_freed_memory
from paceline.run import RunDirectory
from paceline.schema import RankContext, read_json, write_json
from paceline.training.assemble import Task, beginning_of, make_job
from paceline.training.device import use_deterministic
from paceline.training.parts import Parts, make_parts
from paceline.training.shares import rebalanced
from paceline.workflow.partitioning import partitioned


class Stepper:
    """One trial, built: something that makes updates."""

    samples: int

    def step(self, update: int) -> None:
        """One update."""
        raise NotImplementedError

    def close(self) -> None:
        """Take it down."""


class PlanStepper(Stepper):
    """As `paceline train` would: the plan's local strategy and exchange on one real batch."""

    def __init__(self, trial: Trial, parts: Parts, context: RankContext, network: Network) -> None:
        self._served = network if isinstance(network, Served) else None
        config = config_from(dict(trial.settings))
        alone = trial.kind == "alone"
        plan = partitioned(config, trial.plan, parts)
        share = [0.0 if node.role == "server" else node.share for node in plan.nodes]
        batch = _batch(parts, plan.batch_size)
        sizes = apportion(len(batch[1]), share)
        own_part = (torch.split(each, sizes)[context.node].clone() for each in batch)
        self._samples = Stacked(*own_part)
        self.samples = sizes[context.node]
        own = alone or exchange_class(plan.exchange).own_loss
        self._total = self.samples if own else len(batch[1])
        self._whole = len(batch[1])
        place = RankContext(
            rank=0 if alone else context.node,
            world_size=1 if alone else context.nodes,
            node=context.node,
            nodes=1 if alone else context.nodes,
        )
        task = Task(
            config=config,
            plan=plan,
            run=RunDirectory(Path(os.devnull)),
            context=place,
            network=None if alone else network,
        )
        self.network = network
        self._job = make_job(task, parts)
        self._strategy = local.build(self._job)
        self._strategy.scale_rate(0.0)  # trials must not diverge

        if self._job.exchange is not None:
            self._job.exchange.start(beginning_of(self._strategy, 0))

    def step(self, update: int) -> None:
        if (exchange := self._job.exchange) is not None:
            exchange.before_update(self._total)
            exchange.begin(update=update, rate=0.0, samples=self.samples, total=self._whole)
        self._strategy.update(self._samples, self._total, update)

    def close(self) -> None:
        self._strategy.close()
        if self._job.exchange is not None:
            self._job.exchange.close()
        if self._served is not None:
            self._served.done(stop=False)
            self._served.close()


class StockStepper(Stepper):
    """DistributedDataParallel over Gloo as its tutorial writes it: equal parts, no tuning."""

    def __init__(self, trial: Trial, parts: Parts, context: RankContext) -> None:
        inputs, targets = _batch(parts, trial.plan.batch_size)
        sizes = apportion(len(targets), [1.0] * context.nodes)
        self._inputs = torch.split(inputs, sizes)[context.node].clone()
        self._targets = torch.split(targets, sizes)[context.node].clone()
        self.samples = sizes[context.node]
        set_threads(trial.plan.nodes[context.node].threads)
        self._loss = parts.loss
        self._model: nn.Module = nn.parallel.DistributedDataParallel(parts.build_model().train())
        config = config_from(dict(trial.settings))
        kind = torch.optim.SGD if config.optimizer.name == "sgd" else torch.optim.Adam
        extra: dict[str, Any] = (
            {"momentum": config.optimizer.momentum} if config.optimizer.name == "sgd" else {}
        )
        self._optimizer = kind(self._model.parameters(), lr=0.0, **extra)

    def step(self, update: int) -> None:
        loss = self._loss(self._model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _batch(parts: Parts, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = GlobalSampler(samples=len(parts.dataset.train), batch_size=size, seed=0)
    return parts.dataset.train.fetch(sampler.batch(0, 0), epoch=0, augment=False)


def _build(
    trial: Trial, parts: Parts, context: RankContext, network: Network, turn: int
) -> Stepper | ServingThread:
    if trial.kind == "ddp":
        return StockStepper(trial, parts, context)
    if trial.plan.servers:
        place = served_context(context, turn)
        if context.node in trial.plan.servers:
            return ServingThread(trial, place)
        return PlanStepper(trial, parts, context, join_servers(trial, place))
    return PlanStepper(trial, parts, context, network)


def run(bench: Bench) -> Timings:
    """All rounds of all trials; every host calls it."""
    context = rank_context()
    keep_freed_memory()
    network = open_network(context, list(bench.hosts), deadline=bench.deadline)
    if any(trial.kind == "ddp" for trial in bench.trials):
        dist.init_process_group(
            "gloo",
            store=network.store("stock"),
            rank=context.node,
            world_size=context.nodes,
        )
    timings: list[Timing] = []
    opened: dict[str, Parts] = {}
    for trial in bench.trials:
        key = _key(trial)
        if key not in opened:
            opened[key] = make_parts(config_from(dict(trial.settings)))
    trials = [_settled(trial, opened[_key(trial)], context, network) for trial in bench.trials]
    for number in range(bench.rounds):
        for trial in trials:
            if trial.rounds is not None and number >= trial.rounds:
                continue
            parts = opened[_key(trial)]
            timings.append(_time(trial, number, parts, context, network, len(timings)))
            print(f"{trial.name}: {timings[-1].seconds:.3f} s per update", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    network.barrier("the end")
    network.close()
    return Timings(timings=tuple(timings))


def _key(trial: Trial) -> str:
    return repr(sorted(trial.settings.items()))


def _settled(trial: Trial, parts: Parts, context: RankContext, network: Network) -> Trial:
    """The trial with the shares that training would come to."""
    for _ in range(trial.settle):
        timing = _time(trial, 0, parts, context, network, 0)
        speeds = [0.0] * network.size
        if not timing.failed:
            speeds[network.rank] = timing.samples / max(1e-9, timing.seconds - timing.waited)
        plan = trial.plan
        changed = rebalanced([node.share for node in plan.nodes], network.total(speeds, "speeds"))
        if changed is None:
            break
        nodes = [
            dataclasses.replace(node, share=share)
            for node, share in zip(plan.nodes, changed, strict=True)
        ]
        trial = dataclasses.replace(trial, plan=dataclasses.replace(plan, nodes=tuple(nodes)))
        if network.rank == 0:
            shares = ", ".join(f"{share:.1%}" for share in changed)
            print(f"{trial.name}: {timing.seconds:.3f} s per update; shares {shares}", flush=True)
    return trial


def _time(
    trial: Trial, number: int, parts: Parts, context: RankContext, network: Network, turn: int
) -> Timing:
    gc.collect()
    give_back_memory()  # what the trial before this one held
    host = network.hosts[context.node]
    stepper = None
    problem = ""
    # Stock DDP as its tutorial has it; everything else as training does.
    ours = config_from(dict(trial.settings)).train.deterministic
    use_deterministic(trial.kind != "ddp" and ours)
    try:
        stepper = _build(trial, parts, context, network, turn)
        for update in range(trial.warmup):
            stepper.step(update)
    except PacelineError as error:
        problem = str(error)
    # All hosts refuse what one refuses, or the others would wait for it.
    if network.total([1.0 if problem else 0.0], "ready")[0] or stepper is None:
        if stepper is not None:
            stepper.close()
        return Timing(
            trial=trial.name, round=number, host=host, seconds=0.0, samples=0, failed=problem
        )
    getattr(stepper, "network", network).traffic.take()
    before, start = kernel_counters(), time.perf_counter()
    processor = time.process_time()
    for update in range(trial.updates):
        stepper.step(trial.warmup + update)
    own = time.perf_counter() - start
    counted = getattr(stepper, "network", network).traffic.take()
    network.barrier("done")
    whole = time.perf_counter() - start
    after = kernel_counters()  # not before: a server is busy until its workers are done
    processor = time.process_time() - processor
    samples = stepper.samples
    stepper.close()
    timing = _timing(
        trial,
        number,
        host,
        own if trial.kind == "alone" else whole,
        samples,
        counted,
        [b - a for a, b in zip(before, after, strict=True)],
    )
    return dataclasses.replace(timing, processor=processor / trial.updates)


def _timing(
    trial: Trial,
    number: int,
    host: str,
    seconds: float,
    samples: int,
    counted: Traffic,
    kernel: list[int],
) -> Timing:
    each = trial.updates
    return Timing(
        trial=trial.name,
        round=number,
        host=host,
        seconds=seconds / each,
        samples=samples,
        bytes_sent=counted.bytes_sent / each,
        packets_received=kernel[1] / each,
        kernel_bytes_sent=kernel[2] / each,
        packets_sent=kernel[3] / each,
        waited=counted.waited / each,
    )


def kernel_counters() -> list[int]:
    """Bytes and packets received and sent by this host's interfaces, the loopback left out."""
    sums = [0, 0, 0, 0]
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != "lo":
            fields = [int(word) for word in rest.split()]
            for place, column in enumerate((0, 1, 8, 9)):
                sums[place] += fields[column]
    return sums


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), run(read_json(Bench, Path(sys.argv[1]))))
