"""The calibration that is kept in the cache, for whoever predicts. A part of `api`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from paceline.config.cache import kept
from paceline.config.environment import cache_root
from paceline.schema import write_json
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
    before = _read()
    found = Calibration(
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
        factors={**before.factors, **factors},
        runs={**before.runs, **{name: runs[name] for name in factors}},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return path


def _read() -> Calibration:
    return kept(Calibration, calibration_path()) or Calibration()
