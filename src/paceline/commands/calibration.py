"""The calibration that is kept in the cache, for whoever predicts. A part of `api`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from paceline.config.environment import cache_root
from paceline.errors import PacelineError
from paceline.schema import read_json, write_json
from paceline.schema.calibration import Calibration


def calibration_path() -> Path:
    """Where it is kept."""
    return cache_root() / "calibration.json"


def calibration() -> dict[str, float]:
    """Per exchange, what past runs took against what was predicted; empty where none are known."""
    return dict(_read().factors)


def keep_factors(factors: Mapping[str, float], runs: Mapping[str, int]) -> Path:
    """Replace the factors of these exchanges; those of others stay."""
    path = calibration_path()
    kept = _read()
    found = Calibration(
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        factors={**kept.factors, **factors},
        runs={**kept.runs, **{name: runs[name] for name in factors}},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return path


def _read() -> Calibration:
    path = calibration_path()
    try:
        return read_json(Calibration, path) if path.exists() else Calibration()
    except PacelineError:
        return Calibration()  # written by another version
