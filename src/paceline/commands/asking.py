"""What the commands that measure for a training ask alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from paceline.schema import Config

_OPTIONS = (
    click.argument("config", required=False, type=click.Path(path_type=Path)),
    click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a setting."),
    click.option("--data", "root", type=click.Path(path_type=Path), help="Folder of data sets."),
    click.option("--hosts", metavar="HOSTS", help="A hosts.toml, names as a,b, or `lab`."),
    click.option("--engine", metavar="NAME", help="Who starts the hosts, as for `paceline train`."),
    click.option("--again", is_flag=True, help="Measure even if the result is in the cache."),
)


def training_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG, --set, --data, --hosts, --engine and --again."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def asked_config(config: Path | None, changes: tuple[str, ...], root: Path | None) -> Config:
    """The configuration that CONFIG, --set and --data ask for."""
    from paceline import api
    from paceline.config import load_config

    if root is not None:
        changes = (*changes, f"data.root={json.dumps(str(root))}")
    return api.resolve(load_config(config, changes))
