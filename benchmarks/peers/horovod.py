"""Horovod, as its PyTorch guide writes it: one process per visible core, sums over Gloo.

    python -m benchmarks.peers.horovod CONFIG --result FILE [--processes N]

`DistributedSampler`, `DataLoader`, `hvd.DistributedOptimizer`, weights and optimizer state
broadcast at the start; started by horovodrun on this machine or on the hosts of the lab.
Model, data and optimizer are those of CONFIG, as in `benchmarks.peers.ddp`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from typing import Any

from benchmarks.peers import common

INSTALL = (
    "pip download --no-deps --no-binary :all: horovod==0.28.1 && tar xf horovod-0.28.1.tar.gz"
    " && sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/'"
    " horovod-0.28.1/CMakeLists.txt horovod-0.28.1/horovod/torch/CMakeLists.txt"
    " && HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1"
    " pip install --no-build-isolation ./horovod-0.28.1"
)
"""0.28.1 is the last release; PyTorch since 2.1 needs C++17, which it does not ask for."""


def main() -> None:
    request = common.read_request(__doc__)
    if importlib.util.find_spec("horovod") is None or shutil.which("horovodrun") is None:
        common.not_installed(INSTALL)
    if request.worker:
        train(request)
        return
    hosts = common.lab_hosts() or ["localhost"]
    processes = request.processes or common.visible_cores()
    sys.exit(common.run_together([command_of(request, hosts, processes)]))


def command_of(request: common.Request, hosts: list[str], processes: int) -> list[str]:
    """What starts every rank on every host."""
    slots = ",".join(f"{host}:{processes}" for host in hosts)
    launcher = ["horovodrun", "--gloo", "-np", str(len(hosts) * processes), "-H", slots]
    return [*launcher, sys.executable, "-m", "benchmarks.peers.horovod", *request.words]


def train(request: common.Request) -> None:
    """One rank."""
    import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    from benchmarks.peers.ddp import Samples, cpu_seconds, plain_optimizer, train_epochs
    from paceline.config import load_config
    from paceline.training.optimizers import batch_factor
    from paceline.training.parts import make_parts

    config = load_config(request.config)
    hvd.init()
    world, rank = hvd.size(), hvd.rank()
    begun = time.perf_counter()
    parts = make_parts(config)
    read_seconds = time.perf_counter() - begun
    torch.manual_seed(config.seed)
    batch = config.workload.global_batch(world)
    samples: Any = Samples(parts.dataset.train, augment=config.data.augment)
    sampler: Any = DistributedSampler(samples, num_replicas=world, rank=rank, seed=config.seed)
    loader: DataLoader[Any] = DataLoader(samples, batch_size=batch // world, sampler=sampler)
    model = parts.build_model().train()
    stock = plain_optimizer(config, model, batch_factor(config.optimizer, batch))
    optimizer = hvd.DistributedOptimizer(stock, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sent, busy, start = common.sent_bytes(), cpu_seconds(), time.perf_counter()
    clock = train_epochs(config, loader, model, optimizer, parts.loss, batch)
    seconds = time.perf_counter() - start
    after = common.sent_bytes()
    traffic = after - sent if sent is not None and after is not None else 0
    own = [cpu_seconds() - busy, float(traffic if hvd.local_rank() == 0 else 0)]
    totals = hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Sum)
    if rank == 0:
        cores = hvd.cross_size() * common.visible_cores()
        result = common.summary(clock) | {
            "seconds": seconds,
            "read_seconds": read_seconds,
            "train_loss": clock.epochs[-1]["train_loss"],
            "processes": world,
            "threads": torch.get_num_threads(),
            "batch_size": batch,
            "cpu_utilisation": float(totals[0]) / seconds / cores,
            "bytes_sent": float(totals[1]),
        }
        common.write_result(request.result, result)
    hvd.shutdown()


if __name__ == "__main__":
    main()
