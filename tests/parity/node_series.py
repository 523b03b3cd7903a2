"""Several whole runs over nodes, one after the other in the same processes.

Starting a process takes seconds and five updates take none, so a matrix of runs shares processes.
Every run opens a network of its own, as `run_node` always does. Over Gloo a run may need fewer
nodes than there are processes; MPI's world is always whole.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from node_runs import _environment, _mpiexec, run_all, state
from ports import free_port
from runs import base_changes

from paceline import api
from paceline.config import dump_config, load_config
from paceline.schema import NodePlan, Plan, write_json
from paceline.workflow.partitioning import partitioned

_SERIES = """
import dataclasses, json, os, sys
from pathlib import Path
if "PACELINE_NODE" not in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ["PACELINE_NODE"] = os.environ["OMPI_COMM_WORLD_RANK"]
from paceline.config.environment import rank_context
from paceline.launch.node import run_node
from paceline.launch.rank import leave
from paceline.run import RunDirectory
context = rank_context()
for folder, port, nodes in json.loads(Path(sys.argv[1]).read_text()):
    if context.node >= nodes:
        continue
    place = dataclasses.replace(context, port=port, nodes=nodes)
    assert run_node(RunDirectory(Path(folder)), place, silent=True) == 0, folder
leave(0)  # as our own ranks do: threads that wait inside Gloo abort an interpreter's usual end
"""


@dataclass(frozen=True)
class Run:
    """One run of a series."""

    exchange: str
    changes: tuple[str, ...]
    nodes: list[NodePlan]
    split: bool = False
    """Split the linear layers that are worth it over the nodes."""


def train_series(
    folder: Path, runs: list[Run], *, backend: str = "gloo", timeout: float = 600.0
) -> list[dict[str, torch.Tensor]]:
    """The last weights and optimizer state of every run."""
    size = max(len(run.nodes) for run in runs)
    folder.mkdir(parents=True, exist_ok=True)
    places = []
    for number, run in enumerate(runs):
        path = folder / f"run-{number}"
        path.mkdir()
        config = api.resolve(load_config(None, (*base_changes(), *run.changes)))
        hosts = [dataclasses.replace(n, host=f"host-{i}") for i, n in enumerate(run.nodes)]
        plan = Plan(
            nodes=tuple(hosts),
            exchange=run.exchange,
            batch_size=config.workload.global_batch(1),
        )
        if run.split:
            plan = partitioned(config, plan)
            assert plan.feature_layers
        (path / "config.toml").write_text(dump_config(config))
        write_json(path / "plan.json", plan)
        places.append((str(path), free_port(), len(run.nodes)))
    (folder / "series.json").write_text(json.dumps(places))
    command = [sys.executable, "-c", _SERIES, str(folder / "series.json")]
    if backend == "mpi4py":
        commands = [([*_mpiexec(size), *command], 0)]
    else:
        commands = [(command, node) for node in range(size)]
    run_all([(each, _environment(n, size, 0, backend)) for each, n in commands], timeout)
    return [state(Path(path)) for path, _, _ in places]


def refusal(folder: Path, run: Run) -> str:
    """What the nodes of a run that must not end well say."""
    with pytest.raises(AssertionError) as raised:
        train_series(folder, [run])
    return str(raised.value)
