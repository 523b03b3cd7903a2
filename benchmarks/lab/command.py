"""`paceline bench`: know what exchanges and shares cost, on hosts that this machine emulates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.errors import ConfigError
from paceline.signals import leave_tidily

if TYPE_CHECKING:
    from benchmarks.lab.cluster import TrialRow
    from benchmarks.lab.faults import Outcome
    from benchmarks.lab.night import NightOutcome


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Compare exchanges and shares on emulated hosts.",
)
def command() -> None:
    """Benchmarks side by side in one run, on the hosts of a lab (needs root; see docs/lab.md).

    \b
    paceline bench exchange --lab examples/lab/two-hosts.toml --model alexnet
    paceline bench exchange --rate 100mbit --exchange partition --exchange "stock DDP"
    paceline bench shares --cores 0.8,0.2
    paceline bench predict --out predict.json
    paceline bench faults --only mpi/rank --only allreduce
    paceline bench night
    """
    leave_tidily()


def _count(name: str, default: int, text: str, *, least: int = 1) -> Callable[[Any], Any]:
    """An option that is a number of times."""
    kind = click.IntRange(min=least)
    return click.option(name, default=default, type=kind, show_default=True, help=text)


@command.command()
@click.option(
    "--lab",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Hosts; two of one core each when left out; repeatable.",
)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of --lab.")
@click.option("--rate", "rates", multiple=True, help="Of every link, as 100mbit; repeatable.")
@click.option("--model", "models", multiple=True, help="mnist_cnn, alexnet, vgg16; repeatable.")
@click.option("--exchange", "exchanges", multiple=True, help="Only these; repeatable.")
@_count("--rounds", 2, "How often all take turns.")
@_count("--updates", 2, "Timed updates per turn.")
@_count("--warmup", 1, "Updates before them, not timed.", least=0)
@click.option("--out", type=click.Path(path_type=Path), help="Keep results; go on from there.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def exchange(
    files: tuple[Path, ...],
    changes: tuple[str, ...],
    rates: tuple[str, ...],
    models: tuple[str, ...],
    exchanges: tuple[str, ...],
    rounds: int,
    updates: int,
    warmup: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Every exchange and stock DDP over Gloo: seconds per update, images/s, bytes, waiting.

    \b
    paceline bench exchange --model mnist_cnn --rate 100mbit --rounds 3
    """
    from benchmarks.lab.exchange import EXCHANGES, MODELS, Effort, run_matrix
    from paceline.lab import LabSpec

    all_changes = [(*changes, f"link.rate={rate}") for rate in rates] or [changes]
    specs = [
        LabSpec.load(file, each) if file else LabSpec.from_tables(_two_hosts(), each)
        for file in files or (None,)
        for each in all_changes
    ]
    cells = run_matrix(
        specs,
        models or tuple(MODELS),
        exchanges or EXCHANGES,
        Effort(rounds=rounds, updates=updates, warmup=warmup),
        out=out,
        say=lambda text: click.echo(text, err=True),
    )
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=2))
        return
    for cell in cells:
        _print(cell.title, cell.rows, against="stock DDP")


@command.command()
@click.option("--cores", default="0.8,0.2", show_default=True, help="Cores of each host.")
@click.option("--batch", default=512, show_default=True, help="Global batch of mnist_cnn.")
@_count("--rounds", 3, "How often all take turns.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def shares(cores: str, batch: int, rounds: int, as_json: bool) -> None:
    """Unequal hosts: shares by speed against equal parts and stock DDP.

    \b
    paceline bench shares --cores 0.8,0.2
    """
    from benchmarks.lab.shares import run_shares

    try:
        parts = tuple(float(part) for part in cores.split(","))
    except ValueError:
        raise ConfigError(f"--cores {cores!r} must be numbers such as 0.8,0.2") from None
    rows = run_shares(
        parts, batch=batch, rounds=rounds, say=lambda text: click.echo(text, err=True)
    )
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    _print(f"mnist_cnn, batch {batch}, hosts of {cores} cores", rows, against="alone")


@command.command()
@click.option("--model", "models", multiple=True, help="mnist_cnn, resnet18, alexnet; repeatable.")
@click.option("--hosts", "hosts", multiple=True, help="one, two, unequal, four; repeatable.")
@click.option("--rate", "rates", multiple=True, help="100mbit, 300mbit, 1gbit; repeatable.")
@click.option("--quick", is_flag=True, help="About a third of it.")
@click.option("--verdicts", is_flag=True, help="Only three verdicts: helps, hurts, turns.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep results; go on from there.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def predict(
    models: tuple[str, ...],
    hosts: tuple[str, ...],
    rates: tuple[str, ...],
    quick: bool,
    verdicts: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Predicted against measured seconds per update, and whether the right option was chosen.

    Hosts and links are measured as `paceline measure` does, every option is predicted as
    `paceline plan` does, and then each is timed. Exits with 1 where a bar is missed.

    \b
    paceline bench predict --out predict.json
    """
    from benchmarks.lab.predict import PredictionRun, summarised
    from benchmarks.lab.predict import verdicts as compared
    from benchmarks.lab.predict_cases import EVERY, QUICK, VERDICTS, chosen_cases
    from benchmarks.lab.predict_tables import print_outcomes, print_summary, print_verdicts

    proof = PredictionRun(out, lambda text: click.echo(text, err=True))
    if verdicts:
        proof.run(VERDICTS)
        found = compared(proof.outcomes)
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(verdict) for verdict in found], indent=2))
        else:
            print_verdicts(found)
        if not all(verdict.right for verdict in found):
            raise SystemExit(1)
        return
    proof.run(chosen_cases(QUICK if quick else EVERY, models, hosts, rates))
    summary = summarised(proof.outcomes)
    if as_json:
        everything = {
            "outcomes": [dataclasses.asdict(outcome) for outcome in proof.outcomes],
            "summary": dataclasses.asdict(summary),
            "skipped": proof.skipped,
        }
        click.echo(json.dumps(everything, indent=2))
    else:
        print_outcomes(proof.outcomes)
        print_summary(summary, proof.skipped)
    if not summary.passed:
        raise SystemExit(1)


@command.command()
@click.option(
    "--only",
    multiple=True,
    metavar="EXCHANGE/FAULT",
    help="Only these cells: mpi/rank, mpi or /rank; repeatable.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the runs and logs there.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep results; go on from there.")
@click.option("--list", "as_list", is_flag=True, help="Only name the exchanges and faults.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def faults(
    only: tuple[str, ...], keep: Path | None, out: Path | None, as_list: bool, as_json: bool
) -> None:
    """Trainings on four hosts, each with a fault: what is lost, and whether the weights are exact.

    Seconds until training goes on, updates that are repeated, exit code, weights beside those of
    one process, processes and files that stay. Exits with 1 where a training did not survive.

    \b
    paceline bench faults --only mpi/rank --only /power
    """
    from benchmarks.lab.faults import FAULTS, KINDS, chosen, run_cells

    if as_list:
        click.echo(f"exchanges: {', '.join(KINDS)}\nfaults: {', '.join(FAULTS)}")
        return
    outcomes = run_cells(chosen(only), lambda text: click.echo(text, err=True), keep, out)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=2))
    else:
        _print_faults(outcomes)
    if not all(each.survived for each in outcomes):
        raise SystemExit(1)


def _print_faults(outcomes: Sequence[Outcome]) -> None:
    from rich import box
    from rich.table import Table

    from paceline.report.tables import wide_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("exchange", "fault"):
        table.add_column(name, no_wrap=True)
    for name in ("s until it goes on", "repeated", "exit code", "weights", "orphans", "files"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in outcomes:
        table.add_row(
            each.kind,
            each.fault,
            ("" if each.is_hit else "not hit") if each.seconds is None else f"{each.seconds:.1f}",
            str(each.repeated),
            "none" if each.code is None else str(each.code),
            {True: "equal", False: "OTHER", None: ""}[each.equal],
            str(len(each.orphans)),
            str(len(each.left)),
        )
    wide_console().print(table)


@command.command()
@click.option("--minutes", type=float, default=10.0, show_default=True, help="How long it is.")
@click.option("--departures", type=int, default=6, show_default=True, help="Of one of the hosts.")
@click.option("--throttles", type=int, default=2, show_default=True, help="Of another one.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the run and its log there.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def night(
    minutes: float, departures: int, throttles: int, keep: Path | None, as_json: bool
) -> None:
    """A training on four hosts of which one comes and goes and another is throttled.

    Its updates beside the sum of what was there, its weights beside those of one process. Exits
    with 1 where it did not end well. The run's report shows who was there when.

    \b
    paceline bench night --keep night && paceline report night/allreduce-night
    """
    from benchmarks.lab.night import as_json as for_programs
    from benchmarks.lab.night import run_night

    found = run_night(
        60 * minutes,
        lambda text: click.echo(text, err=True),
        departures=departures,
        throttles=throttles,
        keep=keep,
    )
    if as_json:
        click.echo(json.dumps(for_programs(found), indent=2))
    else:
        _print_night(found)
    if not found.outcome.survived:
        raise SystemExit(1)


def _print_night(found: NightOutcome) -> None:
    from benchmarks.lab.faults import sentence

    for event in found.events:
        click.echo(f"{event.at:6.0f} s  {event.host} {event.what} {event.how}".rstrip())
    click.echo(sentence(found.outcome))
    click.echo(
        f"{found.departures} hosts were lost and {found.returns} came, as legs.jsonl tells; losses"
        f" took {found.lost_seconds:.1f} s of {found.seconds:.0f} s"
    )
    click.echo(
        f"goodput {found.goodput:.0%}: {found.images:,} images of {found.there:,.0f} that the hosts"
        " could have computed, each by itself, while they were there"
    )


def _two_hosts() -> dict[str, Any]:
    return {
        "host": [{"name": "a", "cores": 1.0}, {"name": "b", "cores": 1.0}],
        "link": {"rate": "1gbit"},
    }


def _print(title: str, rows: Sequence[TrialRow], *, against: str) -> None:
    from rich import box
    from rich.table import Table

    from paceline.report.tables import wide_console

    base = next((row for row in rows if row.name == against and row.seconds), None)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    columns = ("s/update", "spread", "images/s", f"of {against}", "MB/update", "packets", "waiting")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.failed:
            table.add_row(row.name, row.failed)
            continue
        ratio = row.images_per_second / base.images_per_second if base else None
        table.add_row(
            row.name,
            f"{row.seconds:.3f}",
            f"{(row.high - row.low) / row.seconds:.0%}",
            f"{row.images_per_second:,.1f}",
            f"{ratio:.2f}" if ratio else "",
            f"{row.mb_sent:.2f}",
            f"{row.packets:,.0f}",
            f"{row.waiting:.0%}",
        )
    wide_console().print(table)
