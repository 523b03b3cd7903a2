"""Local strategies: how one node uses its own cores. One file each, one registry.

Importing this package imports no torch; building a strategy does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from paceline.schema.registry import imported
from paceline.schema.strategies import STRATEGIES

if TYPE_CHECKING:
    from paceline.local.base import Job, LocalStrategy


def strategy_class(name: str) -> type[LocalStrategy]:
    """The class of a local strategy by its name."""
    found: Any = imported(STRATEGIES[name].place, f"local strategy {name!r}")
    return cast("type[LocalStrategy]", found)


def build(job: Job) -> LocalStrategy:
    """The strategy that the job's node plan names, built on this rank."""
    if job.node.sync == "ddp":
        from paceline.local.ddp import DistributedProcesses

        return DistributedProcesses(job)
    return strategy_class(job.node.strategy)(job)


__all__ = ["build", "strategy_class"]
