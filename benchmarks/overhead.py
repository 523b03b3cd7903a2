"""Paceline's training loop against a bare PyTorch loop with the same settings.

    python -m benchmarks.overhead [--rounds 7] [--updates 60]

One process, mnist_cnn, batch 128, Adam, all cores as intra-op threads; the two
alternate. The bar: at most 2% slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.interleave import interleave
from paceline import models
from paceline.config import config_from
from paceline.local.cores import set_threads, usable_cores
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan
from paceline.training.assemble import Task
from paceline.training.loop import train

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    cores, samples = usable_cores(), BATCH * options.updates
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)

    def bare() -> float:
        set_threads(cores)
        model = models.build("mnist_cnn", classes=10, channels=1).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
        order = torch.randperm(samples)
        start = time.perf_counter()
        for step in range(options.updates):
            part = order[step * BATCH : (step + 1) * BATCH]
            loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - start) / options.updates

    def paceline() -> float:
        from paceline.data import from_datasets
        from paceline.training.parts import Given

        data = torch.utils.data.TensorDataset(inputs, targets)
        small = torch.utils.data.TensorDataset(inputs[:64], targets[:64])
        config = config_from({"workload.batch_size": BATCH, "train.epochs": 1})
        plan = Plan(nodes=(NodePlan(strategy="threads", threads=cores),), batch_size=BATCH)
        with tempfile.TemporaryDirectory() as folder:
            given = Given(data=from_datasets(data, small))
            task = Task(config=config, plan=plan, run=RunDirectory(Path(folder)), given=given)
            summary = train(task).summary
        return float(summary["epoch_seconds_median"]) / options.updates

    found = interleave({"bare PyTorch": bare, "paceline": paceline}, options.rounds)
    # Rounds are minutes apart, the two of one round seconds: the ratio is taken within rounds.
    pairs = zip(found["paceline"].rounds, found["bare PyTorch"].rounds, strict=True)
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    for name, measured in found.items():
        print(
            f"{name:14} {measured.median * 1000:7.2f} ms per update"
            f"  (spread {measured.spread:.0%}, {options.rounds} rounds)"
        )
    print(f"paceline / bare: {ratio:.3f} (bar: at most 1.02)")


if __name__ == "__main__":
    main()
