"""DeepSpeed on CPUs: its engine around the model and the optimizer, sums over Gloo.

    python -m benchmarks.peers.deepspeed CONFIG --result FILE [--processes N] [--threads N]

Started by torchrun, whose variables `deepspeed.init_distributed` reads. Without ZeRO, which spreads
optimizer state over ranks to save memory: every rank has all of it, as with the other peers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.peers import common, training


def main() -> None:
    request = common.read_request(__doc__)
    common.require("deepspeed")
    if request.worker:
        train(request)
    else:
        sys.exit(training.torchrun("benchmarks.peers.deepspeed", request))


def train(request: common.Request) -> None:
    """One rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # it is not said by an argument
    import deepspeed  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = int(os.environ["LOCAL_RANK"])
    job = training.open_job(request, rank=rank, world=world, place=place)
    settings = {
        "train_micro_batch_size_per_gpu": job.batch // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is 1, which no other peer has
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=job.model, optimizer=job.optimizer, config=settings)

    def step(inputs: Any, targets: Any) -> float:
        loss = job.parts.loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    training.train(job, step, training.all_reduce, lambda: {"version": deepspeed.__version__})
    training.leave_group()


if __name__ == "__main__":
    main()
