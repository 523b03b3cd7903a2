"""`paceline data`: what data there is, what one data set holds, and how to get one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from paceline import data as datasets
from paceline.config.environment import cache_root, data_root
from paceline.errors import DataError, unknown_name
from paceline.text import user_path

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class DataGroup(click.Group):
    """`data get NAME` is a subcommand; `data NAME` shows a data set."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            return "show", show, args
        return super().resolve_command(ctx, args)


data_option = click.option(
    "--data",
    "root",
    metavar="FOLDER",
    help="Folder that holds the data sets (default: PACELINE_DATA).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(
    cls=DataGroup,
    invoke_without_command=True,
    subcommand_metavar="[NAME | get NAME] [OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@data_option
@json_option
@click.pass_context
def command(ctx: click.Context, root: str | None, as_json: bool) -> None:
    """List the data sets, inspect one, or download one.

    \b
    paceline data                   all data sets, and whether they are here
    paceline data mnist             classes, counts, shape, fingerprint
    paceline data photos/           the same for a folder of class folders
    paceline data get mnist         download, with checksum
    """
    if ctx.invoked_subcommand is None:
        _list(_root(root), as_json)
    else:
        ctx.obj = (root, as_json)


@command.command(hidden=True)
@click.argument("name")
@data_option
@json_option
@click.option("--image-size", type=int, help="Scale images to this height and width.")
@click.pass_context
def show(
    ctx: click.Context, name: str, root: str | None, as_json: bool, image_size: int | None
) -> None:
    """Show what a data set holds.

    \b
    paceline data show mnist
    """
    before = ctx.obj or (None, False)
    request = datasets.DataRequest(
        name=name,
        root=_root(root or before[0]),
        image_size=image_size,
        cache=str(cache_root()),
    )
    dataset = datasets.open_dataset(request)
    facts = describe(dataset)
    if as_json or before[1]:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print_facts(facts)
    dataset.close()


@command.command()
@click.argument("name")
@data_option
@click.option("--mirror", multiple=True, metavar="URL", help="Folder to ask first; repeatable.")
@click.pass_context
def get(ctx: click.Context, name: str, root: str | None, mirror: tuple[str, ...]) -> None:
    """Download a data set: checksum compared, a broken download continued.

    \b
    paceline data get mnist
    """
    from paceline.data import download

    if name not in datasets.names():
        raise DataError(unknown_name("data set", name, datasets.names()))
    spec = datasets.spec(name)
    before = ctx.obj or (None, False)
    place = root or before[0] or _root(None)
    folder = (user_path(place) if place else cache_root() / "data") / name
    with _progress_bar() as bar:
        tasks: dict[str, TaskID] = {}

        def progress(file: datasets.Download, done: int, total: int) -> None:
            if file.file not in tasks:
                tasks[file.file] = bar.add_task(file.file, total=total)
            bar.update(tasks[file.file], completed=done, total=total)

        paths = download.get(spec, folder, mirrors=mirror, progress=progress)
    click.echo(f"{name}: {len(paths)} files in {folder}, checksums right")


def _root(given: str | None) -> str | None:
    if given is not None:
        if not user_path(given).exists():
            raise DataError(f"--data {given!r} does not exist; give a folder that does")
        return given
    found = data_root()
    return str(found) if found else None


def _progress_bar() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from paceline.text import terminal

    console = terminal(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def describe(dataset: datasets.Dataset) -> dict[str, Any]:
    """Everything `paceline data NAME` prints, as JSON-able values."""
    import numpy as np

    def counts(source: datasets.Source) -> dict[str, int] | None:
        if source.labels is None or not dataset.classes:
            return None
        numbers = np.bincount(source.labels, minlength=len(dataset.classes))
        return {name: int(numbers[label]) for label, name in enumerate(dataset.classes)}

    return {
        "name": dataset.name,
        "sample_shape": list(dataset.sample_shape),
        "classes": list(dataset.classes),
        "train": {"samples": len(dataset.train), "per_class": counts(dataset.train)},
        "test": {"samples": len(dataset.test), "per_class": counts(dataset.test)},
        "fingerprint": dataset.fingerprint,
        "skipped": [{"path": one.path, "reason": one.reason} for one in dataset.skipped],
        "notes": list(dataset.notes),
    }


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from paceline.text import terminal

    console = terminal()
    shape = " x ".join(str(length) for length in facts["sample_shape"])
    megabytes = facts["train"]["samples"] * 4.0 / 1e6
    for length in facts["sample_shape"]:
        megabytes *= length
    console.print(f"{facts['name']}: samples of {shape}", highlight=False)
    console.print(f"fingerprint {facts['fingerprint']}", highlight=False)
    table = Table()
    table.add_column("class")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    if facts["train"]["per_class"] and facts["test"]["per_class"]:
        for name, count in facts["train"]["per_class"].items():
            table.add_row(name, f"{count:,}", f"{facts['test']['per_class'][name]:,}")
        table.add_section()
    table.add_row("all", f"{facts['train']['samples']:,}", f"{facts['test']['samples']:,}")
    console.print(table)
    console.print(f"training part as float32: {megabytes:,.1f} MB", highlight=False)
    for note in facts["notes"]:
        console.print(note, highlight=False, markup=False)
    if facts["skipped"]:
        console.print(f"left out: {len(facts['skipped'])} files", highlight=False)
        for one in facts["skipped"][:20]:
            console.print(f"  {one['path']}: {one['reason']}", highlight=False, markup=False)
        if len(facts["skipped"]) > 20:
            console.print("  ... (--json prints all)", highlight=False)


def _list(root: str | None, as_json: bool) -> None:
    rows = [_row(name, root) for name in datasets.names()]
    rows += [
        {
            "name": name,
            "summary": "folder of class folders",
            "sample_shape": None,
            "classes": None,
            "here": True,
            "obtain": f"in {root}",
        }
        for name in datasets.folders_below(root)
    ]
    if as_json:
        click.echo(json.dumps({"root": root, "data": rows}, indent=2))
        return
    from rich.table import Table

    from paceline.text import terminal

    table = Table()
    for title in ("name", "here", "sample", "classes", "what it is"):
        table.add_column(title, no_wrap=title in ("name", "here", "sample"))
    for row in rows:
        shape = row["sample_shape"]
        table.add_row(
            row["name"],
            "yes" if row["here"] else "no",
            "x".join(str(length) for length in shape) if shape else "",
            str(row["classes"] or ""),
            row["summary"] if row["here"] else f"{row['summary']}; get it: {row['obtain']}",
        )
    console = terminal()
    console.print(table)
    place = root or "not set (PACELINE_DATA or --data)"
    console.print(f"data folder: {place}", highlight=False, markup=False)


def _row(name: str, root: str | None) -> dict[str, Any]:
    spec = datasets.spec(name)
    size, channels = spec.image_size, spec.channels
    request = datasets.DataRequest(name=name, root=root, cache=str(cache_root()))
    return {
        "name": name,
        "summary": spec.summary,
        "sample_shape": [channels, size, size],
        "classes": spec.classes,
        "here": datasets.is_here(request),
        "obtain": spec.obtain,
    }
