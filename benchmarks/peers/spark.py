"""Apache Spark: its TorchDistributor runs the stock DDP training as barrier tasks.

    python -m benchmarks.peers.spark CONFIG --result FILE [--processes N] [--threads N]

On the hosts of a lab a standalone cluster is started: the master here, a worker on every host with
one core for each process. On one machine Spark runs in local mode. Training itself is that of
`benchmarks.peers.ddp`: what Spark adds is how ranks are started and watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import common

PORT = 7077
PATIENCE_SECONDS = 120.0


def main() -> None:
    request = common.read_request(__doc__)
    common.require("spark")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    hosts = common.lab_hosts()
    processes = request.processes
    # A task's Python is Spark's to choose, unless it is told.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if len(hosts) < 2:
        run(request, f"local[{processes}]", processes, cores=processes)
        return
    with cluster(hosts, processes) as master:
        run(request, master, len(hosts) * processes, cores=processes)


@contextlib.contextmanager
def cluster(hosts: list[str], cores: int) -> Iterator[str]:
    """A standalone cluster: gives the master's address and ends with everything ended."""
    import pyspark  # type: ignore[import-not-found,unused-ignore]

    home = str(Path(pyspark.__file__).parent)
    starter, address = f"{home}/bin/spark-class", f"spark://{hosts[0]}:{PORT}"
    variables = ["env", f"SPARK_HOME={home}", f"PYSPARK_PYTHON={sys.executable}"]
    head = [*variables, starter, "org.apache.spark.deploy.master.Master"]
    head += ["--host", hosts[0], "--port", str(PORT)]
    processes = [subprocess.Popen(head)]
    try:
        common.wait_for(processes[0], hosts[0], PORT, "Spark's master", PATIENCE_SECONDS)
        for place, host in enumerate(hosts):
            kind = "org.apache.spark.deploy.worker.Worker"
            worker = [*variables, starter, kind, "--host", host, "--cores", str(cores), address]
            command = worker if place == 0 else common.on_host(host, worker)
            processes.append(subprocess.Popen(command))
        yield address
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def run(request: common.Request, master: str, processes: int, *, cores: int) -> None:
    """Train, and take out of the result what ranks cannot know of each other under Spark."""
    import pyspark
    from pyspark.ml.torch.distributor import (  # type: ignore[import-not-found,unused-ignore]
        TorchDistributor,
    )
    from pyspark.sql import SparkSession  # type: ignore[import-not-found,unused-ignore]

    builder = SparkSession.builder.master(master).appName("paceline peer")
    for key, value in settings(cores).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        local = master.startswith("local")
        distributor = TorchDistributor(num_processes=processes, local_mode=local, use_gpu=False)
        distributor.run(worker, request)
    finally:
        session.stop()
    result: dict[str, Any] = json.loads(request.result.read_text())
    result.pop("bytes_sent", None)  # every task believes itself the first of its host
    result["version"] = pyspark.__version__
    common.write_result(request.result, result)


def settings(cores: int) -> dict[str, str]:
    """What Spark must be told."""
    passed = {name: os.environ[name] for name in common.PASSED if name in os.environ}
    return {
        "spark.executor.cores": str(cores),
        "spark.ui.enabled": "false",
        "spark.driver.host": (common.lab_hosts() or ["localhost"])[0],
        **{f"spark.executorEnv.{name}": value for name, value in passed.items()},
    }


def worker(request: common.Request) -> None:
    """One rank, in a task of Spark's."""
    from benchmarks.peers import ddp

    ddp.train(request)


if __name__ == "__main__":
    main()
