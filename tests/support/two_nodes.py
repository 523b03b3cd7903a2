"""Two nodes of a run, each a process by itself: what a launcher would start, without one."""

from __future__ import annotations

from pathlib import Path

from paceline import api
from paceline.config import dump_config, load_config
from paceline.config.environment import rank_environment
from paceline.schema import NodePlan, Plan, RankContext, write_json

MODEL = Path(__file__).with_name("pausing_model.py")
NODE = """
import sys
from pathlib import Path
from paceline.config.environment import rank_context
from paceline.launch.node import run_node
from paceline.launch.rank import leave
from paceline.run import RunDirectory
leave(run_node(RunDirectory(Path(sys.argv[1])), rank_context()))
"""


def write_node(folder: Path, deadline: int, **changes: object) -> Path:
    """A run of two nodes, as one of them has it."""
    folder.mkdir(parents=True)
    settings = {
        "workload.model": f"{MODEL}:build",
        "workload.data": "synthetic",
        "workload.batch_size": 8,
        "data.options.shape": "[1, 28, 28]",
        "data.options.samples": 320,
        "data.options.test_samples": 8,
        "train.epochs": 1,
        "train.deadline": deadline,
        "local.strategy": "sequential",
        "exchange.kind": "allreduce",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    config = api.resolve(load_config(None, tuple(f"{k}={v}" for k, v in settings.items())))
    (folder / "config.toml").write_text(dump_config(config))
    nodes = tuple(NodePlan(host=name, strategy="sequential", share=0.5) for name in "ab")
    write_json(folder / "plan.json", Plan(nodes=nodes, exchange="allreduce", batch_size=8))
    return folder


def environment(node: int, address: str, port: int) -> dict[str, str]:
    context = RankContext(node=node, nodes=2, address=address, port=port, backend="gloo")
    return rank_environment(context) | {"OMP_NUM_THREADS": "1"}
