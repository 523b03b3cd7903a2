"""Whole trainings in legs over nodes, one after the other in the same processes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node_runs import _environment, _mpiexec, run_all
from ports import free_port
from runs import base_changes

from paceline import api
from paceline.config import dump_config, load_config
from paceline.plan.teams import team_name
from paceline.schema import NodePlan, Plan, write_json
from paceline.schema.legs import Leg, LegsOrder
from paceline.schema.strategies import describe

_SERIES = """
import dataclasses, json, os, sys
from pathlib import Path
if "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ["PACELINE_NODE"] = os.environ["OMPI_COMM_WORLD_RANK"]
from paceline.config.environment import rank_context
from paceline.launch.rank import leave
from paceline.run import RunDirectory
from paceline.schema import read_json
from paceline.schema.legs import LegsOrder
from paceline.workflow.hosts import run_legs
sys.path.insert(0, sys.argv[2])
from wanting import pilot_wants
context = rank_context()
for folder, port, nodes, wants in json.loads(Path(sys.argv[1]).read_text()):
    if context.node >= nodes:
        continue
    place = dataclasses.replace(context, port=port, nodes=nodes)
    order = read_json(LegsOrder, Path(folder) / "order.json")
    with pilot_wants(wants):
        assert run_legs(RunDirectory(Path(folder)), place, order, silent=True) == 0, folder
leave(0)  # as our own ranks do: threads that wait inside Gloo abort an interpreter's usual end
"""


@dataclass(frozen=True)
class LegsRun:
    """One training of a series: how many nodes, its legs if they are given, its settings."""

    nodes: int
    changes: tuple[str, ...]
    script: Sequence[Leg] = ()
    threads: int = 1
    """Of every node."""
    wants: tuple[str, ...] = ()
    """Options that are taken as soon as their ranks stand by, the first that is not out: whether
    they are faster depends on what else the machine does."""


def everyone(nodes: int, batch: int = 24, threads: int = 1) -> Plan:
    """All nodes, as a launcher would tell them."""
    plain = NodePlan(strategy="threads", threads=threads) if threads > 1 else NodePlan()
    named = (dataclasses.replace(plain, host=f"host-{n}") for n in range(nodes))
    return Plan(nodes=tuple(named), batch_size=batch)


def leg(
    nodes: int,
    first: int,
    updates: int,
    members: Sequence[int],
    *,
    shares: Sequence[float],
    layers: tuple[str, ...] = (),
    locals_: Sequence[dict[str, Any]] = (),
    **changes: object,
) -> Leg:
    """A leg of some of the nodes; `layers` are split; `changes` are other fields of the plan.

    `locals_`: what each of the nodes does with its cores.
    """
    whole = everyone(nodes)
    plan = dataclasses.replace(
        whole,
        nodes=tuple(
            dataclasses.replace(whole.nodes[member], share=share, **own)
            for member, share, own in zip(
                members, shares, locals_ or [{}] * len(members), strict=True
            )
        ),
        partition="feature" if layers else "none",
        feature_layers=layers,
        **changes,  # type: ignore[arg-type]
    )
    words = [team_name(whole, members), plan.exchange, plan.memory_format]
    words += ["split"] if layers else []
    words += [describe(node) for node in plan.nodes if node.strategy != "sequential"]
    words += [f"buckets of {plan.bucket_mb} MB"] if plan.bucket_mb else []
    return Leg(name=", ".join(words), plan=plan, first=first, updates=updates)


def train_legs_over_nodes(
    folder: Path, runs: Sequence[LegsRun], *, backend: str = "gloo", timeout: float = 600.0
) -> list[Path]:
    """The folders of the runs, which have ended well."""
    size = max(run.nodes for run in runs)
    folder.mkdir(parents=True, exist_ok=True)
    places = []
    for number, run in enumerate(runs):
        path = folder / f"run-{number}"
        path.mkdir()
        config = api.resolve(
            load_config(None, (*base_changes(), "local.strategy=auto", *run.changes))
        )
        (path / "config.toml").write_text(dump_config(config))
        batch = config.workload.global_batch(1)
        write_json(path / "plan.json", everyone(run.nodes, batch, run.threads))
        write_json(path / "order.json", LegsOrder(script=tuple(run.script)))
        places.append((str(path), free_port(), run.nodes, run.wants))
    (folder / "series.json").write_text(json.dumps(places))
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _SERIES, str(folder / "series.json"), here]
    if backend == "mpi4py":
        commands = [([*_mpiexec(size), *command], 0)]
    else:
        commands = [(command, node) for node in range(size)]
    run_all([(each, _environment(n, size, 0, backend)) for each, n in commands], timeout)
    return [Path(path) for path, *_ in places]
