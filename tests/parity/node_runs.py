"""Whole runs over several nodes, each a real process with its own place in the plan."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from ports import free_port
from runs import base_changes
from safetensors.torch import load_file

from paceline import api
from paceline.config import dump_config, load_config
from paceline.config.environment import rank_environment
from paceline.schema import NodePlan, Plan, RankContext, write_json

_NODE = """
import sys
from pathlib import Path
from paceline.config.environment import rank_context
from paceline.launch.node import run_node
from paceline.launch.rank import leave
from paceline.run import RunDirectory
leave(run_node(RunDirectory(Path(sys.argv[1])), rank_context(), silent=True))
"""


def train_nodes(
    folder: Path,
    nodes: list[NodePlan],
    *changes: str,
    exchange: str = "allreduce",
    backend: str = "gloo",
    timeout: float = 600.0,
    feature_layers: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Train over `nodes` (loopback stands for the network); the last weights and optimizer state.

    Entries of the optimizer are named "weight|entry".
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = api.resolve(load_config(None, (*base_changes(), *changes)))
    plan = Plan(
        nodes=tuple(dataclasses.replace(node, host=f"host-{n}") for n, node in enumerate(nodes)),
        exchange=exchange,
        partition="feature" if feature_layers else "none",
        feature_layers=feature_layers,
        batch_size=config.workload.global_batch(1),
    )
    (folder / "config.toml").write_text(dump_config(config))
    write_json(folder / "plan.json", plan)
    port = free_port()
    if backend == "mpi4py":
        _run_mpi(folder, len(nodes), port, timeout)
    else:
        _run_plain(folder, len(nodes), port, timeout)
    return state(folder)


def train_apart(
    folders: list[Path], nodes: list[NodePlan], *changes: str, exchange: str = "allreduce"
) -> dict[str, torch.Tensor]:
    """Like `train_nodes` over Gloo, every node with a run directory of its own."""
    config = api.resolve(load_config(None, (*base_changes(), *changes)))
    hosts = [dataclasses.replace(node, host=f"host-{n}") for n, node in enumerate(nodes)]
    batch = config.workload.global_batch(1)
    for folder in folders:
        (folder / "config.toml").write_text(dump_config(config))
        plan = Plan(nodes=tuple(hosts), exchange=exchange, batch_size=batch)
        write_json(folder / "plan.json", plan)
    port = free_port()
    commands = [
        ([sys.executable, "-c", _NODE, str(folder)], _environment(node, len(nodes), port, "gloo"))
        for node, folder in enumerate(folders)
    ]
    run_all(commands, 600.0)
    return state(folders[0])


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state under "weight|entry", of a run's last checkpoint."""
    latest = folder / "checkpoints" / "latest"
    return load_file(latest / "model.safetensors") | load_file(latest / "optimizer.safetensors")


def _environment(node: int, nodes: int, port: int, backend: str) -> dict[str, str]:
    context = RankContext(node=node, nodes=nodes, port=port, backend=backend)
    return (
        os.environ
        | rank_environment(context)
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a process that a signal ends says where it was
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
    )


def _run_plain(folder: Path, nodes: int, port: int, timeout: float) -> None:
    command = [sys.executable, "-c", _NODE, str(folder)]
    run_all([(command, _environment(node, nodes, port, "gloo")) for node in range(nodes)], timeout)


def run_all(commands: list[tuple[list[str], dict[str, str]]], timeout: float) -> None:
    """Run commands side by side, each in its environment; all must end well."""
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, environment in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    # All of them: the first that failed may only have missed another.
    assert not any(codes), "\n".join(
        f"process {number} of {len(codes)} ended with {code}:\n{output}"
        for number, (code, output) in enumerate(zip(codes, outputs, strict=True))
        if code
    )


def _run_mpi(folder: Path, nodes: int, port: int, timeout: float) -> None:
    place = (
        "import os;"
        "os.environ['PACELINE_NODE']=os.environ.get('OMPI_COMM_WORLD_RANK')"
        " or os.environ['PMI_RANK'];"
    )
    done = subprocess.run(
        [*_mpiexec(nodes), sys.executable, "-c", place + _NODE, str(folder)],
        env=_environment(0, nodes, port, "mpi4py"),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _mpiexec(size: int) -> list[str]:
    program = Path(sys.executable).parent / "mpiexec"
    return [str(program), "-n", str(size), "--oversubscribe", "--bind-to", "none"]


def metrics(folder: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
