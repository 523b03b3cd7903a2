"""`paceline doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.hardware.instructions import Amx


@click.command("doctor")
@click.option("--hosts", metavar="HOSTS", help="Check these machines and the links between them.")
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --hosts: the training whose data and files they must have.",
)
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
@click.pass_context
def command(
    context: click.Context, hosts: str | None, config_path: Path | None, as_json: bool
) -> None:
    """Check this machine: what there is to train with, and what stands in the way.

    \b
    paceline doctor                          this machine
    paceline doctor --hosts a,b              others, over ssh, and the links between them
    paceline doctor --hosts hosts.toml --config my.toml
    """
    if hosts is not None:
        from paceline.commands.doctor_hosts import examine

        context.exit(examine(hosts, config_path, as_json=as_json))
    if config_path is not None:
        raise click.UsageError("--config belongs to --hosts: add --hosts, or leave it out")
    _this_machine(as_json)


def _this_machine(as_json: bool) -> None:
    from paceline import data
    from paceline.config.environment import amx_allowed, cache_root, data_root
    from paceline.hardware.instructions import announces_amx, try_amx
    from paceline.hardware.machine import look_at_machine, problems
    from paceline.schema import encode

    machine = look_at_machine()
    root, cache = data_root(), cache_root()
    folder = str(root) if root else None
    found = [
        name
        for name in data.names()
        if data.is_here(data.DataRequest(name=name, root=folder, cache=str(cache)))
    ]
    wrong = problems(machine)
    amx = try_amx() if announces_amx() and amx_allowed() else None
    if amx is not None and amx.answered and not amx.works:
        wrong.append(
            "the processor announces AMX, but a program that uses it dies: bf16 uses AVX-512"
        )
    if as_json:
        facts = encode(machine) | {"data": found, "amx": amx and encode(amx), "problems": wrong}
        click.echo(json.dumps(facts, indent=2))
        return
    from rich.table import Table

    from paceline.text import terminal

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    quota = "no limit" if machine.quota is None else f"{machine.quota:g} cores"
    rows = [
        ("host", machine.host),
        ("processor", machine.processor),
        ("cores", f"{machine.cores} visible, quota {quota}, {machine.usable} usable"),
        ("busy", f"{machine.busy:.0%} of the cores in use by others"),
        ("AMX (for bf16)", _amx_in_words(amx)),
        ("memory", f"{machine.memory_mb:,.0f} MB, {machine.free_mb:,.0f} free"),
        ("accelerators", ", ".join(machine.accelerators) or "none"),
        ("versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())),
        ("mpiexec", machine.mpi or "none"),
        ("compiler", machine.compiler or "none (needed for numerics.compile only)"),
        ("data root", machine.data_root or "PACELINE_DATA is not set"),
        ("data found", ", ".join(found) or "none"),
        ("cache", f"{machine.cache_root}, {machine.cache_free_mb:,.0f} MB free"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console = terminal()
    console.print(table)
    for sentence in wrong:
        console.print(f"problem: {sentence}", highlight=False, soft_wrap=True)
    console.print(verdict(machine.usable, len(wrong)), highlight=False, soft_wrap=True)


def verdict(cores: float, wrong: int) -> str:
    """The last line: one sentence.

    >>> verdict(2, 0)
    'nothing stands in the way: `paceline train` has 2 cores to train with'
    >>> verdict(0.5, 1)
    '1 problem above makes trainings here slower or fail: put it right, then `paceline train`'
    """
    if not wrong:
        count = f"{cores:g} core{'' if cores == 1 else 's'}"
        return f"nothing stands in the way: `paceline train` has {count} to train with"
    which = "1 problem above makes" if wrong == 1 else f"{wrong} problems above make"
    return (
        f"{which} trainings here slower or fail: put {'it' if wrong == 1 else 'them'} right,"
        " then `paceline train`"
    )


def _amx_in_words(amx: Amx | None) -> str:
    if amx is None:
        from paceline.config.environment import amx_allowed

        return "none" if amx_allowed() else "not used: PACELINE_AMX is off"
    if not amx.answered:
        return "announced, but too busy to try it: ask again"
    if not amx.works:
        return "announced, but a program that uses it dies"
    if amx.described:
        return "works; the hypervisor hides its tiles, Paceline fills them in"
    return "works"
