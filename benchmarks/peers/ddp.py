"""Stock PyTorch: DistributedDataParallel over Gloo under torchrun, as its tutorial writes it.

    python -m benchmarks.peers.ddp CONFIG --result FILE [--processes N] [--threads N]

`DataLoader` without workers of its own, `DistributedDataParallel`, one process per visible core
unless N says otherwise, torchrun's own number of threads unless `--threads` or `local.threads` say
otherwise. Model, batches and optimizer are those of CONFIG; the learning rate grows with
`reference_batch` but there is neither warm-up nor schedule, as in the tutorial.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from benchmarks.peers import common, training


def main() -> None:
    request = common.read_request(__doc__)
    if request.worker:
        train(request)
    else:
        sys.exit(training.torchrun("benchmarks.peers.ddp", request))


def train(request: common.Request) -> None:
    """One rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = int(os.environ["LOCAL_RANK"])
    job = training.open_job(request, rank=rank, world=world, place=place)
    network = job.model
    job.model = DistributedDataParallel(network)

    def scores() -> dict[str, Any]:
        loss, accuracy = evaluate(network, job.parts, rank=rank, world=world)
        return {"test_loss": loss, "test_accuracy": accuracy}

    training.train(job, training.plain_step(job), training.all_reduce, more=scores)
    dist.barrier()
    training.leave_group()


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


if __name__ == "__main__":
    main()
