"""The calibration that is kept in the cache, for whoever predicts. A part of `api`."""

from __future__ import annotations

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
    path = calibration_path()
    if not path.exists():
        return {}
    try:
        return dict(read_json(Calibration, path).factors)
    except PacelineError:
        return {}  # written by another version


def keep_calibration(found: Calibration) -> Path:
    """Replace what is kept."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return path
