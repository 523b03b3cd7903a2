"""`paceline experiment`: a study's tables and figures from this machine."""

from __future__ import annotations

import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.signals import leave_tidily

if TYPE_CHECKING:
    from studies.spec import Experiment, StudyStep


@click.command("experiment", short_help="Run a study here, beside plain PyTorch.")
@click.argument("name")
@click.option("--quick", is_flag=True, help="The short form: less than ten minutes on 2 cores.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where to; runs/experiments/NAME when left out.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="STEP", help="These steps alone; * is any text.")
@click.option("--again", is_flag=True, help="Run steps again that are done.")
@click.option("--look", is_flag=True, help="Run nothing: make the page of what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print results for programs.")
def command(
    name: str,
    quick: bool,
    out: Path | None,
    only: tuple[str, ...],
    again: bool,
    look: bool,
    as_json: bool,
) -> int:
    """Run a study here, beside plain PyTorch; NAME is one of `list`, or a folder of your own.

    Ended in whatever way, it goes on where it stopped when it is started again; the page can be
    looked at before all steps are done.

    \b
    paceline experiment list
    paceline experiment wang --quick
    paceline experiment wang --only 'time-*'
    paceline experiment wang --look
    """
    from studies.estimate import estimate, predicted_factor
    from studies.outcome import load_outcomes
    from studies.page import write_experiment
    from studies.running import check, check_data, run_steps
    from studies.spec import find_experiment, load_experiment

    if name == "list":
        _list(as_json)
        return 0
    experiment = load_experiment(find_experiment(name), quick=quick)
    out = out or Path("runs", "experiments", f"{experiment.name}{'-quick' if quick else ''}")

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    if not look:
        check(experiment)
        steps = _chosen(experiment, only)
        check_data(steps)
        there = [each for each in load_outcomes(experiment, out).all if each.step in steps]
        factor = None if quick or again else predicted_factor(there, out)
        words = estimate(there, again=again, predicted=factor).words
        say(f"{experiment.title}: {words}; results in {out}")
        leave_tidily()
        run_steps(steps, out, again=again, say=say, show=_show)
    outcomes = load_outcomes(experiment, out)
    written = write_experiment(outcomes, out)
    if as_json:
        click.echo(json.dumps(written.results, indent=2))
    for claim in written.results["claims"]:
        say(f"{claim['verdict']}: {claim['claim']} ({claim['because']})")
    say(f"{written.figures} figures, {written.tables} tables; the page: {written.page}")
    went_wrong = any(each.failed and not each.absent for each in outcomes.all)
    return 1 if went_wrong and not look and not only else 0


def _chosen(experiment: Experiment, only: tuple[str, ...]) -> list[StudyStep]:
    """The steps that `--only` names, in their order; all without it."""
    if not only:
        return list(experiment.steps)
    found = [step for step in experiment.steps if any(fnmatch(step.name, each) for each in only)]
    for each in only:
        if not any(fnmatch(step.name, each) for step in experiment.steps):
            experiment.step(each)  # says which there are
    return found


def _list(as_json: bool) -> None:
    from paceline.text import duration
    from studies.spec import built_in, load_experiment

    rows: list[dict[str, Any]] = []
    for name, folder in built_in().items():
        full, quick = load_experiment(folder), load_experiment(folder, quick=True)
        rows.append(
            {
                "name": name,
                "title": full.title,
                "study": full.study,
                "steps": len(full.steps),
                "seconds": sum(step.seconds for step in full.steps),
                "quick_steps": len(quick.steps),
                "quick_seconds": sum(step.seconds for step in quick.steps),
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}: {row['title']} ({row['study']})")
        for form, prefix in (("full", ""), ("--quick", "quick_")):
            taken = duration(row[f"{prefix}seconds"])
            click.echo(f"    {form}: {row[f'{prefix}steps']} steps, about {taken} on 2 cores")


def _show(text: str) -> None:
    """One line that is written over again and again, on a terminal only."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 5
        click.echo(f"\r\x1b[K{'    ' if text else ''}{text[:width]}", err=True, nl=False)
