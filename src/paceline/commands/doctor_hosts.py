"""`paceline doctor --hosts`: what each host is, what the links carry, what is wrong."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.api import resolve
from paceline.config import load_config
from paceline.config.hosts import find_hosts
from paceline.launch.inspection import Inspection, inspect_hosts, wanted_facts
from paceline.launch.pairs import Links, measure_links

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.schema.hosts import Host


def examine(text: str, config_path: Path | None, *, as_json: bool) -> int:
    """Print everything; 2 when the hosts could not train together, else 0."""
    hosts = find_hosts(text).in_order
    config = resolve(load_config(config_path))
    found = inspect_hosts(hosts, wanted_facts(config))
    able = tuple(host for host in hosts if host.name in found.facts)
    show = None if as_json or not sys.stderr.isatty() else lambda text: click.echo(text, err=True)
    links = measure_links(able, say=show or (lambda text: None)) if able else Links()
    wrong = found.problems()
    # A pair that cannot reach each other is named once.
    odd = links.problems(
        known={
            (name, other)
            for name, answers in found.reached.items()
            for other, answer in answers.items()
            if "error" in answer
        }
    )
    odd += _different_mpi(found) + _not_as_here(found)
    report = {
        "hosts": [_facts(host, found, links) for host in hosts],
        "data": config.workload.data,
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "megabits": None if link.error else round(link.megabits, 1),
                "round_trip_ms": None if link.error else round(link.round_trip_ms, 3),
                "error": link.error,
            }
            for link in links.links
        ],
        "problems": wrong,
        "warnings": odd,
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    return 2 if wrong else 0


def _different_mpi(found: Inspection) -> list[str]:
    """Training works without MPI, but the engine that is usually faster is lost."""
    kinds = {name: facts["mpi"] for name, facts in found.facts.items()}
    if len(set(kinds.values())) < 2:
        return []
    having = next(name for name, kind in kinds.items() if kind)
    return [
        f"host {name} has {kind or 'no MPI'} but {having} has {kinds[having]}: training goes by"
        " ssh over Gloo; install the same on all hosts to use --engine mpi"
        for name, kind in kinds.items()
        if kind != kinds[having]
    ]


def _not_as_here(found: Inspection) -> list[str]:
    """Hosts agree with each other or training refuses them; this machine only starts them."""
    own = metadata.version("paceline")
    versions = {name: facts["versions"].get("paceline") for name, facts in found.facts.items()}
    return [
        f"host {name} has Paceline {version} but this machine has {own}: `paceline hosts setup`"
        " makes them equal"
        for name, version in versions.items()
        if version != own
    ]


def _facts(host: Host, found: Inspection, links: Links) -> dict[str, Any]:
    """What one host is; with `error` alone when it did not answer."""
    name = host.name
    if name not in found.facts:
        return {"name": name, "address": host.reach, "error": found.failures.get(name, "")}
    facts = found.facts[name]
    place = found.networks.get(name)
    own = [answer["from"] for answer in found.reached.get(name, {}).values() if "from" in answer]
    return {
        "name": name,
        "address": own[0] if own else host.network_address,
        "interface": place[0] if place else None,
        "network": place[1] if place else None,
        "versions": facts["versions"],
        "mpi": facts["mpi"],
        "cores": facts["cores"],
        "usable": facts["usable"],
        "memory_mb": facts["memory_mb"],
        "data": facts["data"],
        "clock_seconds": round(links.clocks[name], 3) if name in links.clocks else None,
        "error": None,
    }


def _print(report: dict[str, Any]) -> None:
    from paceline.text import terminal

    # Tables that lose columns in a pipe help nobody.
    console = terminal(width=200)
    console.print(_host_table(report))
    names = [host["name"] for host in report["hosts"] if not host["error"]]
    if report["links"]:
        console.print("\nMbit/s and round trip in ms, from the host at the left to the one above")
        console.print(_link_table(report["links"], names))
    console.print()
    for sentence in report["problems"]:
        console.print(f"problem: {sentence}", highlight=False, soft_wrap=True, markup=False)
    for sentence in report["warnings"]:
        console.print(f"warning: {sentence}", highlight=False, soft_wrap=True, markup=False)
    ending = verdict(len(report["hosts"]), len(report["problems"]), len(report["warnings"]))
    console.print(ending, highlight=False, soft_wrap=True)


def verdict(hosts: int, problems: int, warnings: int) -> str:
    """The last line: one sentence.

    >>> verdict(2, 0, 1)
    '2 hosts can train together, more slowly for what the 1 warning says'
    """
    several = "hosts" if hosts > 1 else "host"
    if problems:
        which = "problem is" if problems == 1 else "problems are"
        return f"{hosts} {several} cannot train yet: the {problems} {which} to be put right first"
    able = f"{hosts} {several} can train{' together' if hosts > 1 else ''}"
    if warnings:
        words = "warning says" if warnings == 1 else "warnings say"
        return f"{able}, more slowly for what the {warnings} {words}"
    return f"nothing stands in the way: {able}"


def _host_table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("host", "address", "interface", "python", "paceline", "torch", "MPI"):
        table.add_column(column)
    for column in ("cores", "usable", "memory MB"):
        table.add_column(column, justify="right")
    table.add_column(f"data: {Path(report['data']).name}")
    table.add_column("clock", justify="right")
    for host in report["hosts"]:
        if host["error"]:
            table.add_row(host["name"], host["address"], "does not answer")
            continue
        versions = host["versions"]
        clock = host["clock_seconds"]
        table.add_row(
            host["name"],
            host["address"],
            host["interface"] or "-",
            *(versions.get(package, "none") for package in ("python", "paceline", "torch")),
            host["mpi"] or "none",
            str(host["cores"]),
            f"{host['usable']:g}",
            f"{host['memory_mb']:,}",
            host["data"],
            "-" if clock is None else f"{round(clock, 2) + 0.0:+.2f} s",
        )
    return table


def _link_table(links: list[dict[str, Any]], names: list[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("from")
    for name in names:
        table.add_column(name, justify="right")
    cells = {
        (link["from"], link["to"]): "-"
        if link["error"]
        else f"{link['megabits']:,.0f}  {link['round_trip_ms']:.2f}"
        for link in links
    }
    for source in names:
        table.add_row(source, *(cells.get((source, target), "") for target in names))
    return table
