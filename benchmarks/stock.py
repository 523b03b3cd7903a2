"""Stock PyTorch, as its tutorials write it: one process, or DDP over Gloo under torchrun.

    python -m benchmarks.stock MODEL PRECISION BATCH SIZE CHANNELS CLASSES WARMUP UPDATES THREADS
    torchrun --nproc-per-node 2 -m benchmarks.stock ...        (THREADS 0: torchrun's own choice)

Prints the median seconds per update of the last UPDATES updates. One fixed batch
in memory: the most that stock PyTorch can do, with no time for data. PRECISION is fp32 or
bf16; bf16 is stock but for `describe_tiles`, without which it dies on some virtual machines.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import models
from paceline.local.tiles import describe_tiles


def main() -> None:
    name, precision, *numbers = sys.argv[1:]
    batch, size, channels, classes, warmup, updates, threads = (int(n) for n in numbers)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if precision == "bf16":
        describe_tiles()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    model: nn.Module = models.build(
        name, classes=classes, channels=channels, image_size=size
    ).train()
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if name == "mnist_cnn":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    inputs = torch.randn(batch // ranks, channels, size, size)
    targets = torch.randint(classes, (batch // ranks,))
    times = []
    for _ in range(warmup + updates):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    if ranks == 1 or dist.get_rank() == 0:
        print(f"seconds {statistics.median(times[warmup:])}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
