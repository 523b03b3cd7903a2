"""`paceline lab`: an emulated cluster on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from paceline.errors import PacelineError, UnsupportedError
from paceline.lab import Lab, LabSpec, leftovers, network, probe
from paceline.lab.groups import find_controllers
from paceline.lab.network import Counters
from paceline.lab.process import LabProcess
from paceline.signals import leave_tidily


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """An emulated cluster on this Linux machine: hosts, links, limits, faults.

    \b
    paceline lab run examples/lab/two-hosts.toml -- ssh b hostname
    paceline lab run --set link.rate=100mbit examples/lab/four-hosts.toml -- \\
        mpiexec -H a,b,c,d python program.py
    paceline lab check                  what this machine can emulate
    paceline lab clean                  remove what killed labs left
    """


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of FILE.")
@click.option("--on", "host", metavar="HOST", help="Where the command runs; the first host.")
@click.option("--plain", is_flag=True, help="Plain processes on loopback, even as root.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON, last.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the outcome as JSON.")
def run(
    file: Path,
    arguments: tuple[str, ...],
    changes: tuple[str, ...],
    host: str | None,
    plain: bool,
    as_json: bool,
    report: Path | None,
) -> int:
    """Run COMMAND on the hosts that FILE describes; its exit code is ours.

    Keys for --set: link.rate, link.delay, host.NAME.cores, host.*.memory, fault.0.at and so on.
    What the lab says goes to standard error; standard output is the command's.

    \b
    sudo paceline lab run examples/lab/two-hosts.toml -- paceline train --hosts lab
    """
    spec = LabSpec.load(file, changes)
    if host is not None:
        spec.host(host)
    lab = Lab(spec, plain=plain)
    # Until the command runs and takes them over, these must not end us halfway.
    leave_tidily()
    with lab:
        for line in _preface(lab):
            _say(line)
        outcome = run_session(lab, arguments, on=host, notify=_say)
        record = _record(lab, outcome)
    _print_table(record)
    if report is not None:
        report.write_text(json.dumps(record, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(record))
    return outcome.exit_code


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def check(as_json: bool) -> int:
    """Say what this machine can emulate; exit code 1 when hosts cannot be namespaces.

    \b
    sudo paceline lab check
    """
    obstacle = probe.namespace_obstacle()
    version, controllers = find_controllers()
    findings = {
        "hosts as namespaces, shaped links": obstacle or "yes",
        "link delay (relay in user space)": obstacle or probe.delay_obstacle() or "yes",
        "CPU quota and memory limit": "; ".join(probe.group_obstacles())
        or f"yes (control groups version {version}: {', '.join(sorted(controllers))})",
        "cores of this machine": str(len(os.sched_getaffinity(0))),
    }
    if as_json:
        click.echo(json.dumps(findings))
    else:
        for name, text in findings.items():
            click.echo(f"{name}: {text}")
    return 0 if obstacle is None else 1


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def clean(as_json: bool) -> None:
    """Remove processes, control groups and files of labs that are dead.

    \b
    sudo paceline lab clean
    """
    if not Path("/proc/self/mountinfo").exists():
        raise UnsupportedError("labs exist on Linux only, so there is nothing to clean here")
    removed = leftovers.clean()
    if as_json:
        click.echo(json.dumps(removed))
        return
    for line in removed:
        click.echo(f"removed {line}")
    if not removed:
        click.echo("nothing left of dead labs")


def _say(text: str) -> None:
    click.echo(f"lab: {text}", err=True)


def _preface(lab: Lab) -> list[str]:
    lines = list(lab.warnings)
    if not lab.emulated:
        lines.append(
            f"hosts are plain processes on loopback addresses because {lab.plain_reason};"
            f" not emulated: {', '.join(lab.cannot)}"
        )
    elif lab.cannot:
        lines.append(f"not emulated on this machine: {', '.join(lab.cannot)}")
    return lines


def _record(lab: Lab, outcome: CommandOutcome) -> dict[str, Any]:
    usage = lab.usage()
    hosts: dict[str, Any] = {}
    for host in lab.spec.hosts:
        hosts[host.name] = {
            "address": lab.addresses[host.name],
            "cores": host.cores,
            "visible": host.visible_cores,
            "link": network.describe(lab.spec.rate_of(host.name), lab.spec.delay_of(host.name))
            if lab.emulated
            else "loopback",
        }
        for part in (outcome.counters.get(host.name), usage.get(host.name)):
            hosts[host.name] |= dataclasses.asdict(part) if part is not None else {}
    return {
        "exit_code": outcome.exit_code,
        "seconds": round(outcome.seconds, 3),
        "emulated": lab.emulated,
        "not_emulated": lab.cannot,
        "warnings": lab.warnings,
        "faults": list(outcome.faults),
        "hosts": hosts,
        "relay_cpu_seconds": lab.relay_seconds(),
    }


def _print_table(record: dict[str, Any]) -> None:
    columns = ["host", "cores", "sees", "link"]
    columns += ["sent MB", "received MB", "packets out", "in", "CPU s", "throttled s", "peak MB"]
    rows = [columns]
    for name, host in record["hosts"].items():
        rows.append(
            [
                name,
                f"{host['cores']:g}",
                str(host["visible"]),
                host["link"],
                _scaled(host.get("bytes_sent"), 1e-6, 3),
                _scaled(host.get("bytes_received"), 1e-6, 3),
                _scaled(host.get("packets_sent"), 1, 0),
                _scaled(host.get("packets_received"), 1, 0),
                _scaled(host.get("cpu_seconds"), 1, 2),
                _scaled(host.get("throttled_seconds"), 1, 2),
                _scaled(host.get("memory_peak"), 1e-6, 0),
            ]
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        _say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if record["relay_cpu_seconds"] is not None:
        _say(f"the delay relay used {record['relay_cpu_seconds']:.2f} s of CPU, no host's")
    _say(f"exit code {record['exit_code']} after {record['seconds']:.1f} s")


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


GRACE_SECONDS = 10.0
TURN_SECONDS = 0.5
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """How a command in a lab went."""

    exit_code: int
    """The command's own, or 128 and the number of the signal that ended it."""

    seconds: float
    """From its start to its end."""

    faults: tuple[dict[str, Any], ...]
    """Each fault that happened: when, what, and why not if it could not."""

    counters: dict[str, Counters]
    """Traffic of each host while it ran."""


def run_session(
    lab: Lab,
    command: Sequence[str],
    *,
    on: str | None = None,
    notify: Callable[[str], None] = print,
) -> CommandOutcome:
    """Run a command to its end while faults happen; `notify` gets one line for each."""
    before = lab.counters()
    waiting = sorted(lab.spec.faults, key=lambda fault: fault.seconds)
    happened: list[dict[str, Any]] = []
    started = time.monotonic()
    process = lab.start(command, on=on)
    with contextlib.closing(process), _signals_passed_on(process) as asked_to_end:
        while process.poll() is None:
            now = time.monotonic() - started
            if asked_to_end and time.monotonic() > asked_to_end[0] + GRACE_SECONDS:
                process.kill()
            while waiting and waiting[0].seconds <= now:
                fault = waiting.pop(0)
                record = {"seconds": round(now, 3), "kind": fault.kind, "host": fault.host}
                try:
                    lab.apply(fault)
                    notify(f"{now:.1f} s: {fault}")
                except PacelineError as error:
                    record["error"] = str(error)
                    notify(f"{now:.1f} s: {error}")
                happened.append(record)
            until = waiting[0].seconds - now if waiting else TURN_SECONDS
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(TURN_SECONDS, until)))
    seconds = time.monotonic() - started
    code = process.returncode
    assert code is not None, "the loop ends with the process"
    after = lab.counters()
    return CommandOutcome(
        exit_code=code if code >= 0 else 128 - code,
        seconds=seconds,
        faults=tuple(happened),
        counters={host: after[host] - before[host] for host in after},
    )


@contextlib.contextmanager
def _signals_passed_on(process: LabProcess) -> Iterator[list[float]]:
    """Pass Ctrl-C and the like to the command; a second one kills it."""
    asked: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(signal.SIGKILL if asked else number)
        asked.append(time.monotonic())

    old = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
