"""TensorFlow: MultiWorkerMirroredStrategy (ring) or ParameterServerStrategy, layers in Keras.

    python -m benchmarks.peers.tensorflow CONFIG --result FILE [--variant mirrored|server]
                                          [--processes N] [--threads N]

The layers, first weights and batches of CONFIG are written down by PyTorch; workers that import
TensorFlow alone build and train them. `mirrored` trains synchronously, with the losses of one
process; `server` is asynchronous, as TensorFlow's is: workers take the newest weights from one
server, which has a host of its own where the lab has one with the role "server".
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import common

PORT = 23456
PLACE = "PACELINE_PEER_FOLDER"
"""Where the workers find what is to be trained."""


def main() -> None:
    request = common.read_request(__doc__, variants=("mirrored", "server"))
    common.require("tensorflow")
    if request.worker:
        from benchmarks.peers import tensorflow_worker

        tensorflow_worker.run(request, Path(os.environ[PLACE]))
        return
    with tempfile.TemporaryDirectory(dir=request.result.parent, prefix=".tensorflow-") as place:
        folder = Path(place)
        workers, server = hosts_of(request)
        facts = prepare(request, folder, world=len(workers) * request.processes)
        code = start(request, folder, workers, server)
        if code == 0:
            merge(request, folder, facts)
    sys.exit(code)


def hosts_of(request: common.Request) -> tuple[list[str], str]:
    """Addresses of the hosts of workers, and of the one with the parameter server."""
    path = os.environ.get("PACELINE_LAB_HOSTS")
    if not path:
        return ["localhost"], "localhost"
    hosts = tomllib.loads(Path(path).read_text())["host"]
    workers = [str(host["address"]) for host in hosts if host.get("role") != "server"]
    servers = [str(host["address"]) for host in hosts if host.get("role") == "server"]
    return workers, (servers or workers)[0]


def prepare(request: common.Request, folder: Path, *, world: int) -> dict[str, Any]:
    """Write layers, weights and samples for the workers."""
    import torch

    from benchmarks.peers.layers import describe
    from paceline.config import load_config
    from paceline.training.optimizers import batch_factor
    from paceline.training.parts import make_parts

    config = load_config(request.config)
    parts = make_parts(config)
    torch.manual_seed(config.seed)
    model = parts.build_model().train()
    batch = config.workload.global_batch(world)
    source = parts.dataset.train
    before = None
    for epoch in range(config.train.epochs):
        every = np.arange(len(source))
        inputs, targets = source.fetch(every, epoch=epoch, augment=config.data.augment)
        if before is not None and torch.equal(inputs, before):
            break  # samples that no epoch changes are written once
        before = inputs
        # TensorFlow's convolutions on CPUs want channels last.
        last = np.ascontiguousarray(inputs.permute(0, 2, 3, 1).numpy())
        np.save(folder / f"inputs-{epoch}.npy", last)
    np.save(folder / "targets.npy", targets.numpy().astype(np.int64))
    layers, weights = describe(model, inputs[:2])
    np.savez(folder / "weights.npz", **weights)
    settings = config.optimizer
    if settings.name not in ("sgd", "adam"):
        sys.exit(f"optimizer {settings.name!r} is not the same in TensorFlow: use sgd or adam")
    facts = {
        "layers": layers,
        "samples": len(source),
        "batch": batch,
        "world": world,
        "epochs": config.train.epochs,
        "steps": config.train.steps,
        "seed": config.seed,
        "optimizer": settings.name,
        "rate": settings.learning_rate * batch_factor(settings, batch),
        "momentum": settings.momentum,
        "decay": settings.weight_decay,
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def start(request: common.Request, folder: Path, workers: list[str], server: str) -> int:
    """Start every task of the cluster; gives the exit code."""
    ports = free_ports(len(workers) * request.processes + 2)
    places = [host for host in workers for _ in range(request.processes)]
    cluster = {"worker": [f"{host}:{ports.pop()}" for host in places]}
    if request.variant == "server":
        cluster |= {"ps": [f"{server}:{ports.pop()}"], "chief": [f"{server}:{ports.pop()}"]}
    commands = {}
    for job, addresses in cluster.items():
        for index, address in enumerate(addresses):
            task = {"cluster": cluster, "task": {"type": job, "index": index}}
            words = ["env", f"TF_CONFIG={json.dumps(task)}", f"{PLACE}={folder}"]
            words += ["TF_CPP_MIN_LOG_LEVEL=2", sys.executable, "-m", "benchmarks.peers.tensorflow"]
            words += request.words
            host = address.rpartition(":")[0]
            here = host in ("localhost", workers[0])
            commands[job, index] = words if here else common.on_host(host, words)
    if request.variant == "mirrored":
        return common.run_together(list(commands.values()))
    # Servers and workers of this strategy never end by themselves.
    chief = commands.pop(("chief", 0))
    waiting = [subprocess.Popen(command) for command in commands.values()]
    try:
        return common.run_together([chief])
    finally:
        for process in waiting:
            process.terminate()
        for process in waiting:
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has; those of a lab's hosts are all free, and the same everywhere."""
    if common.lab_hosts():
        return list(range(PORT, PORT + count))
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def merge(request: common.Request, folder: Path, facts: dict[str, Any]) -> None:
    """One result of what every worker left."""
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    first = parts[0]
    losses = np.mean([part["losses"] for part in parts], axis=0).tolist()
    clock = common.Clock(epochs=first["epochs"])
    begun = 0
    for epoch in clock.epochs:
        own = losses[begun : begun + epoch["updates"]]
        epoch["train_loss"] = sum(own) / len(own)
        begun += epoch["updates"]
    cores = max(1, len(common.lab_hosts())) * common.visible_cores()
    result = common.summary(clock) | {
        "seconds": first["seconds"],
        "losses": losses,
        "train_loss": clock.epochs[-1]["train_loss"],
        "processes": facts["world"],
        "threads": first["threads"],
        "batch_size": facts["batch"],
        "version": first["version"],
    }
    if request.variant == "mirrored":  # the other's workers are not asked
        result["cpu_utilisation"] = sum(part["cpu"] for part in parts) / first["seconds"] / cores
        result["bytes_sent"] = sum(part["sent"] for part in parts)
    common.write_result(request.result, result)


if __name__ == "__main__":
    main()
