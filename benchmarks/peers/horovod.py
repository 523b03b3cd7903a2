"""Horovod, as its PyTorch guide writes it: one process per visible core, sums over Gloo.

    python -m benchmarks.peers.horovod CONFIG --result FILE [--processes N] [--threads N]

`hvd.DistributedOptimizer`, weights and optimizer state broadcast at the start; started on this
machine or on the hosts of the lab by horovodrun, which sets no number of threads. Model, batches
and optimizer are those of CONFIG, as in `benchmarks.peers.ddp`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers import common, training


def main() -> None:
    request = common.read_request(__doc__)
    common.require("horovod")
    if request.worker:
        train(request)
        return
    hosts = common.lab_hosts() or ["localhost"]
    sys.exit(common.run_together([command_of(request, hosts)]))


def command_of(request: common.Request, hosts: list[str]) -> list[str]:
    """What starts every rank on every host."""
    slots = ",".join(f"{host}:{request.processes}" for host in hosts)
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    launcher = [horovodrun, "--gloo", "-np", str(len(hosts) * request.processes), "-H", slots]
    return [*launcher, sys.executable, "-m", "benchmarks.peers.horovod", *request.words]


def train(request: common.Request) -> None:
    """One rank."""
    import horovod  # type: ignore[import-not-found,unused-ignore]
    import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]

    hvd.init()
    # Its ranks wait by sched_yield: pinned to a core that others use, too, one may never run again.
    places = {"rank": hvd.rank(), "world": hvd.size(), "place": hvd.local_rank()}
    job = training.open_job(request, **places, pinned=False)
    names = job.model.named_parameters()
    job.optimizer = hvd.DistributedOptimizer(job.optimizer, named_parameters=names)
    hvd.broadcast_parameters(job.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(job.optimizer, root_rank=0)
    training.train(
        job,
        training.plain_step(job),
        lambda vector: hvd.allreduce(vector, op=hvd.Sum),
        lambda: {"version": horovod.__version__},
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
