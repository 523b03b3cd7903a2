"""What differs between two runs: configuration, plan, speed, accuracy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.load import RunData, finite
from paceline.report.one import flat
from paceline.schema import encode

_MEASURED = (
    ("images/s", "images_per_second"),
    ("time per update, median (s)", "update_seconds_median"),
    ("time per epoch, median (s)", "epoch_seconds_median"),
    ("time to read the data (s)", "read_seconds"),
    ("total time (s)", "total_seconds"),
    ("epochs", "epochs"),
    ("updates", "updates"),
    ("train loss", "train_loss"),
    ("test loss", "test_loss"),
    ("best test loss", "best_loss"),
    ("test accuracy", "test_accuracy"),
    ("best accuracy", "best_accuracy"),
)
_EXCHANGED = (
    ("bytes sent, all nodes", "bytes_sent"),
    ("bytes received, all nodes", "bytes_received"),
    ("messages sent, all nodes", "messages_sent"),
    ("messages received, all nodes", "messages_received"),
    ("communicating, mean of nodes (s)", "exchange_seconds"),
    ("hidden under computing (s)", "exchange_hidden_seconds"),
    ("waiting for the exchange (s)", "exchange_wait_seconds"),
)
"""Of runs over several nodes; left out where both have nothing to exchange."""


def compare(first: RunData, second: RunData) -> dict[str, Any]:
    """Settings and plan entries that differ, and every measured number of both.

    Each difference is {"key", "a", "b"}; each number also has "change": b / a - 1.
    """
    return {
        "a": str(first.path),
        "b": str(second.path),
        "config": _differences(dict(flat(first.config)), dict(flat(second.config))),
        "plan": _differences(_plan(first), _plan(second)),
        "measured": _measured(first, second),
    }


def _plan(run: RunData) -> dict[str, Any]:
    """Who does what; predictions and what was rejected follow from the race, not from a choice."""
    if run.plan is None:
        return {}
    plan = encode(run.plan)
    for key in ("rejected", "format"):
        plan.pop(key)
    nodes = {str(index): node for index, node in enumerate(plan.pop("nodes"))}
    return dict(flat({**plan, "nodes": nodes}))


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "a": first.get(key), "b": second.get(key)}
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    ]


def _measured(first: RunData, second: RunData) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for title, key in (*_MEASURED, *_EXCHANGED):
        a, b = first.number(key), second.number(key)
        if (a is None and b is None) or (not a and not b and (title, key) in _EXCHANGED):
            continue
        change = finite(b / a - 1) if a and b is not None else None
        rows.append({"key": key, "title": title, "a": a, "b": b, "change": change})
    return rows
