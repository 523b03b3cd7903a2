"""`paceline measure`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.commands.asking import asked_config, training_options

if TYPE_CHECKING:
    from paceline.schema.machines import Machines, Measured, MeasuredHost


@click.command("measure")
@training_options
@click.option("--output", type=click.Path(path_type=Path), help="Write machines.json there.")
@click.option("--json", "as_json", is_flag=True, help="Print machines.json, and only that.")
def command(
    config: Path | None,
    changes: tuple[str, ...],
    root: Path | None,
    hosts: str | None,
    engine: str | None,
    output: Path | None,
    again: bool,
    as_json: bool,
) -> None:
    """Measure machines for CONFIG: how fast each trains it, and what joins them.

    Cores, memory, the race, updates at a few batch sizes, every layer, feeding; between
    hosts latency, bandwidth and all-reduces by size. Kept in the cache until --again.

    \b
    paceline measure my.toml --output machines.json
    paceline measure my.toml --hosts a,b --output machines.json
    """
    from paceline.commands.train import hosts_request
    from paceline.schema import encode, write_json
    from paceline.workflow.machines import doubts, measure_hosts, measure_this

    settings = asked_config(config, changes, root)
    request = hosts_request(hosts, engine)
    if request is None:
        found, cached = measure_this(settings, again=again, quiet=as_json, say=click.echo)
    else:
        say = (lambda text: None) if as_json else click.echo
        found, cached = measure_hosts(settings, request, again=again, say=say)
    if output is not None:
        write_json(output, found)
    if as_json:
        click.echo(json.dumps(encode(found), indent=2))
        return
    for host in found.hosts:
        click.echo(describe_host(host))
    for line in describe_network(found):
        click.echo(line)
    for line in doubts(found):
        click.echo(f"warning: {line}")
    when = f"from the cache, made {found.made}" if cached else "just now"
    click.echo(f"measured {when}" + (f"; written to {output}" if output else ""))


def describe_host(host: MeasuredHost) -> str:
    largest = host.updates[-1]
    cores = f"{host.usable_cores} core{'s' if host.usable_cores > 1 else ''}"
    quota = f" (quota {host.quota:g})" if host.quota is not None else ""
    feed = f", reads {host.feed.median:,.0f}/s" if host.feed else ""
    copies = (
        f", copies {host.memory_bandwidth.median / 1e9:.3g} GB/s" if host.memory_bandwidth else ""
    )
    rate = largest.batch_size / largest.seconds.median
    return (
        f"{host.name}: {cores}{quota}, {host.free_mb:,.0f} MB free{copies}{feed};"
        f" {host.node.strategy} trains {rate:,.0f} images/s at batch {largest.batch_size}"
        f" (spread {largest.seconds.spread:.0%})"
    )


def describe_network(found: Machines) -> list[str]:
    """Every link, and what the largest all-reduce of each backend took."""
    lines = []
    for link in found.links:
        ways = [_rate(link.forward)]
        ways += [f"{_rate(link.backward)} back"] if link.backward else []
        ways += [f"{_rate(link.both)} each way at once"] if link.both else []
        lines.append(
            f"{link.first} - {link.second}: {1000 * link.latency.median:.3g} ms, {', '.join(ways)}"
        )
    for curve in found.curves:
        points = [
            f"{point.bytes / 2**20:.3g} MB {1000 * point.seconds.median:.3g} ms"
            for point in curve.points
            if point.bytes >= 2**20
        ]
        beside = ""
        if curve.slowdown is not None and curve.computing_left is not None:
            beside = (
                f"; while computing {curve.slowdown.median:.2f}x as long, and computing at"
                f" {curve.computing_left.median:.0%} of its speed"
            )
        lines.append(f"all-reduce over {curve.backend}: {', '.join(points)}{beside}")
    return lines


def _rate(figure: Measured) -> str:
    return f"{8 * figure.median / 1e6:,.0f} Mbit/s"
