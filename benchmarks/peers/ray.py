"""Ray Train: its TorchTrainer runs DistributedDataParallel over Gloo in actors.

    python -m benchmarks.peers.ray CONFIG --result FILE [--processes N] [--threads N]

On the hosts of a lab a cluster is started: the head here, a node on every other host, each with the
visible cores; on one machine Ray starts by itself. A worker asks for its part of the cores, which
is the number of threads that Ray then gives it. `prepare_model` wraps the model.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers import common, training
from paceline.secure.files import write_private

PORT = 6379
PATIENCE_SECONDS = 180.0


def main() -> None:
    request = common.read_request(__doc__)
    common.require("ray")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Its own figures would go to a server on the internet.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    hosts = common.lab_hosts()
    # Its sockets are in there, and their paths may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        token = Path(folder, "token")
        write_private(token, secrets.token_hex(32))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        if len(hosts) < 2:
            run(request, Path(folder), hosts)
            return
        with cluster(hosts, Path(folder)):
            run(request, Path(folder), hosts)


@contextlib.contextmanager
def cluster(hosts: list[str], folder: Path) -> Iterator[None]:
    """A Ray cluster on the hosts; ends with everything ended."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    ray += ["--num-cpus", str(common.visible_cores()), "--disable-usage-stats"]
    head = [*ray, "--head", "--node-ip-address", hosts[0], "--port", str(PORT)]
    head += ["--include-dashboard", "false", "--temp-dir", str(folder / "s")]
    processes = [subprocess.Popen(head)]
    try:
        common.wait_for(processes[0], hosts[0], PORT, "Ray's head", PATIENCE_SECONDS)
        for host in hosts[1:]:
            node = [*ray, "--address", f"{hosts[0]}:{PORT}", "--node-ip-address", host]
            processes.append(subprocess.Popen(common.on_host(host, node)))
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()


def run(request: common.Request, folder: Path, hosts: list[str]) -> None:
    """Train on the cluster, or on this machine."""
    import ray  # type: ignore[import-not-found,unused-ignore]
    from ray.train import RunConfig, ScalingConfig  # type: ignore[import-not-found,unused-ignore]
    from ray.train.torch import (  # type: ignore[import-not-found,unused-ignore]
        TorchConfig,
        TorchTrainer,
    )

    cores = common.visible_cores()
    passed = {name: os.environ[name] for name in common.PASSED if name in os.environ}
    if len(hosts) > 1:
        ray.init(address=f"{hosts[0]}:{PORT}", runtime_env={"env_vars": passed})
    else:
        ray.init(num_cpus=cores, include_dashboard=False, _temp_dir=str(folder / "s"))
    try:
        ends = time.monotonic() + PATIENCE_SECONDS
        while sum(node["Alive"] for node in ray.nodes()) < max(1, len(hosts)):
            if time.monotonic() > ends:
                sys.exit(f"Ray's nodes did not come within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.5)
        scaling = ScalingConfig(
            num_workers=request.processes * max(1, len(hosts)),
            resources_per_worker={"CPU": max(1, cores // request.processes)},
        )
        TorchTrainer(
            worker,
            train_loop_config={"request": request},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=scaling,
            run_config=RunConfig(name="peer", storage_path=str(folder / "runs")),
        ).fit()
    finally:
        ray.shutdown()


def worker(settings: dict[str, common.Request]) -> None:
    """One rank, in an actor of Ray's."""
    import ray
    import ray.train
    from ray.train.torch import prepare_model

    context = ray.train.get_context()
    job = training.open_job(
        settings["request"],
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        place=context.get_local_rank(),
    )
    job.model = prepare_model(job.model)
    version = {"version": ray.__version__}
    training.train(job, training.plain_step(job), training.all_reduce, lambda: version)


if __name__ == "__main__":
    main()
