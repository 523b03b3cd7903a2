"""`paceline report`: one HTML file of a run, or of several side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where to; report.html in the (first) run when left out.",
)  # fmt: skip
@click.option(
    "--figures", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Every figure as SVG and PNG, too.",
)  # fmt: skip
@click.option(
    "--tables", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Every table as CSV and Markdown, too.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print figures and tables as JSON.")
def command(
    runs: tuple[Path, ...],
    output: Path | None,
    figures: Path | None,
    tables: Path | None,
    as_json: bool,
) -> None:
    """Make a page of everything that one or several runs did.

    RUN is runs/latest when left out. The page of `paceline watch`, complete and frozen in one file
    that opens offline in any browser: figures to hover over, zoom into and hide series of; good in
    print and in the dark.

    \b
    paceline report
    paceline report runs/one-host runs/two-hosts runs/four-hosts --output scaling.html
    paceline report runs/latest --figures figures --tables tables
    """
    from paceline.report.make import make_report
    from paceline.report.write import as_plain, write_figures, write_page, write_tables
    from paceline.watch.state import whole_run

    runs = runs or (Path("runs/latest"),)
    report = make_report([whole_run(path) for path in dict.fromkeys(runs)])
    if as_json:
        click.echo(json.dumps(as_plain(report), indent=2))
    if output is not None or not as_json:
        page = write_page(report, output or runs[0] / "report.html")
        if not as_json:
            click.echo(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if figures is not None:
        count = write_figures(report, figures)
        click.echo(f"{count} figures as SVG and PNG: {figures}", err=as_json)
    if tables is not None:
        count = write_tables(report, tables)
        click.echo(f"{count} tables as CSV and Markdown: {tables}", err=as_json)
