"""`paceline evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("evaluate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Pictures in folders named as the classes, or the folder of data sets.",
)
@click.option("--weights", type=click.Choice(["best", "latest"]), help="Default: best, if any.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, and only that.")
def command(run: Path, data: Path | None, weights: Any, device: str, as_json: bool) -> None:
    """Score the model of RUN on labelled samples; without --data, on its own test data.

    \b
    paceline evaluate runs/latest
    paceline evaluate runs/latest --data photographs/    cat/, dog/ ... inside
    """
    from paceline.schema.codec import encode
    from paceline.serve.trained import evaluate_run, open_trained

    trained = open_trained(run, weights=weights, device=device)
    found = evaluate_run(trained, data)
    if as_json:
        line = {"run": str(run), "update": trained.state.position.update, **encode(found)}
        click.echo(json.dumps(line, indent=2))
        return
    rates = ""
    if found.accuracy is not None and found.top5 is not None:
        rates = f"accuracy {found.accuracy:.2%}, top-5 {found.top5:.2%}, "
    click.echo(
        f"{rates}loss {found.loss:.4f} on {found.samples:,} samples of {found.data}"
        f" (weights of update {trained.state.position.update})"
    )
