"""The lines of `paceline runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RunDirectoryError
from paceline.report.load import RunData, is_run, load_run


def find_runs(folder: Path) -> list[Path]:
    """The runs inside a folder, links such as `latest` left out; the folder itself if it is one."""
    if not folder.is_dir():
        raise RunDirectoryError(f"there is no folder {folder}: `paceline train` makes runs/")
    if is_run(folder):
        return [folder]
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((path for path in inside if is_run(path)), key=_age)


def _age(path: Path) -> tuple[float, str]:
    config = path / "config.toml"
    return (config.stat().st_mtime if config.exists() else 0.0, path.name)


def read_runs(folder: Path) -> list[RunData]:
    """Every run of a folder, oldest first; what has vanished meanwhile is left out."""
    found = []
    for path in find_runs(folder):
        try:
            found.append(load_run(path, events=False))
        except (PacelineError, OSError):
            continue
    return found


def line_of(run: RunData) -> dict[str, Any]:
    """What one line says, for programs."""
    return {
        "name": run.name,
        "path": str(run.path),
        "when": run.when,
        "model": run.model,
        "data": run.data,
        "batch_size": run.batch,
        "strategy": run.strategy,
        "hosts": run.hosts,
        "exchange": run.exchange or None,
        "epochs": len(run.metrics),
        "images_per_second": run.speed,
        "test_loss": run.loss,
        "test_accuracy": run.accuracy,
        "finished": run.finished,
        "problems": list(run.problems),
    }
