"""Local strategies: how one node uses its own cores. One file each, one registry.

Importing this package imports no torch; building a strategy does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import StrategyError, unknown_name

if TYPE_CHECKING:
    from paceline.local.base import Job, LocalStrategy

# name -> module:class; imported only when used
REGISTRY: dict[str, str] = {
    "sequential": "paceline.local.single:Sequential",
    "threads": "paceline.local.single:Threads",
    "replicas": "paceline.local.replicas:Replicas",
    "processes": "paceline.local.processes:Processes",
    "pipeline": "paceline.local.pipeline:Pipeline",
    "hybrid": "paceline.local.pipeline:Hybrid",
    "hogwild": "paceline.local.hogwild:Hogwild",
}


def names() -> list[str]:
    """The names of all local strategies."""
    return list(REGISTRY)


def strategy_class(name: str) -> type[LocalStrategy]:
    """The class of a local strategy by its name."""
    if name not in REGISTRY:
        raise StrategyError(unknown_name("local strategy", name, REGISTRY))
    module, _, attribute = REGISTRY[name].partition(":")
    found: type[LocalStrategy] = getattr(importlib.import_module(module), attribute)
    return found


def build(job: Job) -> LocalStrategy:
    """The strategy that the job's node plan names, built on this rank."""
    if job.node.strategy == "processes" and job.node.sync == "ddp":
        from paceline.local.ddp import DistributedProcesses

        return DistributedProcesses(job)
    return strategy_class(job.node.strategy)(job)


__all__ = ["REGISTRY", "build", "names", "strategy_class"]
