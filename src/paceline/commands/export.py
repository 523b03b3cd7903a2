"""`paceline export`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from paceline.serve.versions import checked_name


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


LAST_SECONDS = 600.0
"""For the last export after the training is over: the largest models take minutes."""


def check(to: Path) -> None:
    """Refuse, before anything is trained, a place where nothing could be published."""
    from paceline.errors import ConfigError

    checked_name(to.name)
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--publish {to} is a file: give a folder as models/NAME")


@contextlib.contextmanager
def publishing(run: Path, to: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Publish the run's best weights, each as they come, until the training is over."""
    if to is None:
        yield
        return
    words = [sys.executable, "-m", "paceline.serve.publish", str(run), str(to), "onnx"]
    # A session of its own: Ctrl-C is for the training, which then lets this one finish.
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(lines: Iterator[str]) -> None:
        for line in lines:
            say(line.rstrip())

    teller = threading.Thread(target=tell, args=(process.stdout,), daemon=True)
    teller.start()
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            say(
                f"warning: the last best was not published within {LAST_SECONDS:g} s: write it with"
                f" `paceline export {run} --to {to}`"
            )
        teller.join()
        process.stdout.close()
