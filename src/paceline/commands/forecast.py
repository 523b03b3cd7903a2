"""`paceline forecast`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.commands.asking import asked_config
from paceline.cost.transfer import described_link
from paceline.errors import ConfigError, shown
from paceline.schema.machines import Link
from paceline.schema.units import duration, rate

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.answer import Prediction, Row
    from paceline.schema.machines import Link, Machines


@click.command("forecast")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a setting.")
@click.option("--data", "data_root", type=click.Path(path_type=Path), help="Folder of data sets.")
@click.option("--nodes", default="1,2,4,8", show_default=True, help="As in 1,2,4,...,64.")
@click.option("--link", metavar="RATE,LATENCY", help="As in 1Gbit/s,0.2ms.")
@click.option("--machines", type=click.Path(path_type=Path), help="A machines.json to go by.")
@click.option("--like", metavar="HOST", help="Which host of machines.json the nodes are like.")
@click.option("--mix", default="1", show_default=True, help="Speeds of the nodes, as in 1,1/21.")
@click.option(
    "--price", metavar="PRICE", help="Of one machine, as in 900, or of one hour of it, as in 0.4/h."
)
@click.option("--currency", default="", help="Of the price, as in EUR.")
@click.option("--again", is_flag=True, help="Measure even if the result is in the cache.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print for programs and plots, and only that."
)
def command(
    config: Path | None,
    changes: tuple[str, ...],
    data_root: Path | None,
    nodes: str,
    link: str | None,
    machines: Path | None,
    like: str | None,
    mix: str,
    price: str | None,
    currency: str,
    again: bool,
    as_json: bool,
) -> None:
    """Say what more machines would give for CONFIG, and whether they are worth it.

    Measures this machine (or takes machines.json), says what one more machine brings,
    where it stops paying and what it costs, and then predicts images/s, speedup, time
    and cost for every exchange that `train` may choose. Nothing is trained.

    \b
    paceline forecast my.toml --link 1Gbit/s,0.2ms --price 900 --currency EUR
    paceline forecast my.toml --nodes 1,2,4,...,64 --link 1Gbit/s,0.2ms --price 0.4/h
    paceline forecast my.toml --nodes 2 --link 1Gbit/s,0.2ms --mix 1,1/21
    """
    from paceline.config import load_config
    from paceline.errors import ConfigError
    from paceline.plan.answer import Question
    from paceline.plan.predict import predict
    from paceline.schema import ExchangeSettings, encode
    from paceline.workflow.calibration import calibration

    counts, mixture = node_counts(nodes), speeds(mix)
    hourly, purchase = price_from(price) if price is not None else (None, None)
    described = link_from(link) if link is not None else None
    if machines is None and (like is not None or described is None):
        wanted = "--like needs --machines" if like is not None else "--link is missing"
        raise ConfigError(
            f"{wanted}: give --link RATE,LATENCY such as 1Gbit/s,0.2ms, or --machines machines.json"
        )
    found, cached = _machines(config, changes, data_root, machines, again=again, quiet=as_json)
    asked = load_config(config, changes).exchange if config or changes else ExchangeSettings()
    host = found.host(like) if like is not None else found.hosts[0]
    question = Question(
        nodes=counts,
        link=described or _worst_link(found),
        mix=mixture,
        price=hourly,
        purchase=purchase,
        currency=currency_from(currency),
        exchange=asked,
    )
    prediction = predict(host, found.workload, question, calibration())
    if as_json:
        click.echo(json.dumps(encode(prediction), indent=2))
        return
    from paceline.report.tables import wide_console

    console = wide_console()
    for line in prediction.answer:
        console.print(line, highlight=False, style="bold")
    console.print(table(prediction))
    for note in prediction.notes:
        console.print(f"note: {note}", highlight=False)
    for line in turning_points(prediction):
        console.print(line, highlight=False)
    console.print(prediction.verdict, highlight=False)
    if machines is None:
        where = f"from the cache, made {found.made}" if cached else "just now"
        console.print(f"this machine was measured {where}", highlight=False)


def _machines(
    config: Path | None,
    changes: tuple[str, ...],
    data_root: Path | None,
    stored: Path | None,
    *,
    again: bool,
    quiet: bool,
) -> tuple[Machines, bool]:
    """What to go by: machines.json with the configuration's batch, or this machine, measured."""
    from paceline.config import load_config
    from paceline.errors import ConfigError
    from paceline.schema import read_json
    from paceline.schema.machines import Machines
    from paceline.workflow.machines import with_settings

    if stored is not None:
        found = read_json(Machines, stored)
        if not found.hosts:
            raise ConfigError(f"{stored} has no hosts: measure at least one")
        if config is None and not changes and data_root is None:
            return found, True
        named = config is not None or any(
            change.startswith(("workload.model", "workload.data")) for change in changes
        )
        return with_settings(found, load_config(config, changes), same_workload=named), True
    from paceline.workflow.machines import measure_this

    settings = asked_config(config, changes, data_root)
    return measure_this(settings, again=again, quiet=quiet, say=click.echo)


def _worst_link(found: Machines) -> Link:
    """Of the measured links the slowest: what a larger cluster like this can count on."""
    from paceline.errors import ConfigError

    if not found.links:
        raise ConfigError("machines.json has no links: give --link, such as 1Gbit/s,0.2ms")
    return min(found.links, key=lambda link: (link.both or link.forward).median)


def table(prediction: Prediction) -> Table:
    """Every number of nodes with every exchange, the fastest exact one of each marked."""
    from rich import box
    from rich.table import Table

    facts = prediction.workload
    weak = facts.batch_per_worker is not None
    batch = f"batch {facts.batch_size}" if not weak else f"batch {facts.batch_per_worker} per node"
    title = f"{facts.name}, {batch}, {facts.samples:,} samples per epoch, like {prediction.host}"
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("nodes", justify="right", no_wrap=True)
    made.add_column("exchange (~: not exact)", no_wrap=True)
    priced = prediction.question.price is not None
    names = ["images/s", "interval", "speedup", "of ideal", "epoch", "to the end"]
    for name in [*names, *(["cost/epoch", "to the end"] if priced else []), "MB/step"]:
        made.add_column(name, justify="right", no_wrap=True)
    for count in sorted({row.nodes for row in prediction.rows}):
        rows = [row for row in prediction.rows if row.nodes == count]
        valid = [row for row in rows if row.exact and row.fits]
        best = max(valid, key=lambda row: row.images_per_second, default=None)
        for row in sorted(rows, key=lambda row: -row.images_per_second):
            made.add_row(*_cells(row, priced), style="bold green" if row is best else None)
    return made


def _cells(row: Row, priced: bool) -> list[str]:
    money = []
    if priced:
        money = [f"{cost:.3g}" for cost in (row.epoch_cost, row.end_cost) if cost is not None]
    name = row.exchange if row.exact else f"~ {row.exchange}"
    return [
        f"{row.nodes:,}",
        name if row.fits else f"{name}: needs {row.memory_mb:,.0f} MB",
        _number(row.images_per_second),
        f"{_number(row.low)} - {_number(row.high)}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        _duration(row.epoch_seconds),
        _duration(row.end_seconds),
        *money,
        f"{row.bytes_sent / 1e6:,.3g}",
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.3g} h"


def turning_points(prediction: Prediction) -> list[str]:
    """The break-even of link, batch and nodes in words."""
    from paceline.plan.predict import SLOWEST_LINK, rate_text

    even = prediction.break_even
    if even is None:
        return []
    link = even.link_bits_per_second
    rate = "no link" if link is None else f"a link that carries {rate_text(link)}"
    if link is not None and link <= SLOWEST_LINK:
        rate = "any link"
    lines = [f"break-even: {even.nodes} nodes are as fast as one with {rate}"]
    if prediction.workload.batch_per_worker is None:
        size = f"a batch of {even.batch:,}" if even.batch is not None else "no batch"
        lines[0] += f", or on this link with {size}"
    least = (
        "no number of nodes beats one"
        if even.node_count is None
        else (f"{even.node_count} nodes are the fewest that beat one")
    )
    lines.append(f"nodes: {least}; of those asked for, {even.fastest_nodes} are fastest")
    return lines


MOST_NODES = 1_000_000
LONGEST_CURRENCY = 8
FASTEST = 1e6
"""More than lies between any two machines."""


def node_counts(text: str) -> tuple[int, ...]:
    """Numbers of nodes; `...` goes on as the two before it did, doubling or adding.

    >>> node_counts("1,2,4,...,64")
    (1, 2, 4, 8, 16, 32, 64)
    >>> node_counts("2,4,6,...,10")
    (2, 4, 6, 8, 10)
    """
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for place, word in enumerate(words):
        if word == "...":
            if len(found) < 2 or place + 1 >= len(words) or not _count(words[place + 1]):
                raise _wrong_nodes(text)
            found += _going_on(found, _count(words[place + 1]))
        elif _count(word):
            found.append(_count(word))
        else:
            raise _wrong_nodes(text)
    return tuple(sorted(set(found)))


def _count(word: str) -> int:
    """A number of nodes, or 0 for what is none."""
    number = int(word) if word.isdecimal() and len(word) <= len(str(MOST_NODES)) else 0
    return number if number <= MOST_NODES else 0


def _going_on(found: list[int], end: int) -> list[int]:
    before, last = found[-2:]
    grows = last > before
    # 1, 2 could mean both; what doubles up to now doubles on
    doubling = all(b == 2 * a for a, b in itertools.pairwise(found))
    step, result = last - before, []
    while grows and (last := last * 2 if doubling else last + step) < min(end, MOST_NODES):
        result.append(last)
    return result


def _wrong_nodes(text: str) -> ConfigError:
    return ConfigError(
        f"--nodes {shown(text)} must be whole numbers from 1 to {MOST_NODES:,} with commas, such as"
        " 1,2,4,...,64"
    )


def link_from(text: str) -> Link:
    """A link as it is sold: rate and latency.

    >>> round(link_from("1Gbit/s,0.2ms").latency.median, 6)
    0.0002
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        raise ConfigError(
            f"--link {shown(text)} must be a rate and a latency with a comma between, such as"
            " 1Gbit/s,0.2ms"
        )
    return described_link(rate(parts[0].removesuffix("/s"), "--link"), duration(parts[1], "--link"))


def speeds(text: str) -> tuple[float, ...]:
    """Speeds against the measured host.

    >>> speeds("1,1/20")
    (1.0, 0.05)
    """
    found = []
    for word in text.split(","):
        above, _, below = word.partition("/")
        try:
            value = float(above) / float(below or 1)
        except (ValueError, ZeroDivisionError):
            value = 0.0
        if not 1 / FASTEST <= value <= FASTEST:
            raise ConfigError(
                f"--mix {shown(text)} must be speeds above 0 against the measured host, such as"
                f" 1,1/21, and at most {FASTEST:g} times as fast or slow"
            )
        found.append(value)
    return tuple(found)


def price_from(text: str) -> tuple[float | None, float | None]:
    """A price per node and hour, or per node: one of the two.

    >>> price_from("0.4/h"), price_from("900")
    ((0.4, None), (None, 900.0))
    """
    hourly = text.strip().endswith("/h")
    try:
        value = float(text.strip().removesuffix("/h"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            f"--price {shown(text)} must be what one machine costs, such as 900, or costs per hour,"
            " such as 0.4/h"
        )
    return (value, None) if hourly else (None, value)


def currency_from(text: str) -> str:
    """A currency as people write it after a number.

    >>> currency_from("EUR")
    'EUR'
    """
    if len(text) > LONGEST_CURRENCY or not text.isprintable():
        raise ConfigError(
            f"--currency {shown(text)} must be at most {LONGEST_CURRENCY} characters, such as EUR"
        )
    return text.strip()
