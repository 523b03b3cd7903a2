"""`paceline export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["onnx", "torch", "safetensors"]),
    default="onnx",
    show_default=True,
)
@click.option("--to", required=True, type=click.Path(path_type=Path), help="As in models/NAME.")
@click.option("--weights", type=click.Choice(["best", "latest"]), help="Default: best, if any.")
@click.option(
    "--samples",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Pictures or .npy to compare outputs on, instead of the run's test data.",
)
@click.option("--json", "as_json", is_flag=True, help="Print version.json, and only that.")
def command(
    run: Path, kind: Any, to: Path, weights: Any, samples: tuple[Path, ...], as_json: bool
) -> None:
    """Write the model of RUN as the next version of models/NAME, ready to be served.

    The export's outputs are compared with the model's on real samples; one that differs is
    refused. Batches may have any size.

    \b
    paceline export runs/latest --to models/digits
    paceline serve models/
    """
    from paceline.schema.codec import encode
    from paceline.serve.export import export
    from paceline.serve.trained import open_trained

    folder, version = export(open_trained(run, weights=weights), kind, to, samples=samples)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), **encode(version)}, indent=2))
        return
    found = version.compared
    click.echo(
        f"{folder}: {kind}, weights of update {version.origin.update}; outputs of {found.samples}"
        f" real samples are the model's (largest difference {found.largest:.1e})"
    )
