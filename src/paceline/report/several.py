"""Sections that compare several runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.report.exchanged import exchange_section
from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.scaling import grouped
from paceline.report.studies import batch_section, scaling_section


def several_sections(runs: Sequence[RunData]) -> list[Section]:
    """Everything that can be said of these runs together."""
    sections = [
        overview_section(runs),
        curves_section(runs),
        scaling_section(runs, "strong"),
        scaling_section(runs, "weak"),
        batch_section(runs),
        exchange_section(runs),
        coordination_section(runs),
        predictions_section(runs),
    ]
    return [section for section in sections if section is not None]


def overview_section(runs: Sequence[RunData]) -> Section:
    """One row per run, and its speed as a bar."""
    scores = [
        (title, key, style)
        for title, key, style in (
            ("test loss", "test_loss", ".4f"),
            ("test accuracy", "test_accuracy", ".2%"),
        )
        if any(run.number(key) is not None for run in runs)
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            run.name,
            run.model,
            run.data,
            run.batch,
            run.hosts,
            run.strategy,
            run.exchange,
            run.speed,
            *(run.number(key) for _, key, _ in scores),
            run.number("epoch_seconds_median"),
            run.number("total_seconds"),
            run.finished,
        )
        for run in runs
    ]
    table = Table(
        key="runs",
        title="Runs",
        columns=(
            "run", "model", "data", "batch", "hosts", "local strategy", "exchange", "images/s",
            *(title for title, _, _ in scores), "epoch (s)", "total (s)", "finished",
        ),
        rows=tuple(rows),
        formats=(
            "", "", "", ",d", "d", "", "", ",.0f", *(style for _, _, style in scores), ",.2f",
            ",.1f", "",
        ),
    )  # fmt: skip
    known = [run for run in runs if run.speed]
    blocks: list[Figure | Table] = []
    if known:
        blocks.append(
            _bars(
                "speeds",
                "Speed of each run",
                "Median over the epochs of a run; evaluation and checkpoints are left out."
                " Whiskers are the slowest and the fastest epoch.",
                "images/s",
                known,
                [run.speed for run in known],
                spread="images_per_second",
            )
        )
    return Section(key="overview", title="Runs", blocks=(*blocks, table))


def _bars(
    key: str,
    title: str,
    caption: str,
    unit: str,
    runs: Sequence[RunData],
    values: Sequence[float | None],
    spread: str = "",
) -> Figure:
    """One lying bar per run; models are told apart by their look."""
    models = grouped(runs, lambda run: (run.model,))
    value_of = {run.name: value for run, value in zip(runs, values, strict=True)}
    series = []
    for place, (name, members) in enumerate(models):
        columns = [[v for v in run.column(spread) if v is not None] for run in members]
        wanted = bool(spread) and all(columns)
        series.append(
            Series(
                name=name or unit,
                shape="bar",
                look=place,
                x=tuple(run.name for run in members),
                y=tuple(value_of[run.name] for run in members),
                low=tuple(min(column) for column in columns) if wanted else (),
                high=tuple(max(column) for column in columns) if wanted else (),
                labels=tuple(_what(run) for run in members),
            )
        )
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x=Axis(title="run", kind="category"),
        y=Axis(title=unit, minimum=0.0),
        series=tuple(series),
        horizontal=True,
        order=tuple(run.name for run in runs),
    )


def _what(run: RunData) -> str:
    hosts = f"{run.hosts} hosts, {run.exchange}, " if run.hosts > 1 else ""
    return f"{run.model}, batch {run.batch}, {hosts}{run.strategy}"


def curves_section(runs: Sequence[RunData]) -> Section | None:
    """Test loss of all runs, and accuracy of those with classes, by epoch and by time."""
    known = [run for run in runs if run.metrics]
    if not known:
        return None
    caption = "After each epoch, on the test set."
    time = " Time is that of the training loop, summed over the epochs."
    figures = [
        _overlay("accuracy-epochs", "Accuracy by epoch", caption, known, "test_accuracy"),
        _overlay("accuracy-time", "Accuracy by time", caption + time, known, "test_accuracy", True),
        _overlay("loss-epochs", "Test loss by epoch", caption, known, "test_loss"),
    ]
    if not figures[0].series:
        figures.append(
            _overlay("loss-time", "Test loss by time", caption + time, known, "test_loss", True)
        )
    return Section(
        key="curves",
        title="Loss and accuracy" if figures[0].series else "Loss",
        blocks=tuple(figure for figure in figures if figure.series),
    )


def _overlay(
    key: str,
    title: str,
    caption: str,
    runs: Sequence[RunData],
    column: str,
    by_time: bool = False,
) -> Figure:
    series = []
    for place, run in enumerate(runs):
        y = run.column(column)
        if all(value is None for value in y):
            continue
        epochs = tuple(value or 0.0 for value in run.column("epoch"))
        seconds = itertools.accumulate(value or 0.0 for value in run.column("seconds"))
        series.append(
            Series(name=run.name, x=tuple(seconds) if by_time else epochs, y=y, look=place)
        )
    accuracy = column.endswith("accuracy")
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x=Axis(title="seconds of training", minimum=0.0) if by_time else _epochs(runs),
        y=Axis(title="test accuracy", format="percent")
        if accuracy
        else Axis(title="test loss", minimum=0.0),
        series=tuple(series),
    )


def _epochs(runs: Sequence[RunData]) -> Axis:
    """Whole epochs only, while there are few."""
    last = max(len(run.metrics) for run in runs)
    return Axis(title="epoch", ticks=tuple(float(e + 1) for e in range(last)) if last <= 12 else ())


def coordination_section(runs: Sequence[RunData]) -> Section | None:
    """The ratio of coordination to computation of each run."""
    known = [
        (run, run.ledger, ratio)
        for run in runs
        if run.ledger is not None and (ratio := run.ledger.coordination_to_computation) is not None
    ]
    if not known:
        return None
    figure = _bars(
        "coordination-to-computation",
        "Ratio of coordination to computation",
        "Seconds of exposed communication and of waiting for others per second of computing, over"
        " all ranks. Above 1 the machines spend more time agreeing than computing.",
        "coordination / computation",
        [run for run, _, _ in known],
        [ratio for _, _, ratio in known],
    )
    table = Table(
        key="coordination-to-computation",
        title="Coordination to computation",
        columns=("run", "hosts", "ranks", "batch", "ratio"),
        rows=tuple((run.name, run.hosts, len(made.ranks), run.batch, r) for run, made, r in known),
        formats=("", "d", "d", ",d", ".3f"),
    )
    return Section(key="coordination", title="Coordination to computation", blocks=(figure, table))


def predictions_section(runs: Sequence[RunData]) -> Section | None:
    """Predicted and measured speed of all runs whose plan predicted one."""
    known = [
        (run, guess, run.speed)
        for run in runs
        if run.plan is not None
        and run.speed
        and (guess := run.plan.predicted.get("images_per_second"))
    ]
    if len(known) < 2:
        return None
    names = tuple(run.name for run, _, _ in known)
    figure = Figure(
        key="predicted-speed",
        title="Predicted beside measured speed",
        caption="Predicted by the plan before training; measured is the median over the epochs.",
        x=Axis(title="run", kind="category"),
        y=Axis(title="images/s", minimum=0.0),
        series=(
            Series(name="predicted", shape="bar", look=6, x=names, y=tuple(g for _, g, _ in known)),
            Series(name="measured", shape="bar", look=0, x=names, y=tuple(m for _, _, m in known)),
        ),
        horizontal=True,
    )
    table = Table(
        key="predicted-speed",
        title="Predicted and measured",
        columns=("run", "predicted images/s", "measured images/s", "measured against predicted"),
        rows=tuple((run.name, guess, found, found / guess - 1) for run, guess, found in known),
        formats=("", ",.0f", ",.0f", "+.1%"),
    )
    return Section(key="predicted", title="Predicted beside measured", blocks=(figure, table))
