"""`paceline peers`: other systems to be measured beside, installed and listed."""

from __future__ import annotations

import json

import click

from paceline.errors import shortened
from studies.peers import environments
from studies.peers.recipes import names, recipe


@click.group(
    invoke_without_command=True,
    short_help="Install other systems to be measured beside.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Other systems that Paceline is measured beside: list, install, remove.

    Each has a virtual environment of its own in the cache (PACELINE_CACHE), because they refuse
    each other's versions; nothing of Paceline's own environment changes.

    \b
    paceline peers                      what is here, its version and size, what is missing
    paceline peers install accelerate   download and install, one or several
    paceline peers remove horovod       give the disk back
    """
    if ctx.invoked_subcommand is None:
        _list(as_json)


@command.command()
@click.argument("peers", nargs=-1, required=True, metavar="NAME...")
@click.option("--again", is_flag=True, help="Install anew what is already there.")
def install(peers: tuple[str, ...], again: bool) -> None:
    """Install peers: horovod, spark, ray, tensorflow, accelerate, lightning, deepspeed; or all.

    Versions are pinned. An install that was interrupted is begun anew. Horovod is compiled, which
    takes about 9 minutes on 2 cores.

    \b
    paceline peers install accelerate lightning
    """
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    from paceline.text import printable, terminal
    from studies.peers.install import install as install_peer

    wanted = names() if peers == ("all",) else tuple(dict.fromkeys(peers))
    for name in wanted:
        environments.find_peer(name)  # refuse a name that is unknown before anything is fetched
    console = terminal(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        console=console,
        disable=not console.is_terminal,
    )
    for name in wanted:
        with bar:
            task = bar.add_task(name, total=1.0, said="")

            def show(text: str, part: float, task: TaskID = task) -> None:
                bar.update(task, completed=part, said=shortened(printable(text)))

            peer = install_peer(
                name, again=again, say=lambda line: click.echo(line, err=True), show=show
            )
            bar.remove_task(task)
        assert peer.record is not None
        size = f"{peer.record.bytes / 1e9:.1f} GB"
        click.echo(f"{name} {peer.recipe.version}: installed, {size} in {peer.folder}")
        for program in peer.missing:
            click.echo(f"{name} needs {program.name} to run: {program.remedy}")


@command.command()
@click.argument("peers", nargs=-1, required=True, metavar="NAME...")
def remove(peers: tuple[str, ...]) -> None:
    """Delete the environments of peers.

    \b
    paceline peers remove horovod
    """
    from studies.peers.install import remove as remove_peer

    for name in peers:
        environments.find_peer(name)
    for name in peers:
        freed = remove_peer(name)
        click.echo(f"{name}: {freed / 1e9:.1f} GB freed" if freed else f"{name}: was not here")


def _list(as_json: bool) -> None:
    rows = [environments.facts(environments.find_peer(name)) for name in names()]
    if as_json:
        click.echo(json.dumps({"folder": str(environments.peers_root()), "peers": rows}, indent=2))
        return
    from rich.table import Table

    from paceline.text import terminal

    table = Table()
    for title in ("peer", "here", "version", "torch", "size", "what it is"):
        table.add_column(title, no_wrap=title != "what it is")
    for row in rows:
        table.add_row(
            row["name"],
            "yes" if row["installed"] else "outdated" if row["outdated"] else "no",
            row["version"] or f"({row['wanted']})",
            row["torch"] or "",
            f"{row['bytes'] / 1e9:.1f} GB" if row["bytes"] else "",
            row["title"],
        )
    console = terminal()
    console.print(table)
    click.echo(f"in {environments.peers_root()}")
    absent = [row["name"] for row in rows if not row["installed"]]
    if absent:
        click.echo(f"to install what is not here: paceline peers install {' '.join(absent)}")
    for row in rows:
        for program in recipe(row["name"]).programs:
            if program.name in row["missing"]:
                click.echo(f"{row['name']} needs {program.name}: {program.remedy}")
