"""The page of an experiment: verdicts first, then its tables and figures, then every step."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.errors import ConfigError, UserError
from paceline.report.figure import Section, Table
from paceline.report.page import Report
from paceline.report.write import (
    as_plain,
    table_markdown,
    write_figures,
    write_page,
    write_tables,
)
from paceline.schema import encode, write_json
from paceline.text import duration
from studies.outcome import NOT_RUN, Claim, Findings, Outcomes
from studies.spec import BUILT_IN, Experiment

VERDICTS = ("holds", "does not hold", "cannot be tested here")


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where everything went."""

    page: Path
    figures: int
    tables: int
    results: dict[str, Any]


def find_findings(experiment: Experiment) -> Callable[[Outcomes], Findings]:
    """`findings` of the experiment's own findings.py."""
    path = experiment.folder / "findings.py"
    if experiment.folder.parent == BUILT_IN:
        module = importlib.import_module(f"studies.{experiment.folder.name}.findings")
    elif path.is_file():
        name = f"paceline_experiment_{experiment.folder.name}".replace("-", "_")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up by name
        spec.loader.exec_module(module)
    else:
        raise ConfigError(f"{path} is missing: it has findings(outcomes), which makes the page")
    if not callable(getattr(module, "findings", None)):
        raise ConfigError(f"{path} has no function findings(outcomes) -> Findings")
    return cast(Callable[[Outcomes], Findings], module.findings)


def write_experiment(outcomes: Outcomes, out: Path) -> Written:
    """Make the page, results.json, tables and figures of what is there."""
    findings = find_findings(outcomes.experiment)(outcomes)
    report = make_report(outcomes, findings)
    results = _results(outcomes, findings, report)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out") from None
    write_json(out / "results.json", results)
    page = write_page(report, out / "report.html")
    (out / "report.md").write_text(markdown(report))
    return Written(
        page=page,
        figures=write_figures(report, out / "figures"),
        tables=write_tables(report, out / "tables"),
        results=results,
    )


def make_report(outcomes: Outcomes, findings: Findings) -> Report:
    """Verdicts, notes, the experiment's own sections, steps."""
    experiment = outcomes.experiment
    failed = [
        each for each in outcomes.all if each.failed and each.failed != NOT_RUN and not each.absent
    ]
    size = "short form (--quick)" if experiment.quick else "full size"
    return Report(
        title=experiment.title,
        subtitle=f"{experiment.study} Here: {size}.",
        tiles=tuple(_tiles(outcomes, findings)),
        sections=(
            *_claims_section(findings.claims),
            *_notes_section(findings.notes),
            *findings.sections,
            _steps_section(outcomes),
        ),
        problems=tuple(f"{each.step.name} failed: {each.failed}" for each in failed),
        footer=(
            f"Made by {command_line(experiment)} on {_machines(outcomes) or 'no machine yet'}."
        ),
    )


def command_line(experiment: Experiment) -> str:
    """What a person types to get this page."""
    named = experiment.folder.parent == BUILT_IN
    name = experiment.folder.name if named else str(experiment.folder)
    return f"paceline experiment {name}{' --quick' if experiment.quick else ''}"


def markdown(report: Report) -> str:
    """The page without its figures, for documents."""
    lines = [f"# {report.title}", "", report.subtitle, ""]
    for section in report.sections:
        lines += [f"## {section.title}", ""]
        for words in section.text:
            lines += [words, ""]
        for figure in section.figures:
            lines += [f"![{figure.title}](figures/{figure.key}.svg)", "", figure.caption, ""]
        for table in section.tables:
            lines += [f"{table.title}:", "", table_markdown(table)]
    return "\n".join([*lines, report.footer, ""])


def _tiles(outcomes: Outcomes, findings: Findings) -> list[tuple[str, str]]:
    done = [each for each in outcomes.all if each.done]
    tiles = [(f"{len(done)} of {len(outcomes.all)}", "steps done")]
    verdicts = Counter(str(claim.verdict) for claim in findings.claims)
    labels = {"holds": "claims hold here", "does not hold": "do not hold here"}
    labels["cannot be tested here"] = "cannot be tested here"
    tiles += [(str(verdicts[name]), labels[name]) for name in VERDICTS if verdicts[name]]
    if done:
        tiles.append((duration(sum(each.seconds for each in done)), "for these steps"))
        tiles.append((max(each.when for each in done), "last step ended"))
    return tiles


def _claims_section(claims: tuple[Claim, ...]) -> list[Section]:
    if not claims:
        return []
    table = Table(
        key="claims",
        title="What the study says, and what was seen here",
        columns=("claim", "verdict", "because"),
        rows=tuple((claim.claim, claim.verdict, claim.because) for claim in claims),
    )
    return [Section(key="claims", title="Claims", blocks=(table,))]


def _notes_section(notes: tuple[str, ...]) -> list[Section]:
    return [Section(key="notes", title="How to read this", text=notes)] if notes else []


def _steps_section(outcomes: Outcomes) -> Section:
    rows = tuple(
        (
            each.step.name,
            each.seconds if each.failed != NOT_RUN else None,
            each.when or None,
            each.failed or "done",
            _command(each.path),
        )
        for each in outcomes.all
    )
    table = Table(
        key="steps",
        title="Every step with the command that ran it",
        columns=("step", "seconds", "ended", "how", "command"),
        rows=rows,
        formats=("", ",.1f", "", "", ""),
        folded=True,
    )
    text = (f"Run by {command_line(outcomes.experiment)}.",)
    machine = _machines(outcomes)
    return Section(
        key="steps",
        title="Steps",
        text=(*text, f"Machine: {machine}.") if machine else text,
        blocks=(table,),
    )


def _command(path: Path) -> str | None:
    """As anybody could type it: peers are installed below the home folder."""
    file = path / "command.txt"
    if not file.exists():
        return None
    return file.read_text(errors="replace").strip().replace(f"{Path.home()}/", "~/")


def _machines(outcomes: Outcomes) -> str:
    return "; ".join(dict.fromkeys(each.machine for each in outcomes.all if each.machine))


def _results(outcomes: Outcomes, findings: Findings, report: Report) -> dict[str, Any]:
    experiment = outcomes.experiment
    return {
        "experiment": experiment.name,
        "quick": experiment.quick,
        "command": command_line(experiment),
        "machine": _machines(outcomes),
        "claims": [encode(claim) for claim in findings.claims],
        "notes": list(findings.notes),
        "steps": [
            {
                "name": each.step.name,
                "facts": dict(each.step.facts),
                "failed": each.failed,
                "seconds": each.seconds,
                "when": each.when,
                "command": _command(each.path),
                "result": dict(each.result),
                "hosts": dict(each.counters),
            }
            for each in outcomes.all
        ],
        "report": as_plain(report),
    }
