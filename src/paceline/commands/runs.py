"""`paceline runs`: what has been trained, one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.errors import PacelineError, RunDirectoryError
from paceline.report.load import RunData, is_run, load_run


@click.command("runs")
@click.argument("folder", default="runs", metavar="[DIR]", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(folder: Path, as_json: bool) -> None:
    """List the runs in DIR (runs/ when left out), the oldest first.

    \b
    paceline runs
    paceline runs old-runs --json
    """

    lines = [line_of(run) for run in read_runs(folder)]
    if as_json:
        click.echo(json.dumps(lines, indent=2))
        return
    if not lines:
        click.echo(f"no runs in {folder}: `paceline train` makes one")
        return
    from rich import box
    from rich.table import Table

    from paceline.report.tables import wide_console
    from paceline.text import rate

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("run", "when", "model", "data", "batch", "strategy", "hosts", "images/s")
    # Accuracy where there are classes; the loss tells runs apart where there are none.
    scores = [
        (name, key, style)
        for name, key, style in (
            ("accuracy", "test_accuracy", ".2%"),
            ("test loss", "test_loss", ".4g"),
        )
        if any(line[key] is not None for line in lines)
    ]
    for name in (*columns, *(name for name, _, _ in scores), "finished"):
        right = name in ("batch", "hosts", "images/s", "accuracy", "test loss")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in lines:
        speed = line["images_per_second"]
        cells = (
            line["name"],
            line["when"],
            line["model"],
            line["data"],
            "" if line["batch_size"] is None else str(line["batch_size"]),
            line["strategy"],
            str(line["hosts"]),
            "" if speed is None else rate(speed),
            *("" if line[key] is None else format(line[key], style) for _, key, style in scores),
            "yes" if line["finished"] else f"no, {line['epochs']} epochs",
        )
        table.add_row(*cells)
    console = wide_console()
    console.print(table)
    for line in lines:
        for problem in line["problems"]:
            console.print(f"{line['name']}: {problem}", soft_wrap=True)


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
