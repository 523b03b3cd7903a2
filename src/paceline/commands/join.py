"""`paceline join`: one more host for a training that is under way."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("join")
@click.argument("run", default="runs/latest", metavar="[RUN]", type=click.Path(path_type=Path))
@click.option(
    "--host",
    "text",
    required=True,
    metavar="NAME",
    help="The host that is to join; ssh reaches it.",
)
def command(run: Path, text: str) -> None:
    """Let another host join the training in RUN (runs/latest when left out).

    The training must go in legs over Gloo (--engine ssh), or use parameter servers. The host takes
    the place of one that was lost, or is one more.

    \b
    paceline join --host e
    paceline join runs/2026-01-01-digits --host 10.0.0.7
    """
    from paceline.config import load_config
    from paceline.config.hosts import find_hosts
    from paceline.errors import RunDirectoryError
    from paceline.launch.agent import DOOR
    from paceline.launch.inspection import check_hosts
    from paceline.launch.joining import ask_to_join, one_host

    host = one_host(find_hosts(text).host, text)
    if not (run / "config.toml").is_file():
        raise RunDirectoryError(f"{run} is no run directory: it has no config.toml")
    if (run / DOOR).exists():  # else the answer is no, whatever the host is like
        check_hosts((host,), load_config(run / "config.toml"))
    click.echo(ask_to_join(run, host))
