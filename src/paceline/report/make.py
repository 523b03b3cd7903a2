"""Puts a report together: the sections of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.exchanged import exchanged_section
from paceline.report.figure import Section
from paceline.report.legs import legs_section
from paceline.report.load import RunData
from paceline.report.observed import (
    ledger_section,
    network_section,
    notes_section,
    resources_section,
)
from paceline.report.one import asked_section, curves_section, plan_section, race_section
from paceline.report.page import Report
from paceline.report.predicted import measured, predicted_section
from paceline.report.several import several_sections
from paceline.report.timeline import timeline_section
from paceline.report.track import hosts_section, progress_section, tiles_of
from paceline.text import duration, rate


def make_report(runs: Sequence[RunData]) -> Report:
    """The report of one run, or the comparison of several."""
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _one(run: RunData) -> Report:
    track = run.track
    sections = (
        progress_section(track) if track else None,
        legs_section(run),
        hosts_section(track) if track else None,
        curves_section(run),
        *_observed(run),
        notes_section(run),
        predicted_section(run, measured(run)) if run.sessions or not run.under_way else None,
        race_section(run),
        plan_section(run),
        asked_section(run),
    )
    where = f"{run.hosts} hosts by {run.exchange}" if run.hosts > 1 else "one host"
    what = (f"{run.model} on {run.data}, batch {run.batch}", where, run.strategy)
    subtitle = ", ".join(each for each in what if each)
    return Report(
        title=run.name,
        subtitle=f"{subtitle}; begun {run.when}" if run.when else subtitle,
        tiles=tuple(_tiles(run)),
        sections=tuple(section for section in sections if section is not None),
        problems=_problems([run]),
        footer="" if run.under_way else _footer([run]),
        state=track.state if track else "",
        updates=(track.update, track.updates) if track and run.under_way else None,
    )


def _observed(run: RunData) -> tuple[Section | None, ...]:
    """What the events of the ranks tell; one sentence instead where there are none."""
    if not run.sessions:
        return (ledger_section(run),)
    return (
        ledger_section(run),
        exchanged_section(run),
        timeline_section(run),
        resources_section(run),
        network_section(run),
    )


def _tiles(run: RunData) -> list[tuple[str, str]]:
    if run.track and run.under_way:
        predicted = run.plan.predicted.get("images_per_second") if run.plan else None
        return tiles_of(run.track, predicted, run.batch)
    tiles = []
    if run.speed is not None:
        tiles.append((rate(run.speed), "images/s, median over the epochs"))
    if run.accuracy is not None:
        tiles.append((f"{run.accuracy:.2%}", "test accuracy after the last epoch"))
    elif run.loss is not None:
        tiles.append((f"{run.loss:.4g}", "test loss after the last epoch"))
    seconds = run.number("total_seconds")
    if seconds is not None:
        tiles.append((duration(seconds), "in all, start and evaluation included"))
    chosen = next((c for c in run.race.candidates if c.chosen), None) if run.race else None
    if chosen is not None and chosen.speedup:
        tiles.append((f"{chosen.speedup:.2f}x", "sequential, in the race"))
    ratio = run.ledger.coordination_to_computation if run.ledger is not None else None
    if ratio is not None and len(run.sessions) > 1:
        tiles.append((f"{ratio:.2f}", "coordination to computation"))
    tiles.append(("yes" if run.finished else "no", "finished"))
    return tiles


def _several(runs: Sequence[RunData]) -> Report:
    models = ", ".join(dict.fromkeys(run.model for run in runs if run.model))
    data = ", ".join(dict.fromkeys(run.data for run in runs if run.data))
    return Report(
        title=f"{len(runs)} runs compared",
        subtitle=f"{models} on {data}",
        tiles=(),
        sections=tuple(several_sections(runs)),
        problems=_problems(runs),
        footer=_footer(runs),
    )


def _problems(runs: Sequence[RunData]) -> tuple[str, ...]:
    return tuple(f"{run.name}: {problem}" for run in runs for problem in run.problems)


def _footer(runs: Sequence[RunData]) -> str:
    places = ", ".join(str(run.path) for run in runs)
    return f"paceline report: {places}"
