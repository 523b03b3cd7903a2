"""Updates of stock DistributedDataParallel over Gloo on AlexNet, with one fixed batch.

    MASTER_ADDR=... MASTER_PORT=... RANK=0 WORLD_SIZE=2 python -m benchmarks.peers.ddp_update 32 6

Prints, on every rank, the median seconds per update and the bytes that the kernel sent through
`eth0` per update. Two updates come first that do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import models

WARMUP = 2


def sent_bytes(interface: str = "eth0") -> int:
    """What the kernel has sent through an interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def main() -> None:
    batch, updates = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        models.build("alexnet", classes=10, channels=3, image_size=224).train()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    own = batch // dist.get_world_size()
    inputs, targets = torch.randn(own, 3, 224, 224), torch.randint(10, (own,))
    times, before = [], 0
    for number in range(WARMUP + updates):
        if number == WARMUP:
            before = sent_bytes()
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    sent = (sent_bytes() - before) / updates
    print(f"seconds {statistics.median(times[WARMUP:])} bytes {sent}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
