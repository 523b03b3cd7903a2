"""`paceline init`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from paceline.errors import ConfigError


@click.command("init")
@click.argument(
    "folder", default=".", type=click.Path(path_type=Path, file_okay=False, exists=True)
)
@click.option("--model", metavar="NAME", help="Which model, where there are several.")
@click.option("--data", metavar="NAME", help="Which data; also `digits`, `file.py:function` ...")
@click.option("--to", metavar="FILE", help="Name of the new file, in FOLDER.")
def command(folder: Path, model: str | None, data: str | None, to: str | None) -> None:
    """Write a first file that trains what is in FOLDER, and say which command uses it.

    Looks for folders of pictures by class, idx files, .npy and .csv files, and Python files with an
    nn.Module. Nothing of yours is run or changed, and no file is ever overwritten.

    \b
    paceline init
    paceline init flowers
    paceline init --model net.py:Net --data net.py:points
    """
    from paceline.workflow.named_data import named_data
    from paceline.workflow.starting import begin, choose, look

    found = look(folder)
    for sentence in found.passed_over:
        click.echo(f"passed over: {sentence}")
    if found.loops and not found.data and data is None:
        script = found.loops[0]
        click.echo(f"found: {script}, a script that trains by itself; nothing was written")
        click.echo(f"next: paceline run {shlex.quote(script)}")
        return
    named = named_data(folder, data, found) if data is not None else None
    chosen, source = choose(found, model, named)
    beginning = begin(folder.resolve().name, chosen, source)
    path = folder / (to or beginning.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(beginning.text)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already and is left as it is: name another with --to FILE"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    parts = [each for each in (chosen and chosen.reference, source and source.in_words) if each]
    click.echo(f"found: {'; '.join(parts) or 'nothing to train with, so it is the digits'}")
    click.echo(f"wrote: {path}")
    if chosen is not None and chosen.missing:
        click.echo(f"fill in first: {', '.join(chosen.missing)} of {chosen.name}")
    away = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    click.echo(f"next: {away}{beginning.command} {shlex.quote(to or beginning.name)}")
