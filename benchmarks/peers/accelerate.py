"""Hugging Face Accelerate on CPUs, as its guide writes it: prepare, backward, step.

    python -m benchmarks.peers.accelerate CONFIG --result FILE [--processes N] [--threads N]

Started by torchrun, as its guide allows and as `accelerate launch` does. `split_batches` makes
every rank take its part of each batch that the loader gives, so that all train on the batches of
CONFIG.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.peers import common, training


def main() -> None:
    request = common.read_request(__doc__)
    common.require("accelerate")
    if request.worker:
        train(request)
    else:
        sys.exit(training.torchrun("benchmarks.peers.accelerate", request))


def train(request: common.Request) -> None:
    """One rank."""
    import accelerate  # type: ignore[import-not-found,unused-ignore]

    settings = accelerate.DataLoaderConfiguration(split_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    rank, world = accelerator.process_index, accelerator.num_processes
    place = int(os.environ.get("LOCAL_RANK", "0"))
    job = training.open_job(request, rank=rank, world=world, place=place, whole=True)
    job.model, job.optimizer, job.loader = accelerator.prepare(job.model, job.optimizer, job.loader)

    def step(inputs: Any, targets: Any) -> float:
        job.optimizer.zero_grad()
        loss = job.parts.loss(job.model(inputs), targets)
        accelerator.backward(loss)
        job.optimizer.step()
        return float(loss.detach())

    training.train(job, step, training.all_reduce, lambda: {"version": accelerate.__version__})
    training.leave_group()


if __name__ == "__main__":
    main()
