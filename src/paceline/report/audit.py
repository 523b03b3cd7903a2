"""How far predictions were from what runs measured. Pure, but for reading run directories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError, shown
from paceline.schema.plain import read_json_file

QUANTITIES = ("update_seconds", "images_per_second", "bytes_per_update", "memory_mb")
ENOUGH = 3
"""Runs of one exchange that a factor must stand on."""
DISAGREE = 0.3
"""Quartile distance of the ratios, in parts of their median, above which they are noise."""
SAME = 0.02
"""A factor this near to 1 changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One run: what was predicted, what came, and the error of each in parts of what came."""

    run: str
    exchange: str
    nodes: int
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    """Measured time of an update over predicted time, before any calibration."""
    compared: bool = True
    """False where only computing was predicted: such a run teaches nothing about an exchange."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """All runs together."""

    runs: tuple[Audited, ...]
    skipped: dict[str, str]
    """Runs that cannot be compared, and why."""
    mean: dict[str, float]
    worst: dict[str, float]
    """Of the errors' sizes, per quantity."""
    factors: dict[str, float]
    """Per exchange with enough runs that agree: median of measured over predicted time."""
    counts: dict[str, int]
    noisy: dict[str, tuple[float, float]]
    """Exchanges whose runs disagree too much for a factor: smallest and largest ratio."""


def audit(paths: Sequence[Path]) -> Audit:
    """Compare what the runs at `paths` were predicted to do with what they did."""
    runs: list[Audited] = []
    skipped: dict[str, str] = {}
    for path in paths:
        if not path.is_dir():
            raise RunDirectoryError(f"there is no run directory {path}: `paceline runs` lists them")
        try:
            summary = read_json_file(path / "run.json")
        except FileNotFoundError:
            skipped[str(path)] = "it has no run.json: it did not end"
            continue
        except (OSError, ValueError) as error:
            skipped[str(path)] = f"its run.json cannot be read: {error}"
            continue
        found = audited(str(path), summary)
        if isinstance(found, str):
            skipped[str(path)] = found
        else:
            runs.append(found)
    sizes = {key: [abs(run.errors[key]) for run in runs if key in run.errors] for key in QUANTITIES}
    ratios: dict[str, list[float]] = {}
    for run in runs:
        if run.ratio is not None and run.compared:
            ratios.setdefault(run.exchange, []).append(run.ratio)
    enough = {name: values for name, values in ratios.items() if len(values) >= ENOUGH}
    noisy = {
        name: (min(values), max(values)) for name, values in enough.items() if _disagree(values)
    }
    return Audit(
        runs=tuple(runs),
        skipped=skipped,
        mean={key: statistics.fmean(values) for key, values in sizes.items() if values},
        worst={key: max(values) for key, values in sizes.items() if values},
        factors={
            name: statistics.median(values) for name, values in enough.items() if name not in noisy
        },
        counts={name: len(values) for name, values in ratios.items()},
        noisy=noisy,
    )


def _disagree(ratios: Sequence[float]) -> bool:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return high - low > DISAGREE * middle


def audited(name: str, summary: Any) -> Audited | str:
    """One run's run.json, compared; a string says why it cannot be."""
    if not isinstance(summary, dict):
        return f"its run.json is {shown(summary)}, not a table of keys"
    predicted = _numbers(summary.get("predicted"))
    measured = _numbers(summary.get("measured"))
    if not measured:
        return "its run.json has nothing measured: it was made by an older version"
    if not predicted.get("update_seconds"):
        return "nothing was predicted: its strategy was asked for, not measured"
    errors = {
        key: predicted[key] / measured[key] - 1
        for key in QUANTITIES
        if predicted.get(key) and measured.get(key)
    }
    if not errors:
        return "it trained too little to be measured"
    ratio = None
    if measured.get("update_seconds"):
        raw = predicted["update_seconds"] / predicted.get("calibration", 1.0)
        ratio = measured["update_seconds"] / raw
    nodes = int(measured.get("nodes", 1))
    return Audited(
        run=name,
        exchange=str(summary.get("exchange") or "alone"),
        nodes=nodes,
        predicted=predicted,
        measured=measured,
        errors=errors,
        ratio=ratio if ratio is not None and math.isfinite(ratio) else None,
        compared=nodes == 1 or "exposed_seconds" in predicted,
    )


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
