"""`paceline train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.config.help import settings_help


class TrainCommand(click.Command):
    """Appends every setting, with its docstring, to the help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, rows in settings_help():
            with formatter.section(f"Settings: {section}"):
                formatter.write_dl(rows)


@click.command("train", cls=TrainCommand)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a setting.")
@click.option("--data", "data_root", type=click.Path(path_type=Path), help="Folder of data sets.")
@click.option("--run", type=click.Path(path_type=Path), help="Run directory to make or continue.")
@click.option("--resume", is_flag=True, help="Continue the run of --run, or the latest one.")
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly this plan.json.")
@click.option("--again", is_flag=True, help="Race again, whatever is in the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and only that.")
@click.pass_context
def command(
    context: click.Context,
    config: Path | None,
    changes: tuple[str, ...],
    data_root: Path | None,
    run: Path | None,
    resume: bool,
    plan: Path | None,
    again: bool,
    as_json: bool,
) -> int:
    """Train a model. CONFIG is a TOML file or a run directory; the embedded default without it.

    \b
    paceline train
    paceline train examples/mnist.toml --set workload.batch_size=1024
    paceline train runs/latest/config.toml     the same run once more, bit for bit
    paceline train --resume                    go on where the latest run stopped
    """
    from paceline import api
    from paceline.config import load_config

    if data_root is not None:
        changes = (*changes, f"data.root={json.dumps(str(data_root))}")
    asked = load_config(config, changes) if config or changes or not resume else None
    settings, directory, chosen = api.begin(asked, run=run, resume=resume, plan=plan)
    if chosen is None and config is not None and not again:
        chosen = api.plan_beside(config, settings)
    result = api.run_training(
        api.Start(
            config=settings,
            run=directory,
            plan=chosen,
            silent=as_json,
            again=again,
            say=(lambda text: None) if as_json else click.echo,
        )
    )
    _show(result, as_json)
    return result.exit_code


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": str(result.run), **result.summary}, indent=2))
        return
    if result.exit_code:
        click.echo(f"stopped and saved; continue with: paceline train --resume --run {result.run}")
        return
    from rich.console import Console

    from paceline.train.progress import summary_table

    console = Console()
    console.print(summary_table(result.summary))
    console.print(f"run directory: {result.run}", highlight=False, soft_wrap=True)
