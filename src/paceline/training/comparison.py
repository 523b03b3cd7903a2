"""Predicted beside measured, for run.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.local.memory import resident_mb
from paceline.schema import Config, Plan
from paceline.schema.calibration import calibration_name

if TYPE_CHECKING:
    from paceline.local.board import Board


def comparison(
    config: Config, plan: Plan, lines: Sequence[dict[str, Any]], updates: int
) -> dict[str, Any]:
    """What the plan said and what came, under the same names; `lines` are the epochs'."""
    nodes = len(plan.nodes)
    measured: dict[str, float] = {"nodes": nodes}
    # The first epoch warms up; where there are others they tell more.
    steady = lines[1:] or lines
    for name, key in (
        ("update_seconds", "update_seconds_median"),
        ("images_per_second", "images_per_second"),
    ):
        if steady:
            measured[name] = statistics.median(line[key] for line in steady)
    if nodes > 1 and updates:
        busiest = sum(line.get("bytes_sent_most", 0) for line in lines)
        served = sum(line.get("server_bytes_sent", 0) for line in lines)
        measured["bytes_per_update"] = max(busiest, served / max(1, len(plan.servers))) / updates
    if memory := max((line.get("memory_mb") or 0.0 for line in lines), default=0.0):
        measured["memory_mb"] = memory
    exchange = calibration_name(
        plan.exchange,
        nodes=nodes,
        partition=plan.partition == "feature",
        asynchronous=plan.exchange == "parameter_server" and config.exchange.mode == "async",
    )
    return {"exchange": exchange, "predicted": dict(plan.predicted), "measured": measured}


def node_memory_mb(board: Board | None) -> float:
    """Largest resident memory of this node's ranks together; each of them calls it."""
    private, shared = resident_mb()
    if board is None:
        return private + shared
    return sum(board.sum([private, shared if board.rank == 0 else 0.0], "memory"))
