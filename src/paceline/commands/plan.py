"""`paceline plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.commands.asking import asked_config, training_options

if TYPE_CHECKING:
    from paceline.schema import Config, Plan
    from paceline.schema.machines import Machines


@click.command("plan")
@training_options
@click.option("--machines", type=click.Path(path_type=Path), help="Go by this machines.json.")
@click.option("--output", type=click.Path(path_type=Path), help="Write plan.json there.")
@click.option("--json", "as_json", is_flag=True, help="Print plan.json, and only that.")
def command(
    config: Path | None,
    changes: tuple[str, ...],
    root: Path | None,
    hosts: str | None,
    engine: str | None,
    machines: Path | None,
    output: Path | None,
    again: bool,
    as_json: bool,
) -> None:
    """Decide how CONFIG is trained, from measurements: who does what, and how they agree.

    Machines that would slow the others down are left out. Every option that was rejected
    stands in plan.json with its predicted time and the reason.

    \b
    paceline plan my.toml --hosts a,b --output plan.json
    paceline train my.toml --hosts a,b --plan plan.json
    """
    from paceline.schema import encode, write_json

    settings = asked_config(config, changes, root)
    say: Callable[[str], None] = (lambda text: None) if as_json else click.echo
    if hosts is None and machines is None:
        plan, lines = plan_here(settings, again=again, quiet=as_json, say=say)
    else:
        found = _machines(settings, hosts, engine, machines, again=again, say=say)
        from paceline.workflow.machines import plan_machines

        plan, lines = plan_machines(settings, found)
    if output is not None:
        write_json(output, plan)
    if as_json:
        click.echo(json.dumps(encode(plan), indent=2))
        return
    for line in lines:
        click.echo(line)
    if output is not None:
        click.echo(f"written to {output}, with {len(plan.rejected)} rejected options")


def _machines(
    config: Config,
    hosts: str | None,
    engine: str | None,
    stored: Path | None,
    *,
    again: bool,
    say: Callable[[str], None],
) -> Machines:
    """What to go by: a file, the cache, or hosts that are measured now."""
    from paceline.commands.train import hosts_request
    from paceline.errors import ConfigError
    from paceline.schema import read_json
    from paceline.schema.machines import Machines
    from paceline.workflow.machines import doubts, measure_hosts, place_name, with_settings

    request = hosts_request(hosts, engine)
    if stored is not None:
        found = with_settings(read_json(Machines, stored), config)
        if request is not None:
            names = [place_name(place) for place in request.hosts.places]
            found = dataclasses.replace(found, hosts=tuple(found.host(name) for name in names))
    elif request is not None:
        found, cached = measure_hosts(config, request, again=again, say=say)
        if cached:
            say(f"machines from the cache, measured {found.made}")
    else:
        raise ConfigError(f"--engine {engine} needs --hosts: a hosts.toml, names as a,b, or lab")
    for line in doubts(found):
        say(f"warning: {line}")
    return found


def plan_here(
    config: Config, *, again: bool, quiet: bool, say: Callable[[str], None]
) -> tuple[Plan, list[str]]:
    """This machine alone: what was asked for, or the race's winner."""
    from paceline import api
    from paceline.plan import (
        asked_node,
        asked_plan,
        plan_from_race,
        refuse_foreign_options,
    )

    if config.local.strategy != "auto":
        from paceline.local.cores import usable_cores

        elementwise = ":" not in config.optimizer.name
        node = asked_node(config.local, usable_cores(), elementwise=elementwise)
        plan = asked_plan(config, node, f"local.strategy = {node.strategy!r} was asked for")
        return plan, [plan.reason]
    refuse_foreign_options(config.local)
    race, cached = api.race(config, again=again, quiet=quiet, say=say)
    for warning in race.warnings:
        say(f"warning: {warning}")
    return plan_from_race(config, race), [
        f"{'race (from the cache)' if cached else 'race'}: {race.decision}"
    ]
