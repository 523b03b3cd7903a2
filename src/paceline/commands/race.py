"""`paceline race`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paceline.commands.asking import asked_config


@click.command("race")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a setting.")
@click.option("--data", "data_root", type=click.Path(path_type=Path), help="Folder of data sets.")
@click.option("--again", is_flag=True, help="Race even if the result is in the cache.")
@click.option(
    "--seconds",
    default=40.0,
    show_default=True,
    help="When no candidate gets another turn.",
)
@click.option("--thorough", is_flag=True, help="Give every candidate every turn.")
@click.option("--json", "as_json", is_flag=True, help="Print race.json, and only that.")
def command(
    config: Path | None,
    changes: tuple[str, ...],
    data_root: Path | None,
    again: bool,
    seconds: float,
    thorough: bool,
    as_json: bool,
) -> None:
    """Try every way this machine could train CONFIG, and show which is fastest.

    Real updates on a copy of the weights, in turns. The result is kept in the cache, for
    `paceline plan`, `predict` and hosts that train together; `paceline train` needs none.

    \b
    paceline race examples/mnist.toml
    paceline race my.toml --seconds 30 --again
    """
    from paceline import api
    from paceline.schema import encode

    settings = asked_config(config, changes, data_root)
    race, cached = api.race(
        settings, again=again, seconds=seconds, quiet=as_json, thorough=thorough
    )
    if as_json:
        click.echo(json.dumps(encode(race), indent=2))
        return
    from paceline.report.tables import race_table, wide_console

    console = wide_console()
    console.print(race_table(race))
    for warning in race.warnings:
        console.print(f"warning: {warning}", highlight=False)
    console.print(f"chosen: {race.decision}", highlight=False)
    when = f"from the cache, made {race.made}" if cached else f"took {race.seconds:.0f} s"
    console.print(f"race {when}", highlight=False)
