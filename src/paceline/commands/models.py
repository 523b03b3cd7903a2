"""`paceline models`: what models there are, and what one is made of."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from paceline import models, references
from paceline.errors import ConfigError
from paceline.schema.config import MOST_CLASSES, MOST_PIXELS
from paceline.schema.plain import parse_value

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.models import ModelSpec, ModelSummary

# For a model of the user's own, of which nothing is known.
_OWN_CHANNELS, _OWN_CLASSES, _OWN_SIZE = 3, 1000, 224


@click.command(name="models")
@click.argument("name", required=False)
@click.option("--classes", type=click.IntRange(1, MOST_CLASSES), help="Number of classes.")
@click.option(
    "--channels", type=click.IntRange(1, 4096), help="Channels of an image: 1 grey, 3 RGB."
)
@click.option(
    "--image-size", type=click.IntRange(1, MOST_PIXELS), help="Height and width of an image."
)
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of the model."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(
    name: str | None,
    classes: int | None,
    channels: int | None,
    image_size: int | None,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """List the models, or print one layer by layer.

    NAME is one of the list, or your own: 'package.module:callable' or
    'path/to/file.py:callable' (a function or class that makes an nn.Module).

    \b
    paceline models
    paceline models alexnet --classes 2
    paceline models resnet18 --channels 1 --image-size 28 --option stem=small

    MB are 10^6 bytes of parameters. GFLOPs are those of published tables: 10^9
    multiply-adds of the forward pass for one image (AlexNet 0.7, VGG16 15.5).
    """
    if name is None:
        if options or classes or channels or image_size:
            raise click.UsageError("--classes, --channels, --image-size and --option need a NAME.")
        _print_list(as_json)
        return
    known = None if references.is_reference(name) else models.spec(name)
    channels = channels or (known.channels if known else _OWN_CHANNELS)
    classes = classes or (known.classes if known else _OWN_CLASSES)
    size = image_size or (known.input_size if known else _OWN_SIZE)
    summary = _summarise(name, known, classes, channels, size, _parse_options(options))
    if as_json:
        click.echo(json.dumps(_as_json(name, known, classes, summary), indent=2))
    else:
        _print_model(name, known, classes, summary)


def _parse_options(pairs: tuple[str, ...]) -> dict[str, object]:
    """`key=value` with a TOML value; a bare word is a string."""
    parsed: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--option {pair!r}: must be KEY=VALUE, such as dropout=0.3")
        parsed[key.strip()] = parse_value(text, f"--option {key} =")
    return parsed


def _summarise(
    name: str,
    known: ModelSpec | None,
    classes: int,
    channels: int,
    size: int,
    options: dict[str, object],
) -> ModelSummary:
    import torch

    # Shapes need no numbers: on the meta device VGG takes neither memory nor time.
    # A model of the user's own may compute while it is built, so it is built for real.
    with torch.device("meta" if known else "cpu"):
        network = models.build(
            name, classes=classes, channels=channels, options=options, image_size=size
        )
    return models.summarise(network, (channels, size, size))


def _as_json(
    name: str, known: ModelSpec | None, classes: int, summary: ModelSummary
) -> dict[str, object]:
    return {
        "name": name,
        "summary": known.summary if known else None,
        "options": dict(known.options) if known else None,
        "classes": classes,
        "sample_shape": summary.sample_shape,
        "parameters": summary.parameters,
        "megabytes": summary.megabytes,
        "gflops": summary.gigaflops,
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "output_shape": layer.output_shape,
                "parameters": layer.parameters,
                "gflops": layer.flops / 1e9,
            }
            for layer in summary.layers
        ],
    }


def _print_list(as_json: bool) -> None:
    specs = [models.spec(name) for name in models.names()]
    if as_json:
        rows = [
            {
                "name": each.name,
                "parameters": each.published_parameters,
                "megabytes": each.megabytes,
                "channels": each.channels,
                "image_size": each.input_size,
                "minimum_size": each.minimum_size,
                "classes": each.classes,
                "options": dict(each.options),
                "summary": each.summary,
            }
            for each in specs
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    table = _table([("name", "l"), ("parameters", "r"), ("MB", "r"), ("input", "r"), ("what", "l")])
    for each in specs:
        size = _shape((each.channels, each.input_size, each.input_size))
        table.add_row(
            each.name,
            f"{each.published_parameters:,}",
            f"{each.megabytes:.1f}",
            size,
            each.summary,
        )
    _show(table)


def _print_model(name: str, known: ModelSpec | None, classes: int, summary: ModelSummary) -> None:
    click.echo(f"{name}: {known.summary}" if known else name)
    table = _table(
        [
            ("layer", "l"),
            ("kind", "l"),
            ("output", "r"),
            ("parameters", "r"),
            ("MB", "r"),
            ("GFLOPs", "r"),
        ]
    )
    scale = summary.parameter_bytes / summary.parameters / 1e6 if summary.parameters else 0.0
    for layer in summary.layers:
        table.add_row(
            layer.name or "(itself)",
            layer.kind,
            _shape(layer.output_shape),
            f"{layer.parameters:,}" if layer.parameters else "",
            f"{layer.parameters * scale:.3f}" if layer.parameters else "",
            f"{layer.flops / 1e9:.4f}" if layer.flops else "",
        )
    _show(table)
    click.echo(
        f"{summary.parameters:,} parameters, {summary.megabytes:.1f} MB,"
        f" {summary.gigaflops:.4g} GFLOPs (multiply-adds, forward, one image of"
        f" {_shape(summary.sample_shape)}), {classes} classes"
    )
    for key, text in (known.options if known else {}).items():
        click.echo(f"option {key}: {text}")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _table(columns: list[tuple[str, str]]) -> Table:
    from rich import box
    from rich.table import Table

    # Piped output is plain columns, for grep and awk.
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for title, side in columns:
        table.add_column(title, justify="right" if side == "r" else "left", no_wrap=side == "r")
    return table


def _show(table: Table) -> None:
    from paceline.text import terminal

    console = terminal(width=200)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    # rich fills every line to the width of the table.
    click.echo("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))
