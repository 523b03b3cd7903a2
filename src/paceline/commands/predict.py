"""`paceline predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--weights", type=click.Choice(["best", "latest"]), help="Default: best, if any.")
@click.option("--top", default=5, show_default=True, type=click.IntRange(1), help="Guesses each.")
@click.option(
    "--pixels/--no-pixels", default=None, help="Numbers of .npy and .csv are pixels, 0 to 255."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, one line each.")
def command(
    run: Path,
    files: tuple[Path, ...],
    weights: Any,
    top: int,
    pixels: bool | None,
    device: str,
    as_json: bool,
) -> None:
    """Say what the model of RUN sees in FILES: pictures, folders of them, .npy or .csv.

    Pictures get the preprocessing of the training. Numbers are taken as the model takes
    them; bytes, and with --pixels all numbers, are pixels that are still to be normalised. Whole
    numbers up to 255 that look like pixels need --pixels or --no-pixels.

    \b
    paceline predict runs/latest seven.png
    paceline predict runs/latest photographs/ --json
    """
    import numpy as np

    from paceline.errors import DataError, ModelError
    from paceline.serve.answers import top_guesses
    from paceline.serve.inputs import Preparer, read_inputs
    from paceline.serve.trained import BATCH, open_trained, refuse_other_answers

    for path in files:
        if not path.exists():
            raise DataError(f"there is no file {path}: give pictures, folders, .npy or .csv")
    trained = open_trained(run, weights=weights, device=device)
    if not as_json:
        refuse_other_answers(trained)
    named = read_inputs(Preparer(trained.signature), files, as_pixels=pixels)
    for group in _batches(named, BATCH):
        names = [name for name, _ in group]
        outputs = trained.outputs(np.stack([one for _, one in group]))
        for name, one in zip(names, outputs, strict=True):
            if not np.isfinite(one).all():
                raise ModelError(
                    f"{name}: the model gives outputs that are not all finite numbers; look for nan"
                    " and very large numbers in the inputs"
                )
        found = top_guesses(outputs, trained.signature, top) if trained.tells_classes else None
        for place, name in enumerate(names):
            if as_json:
                click.echo(json.dumps(_line(name, outputs[place], found and found[place])))
                continue
            assert found is not None
            told = "  ".join(f"{g.label} {g.probability:.1%}" for g in found[place])
            click.echo(f"{name}: {told}")


def _batches(items: Any, size: int) -> Any:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _line(name: str, outputs: Any, guesses: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"input": name}
    if guesses is not None:
        line["guesses"] = [
            {"label": guess.label, "probability": guess.probability} for guess in guesses
        ]
    return line | {"outputs": outputs.tolist()}
