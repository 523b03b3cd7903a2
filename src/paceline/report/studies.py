"""The studies' figures: strong and weak scaling, and everything against the batch size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.scaling import Kind, Scaling, grouped, machine_of, scalings
from paceline.text import rate


def scaling_section(runs: Sequence[RunData], kind: Kind) -> Section | None:
    """Speedup and efficiency with the ideal, for as many lines as there are."""
    found = scalings(runs, kind)
    if not found:
        return None
    unit = found[0].unit
    fixed = "the whole batch" if kind == "strong" else f"the batch per {unit.removesuffix('s')}"
    sizes = sorted({step.size for line in found for step in line.steps})
    ticks = tuple(float(size) for size in sizes)
    x = Axis(title=unit, ticks=ticks)
    smallest = min(sizes)
    ideal = tuple(size / smallest for size in sizes)
    caption = (
        f"Images per second divided by those of {smallest} {unit.removesuffix('s')}"
        f"{'s' if smallest > 1 else ''}, with {fixed} kept the same."
    )
    repeated = any(len(step.runs) > 1 for line in found for step in line.steps)
    caption += (
        " Median of repeated runs; whiskers are the slowest and the fastest." if repeated else ""
    )
    figures = (
        Figure(
            key=f"{kind}-speedup",
            title=f"{kind.capitalize()} scaling: speedup",
            caption=caption,
            x=x,
            y=Axis(title="speedup", minimum=0.0),
            series=(_guide(ticks, ideal), *_lines(found, "speedup")),
        ),
        Figure(
            key=f"{kind}-efficiency",
            title=f"{kind.capitalize()} scaling: efficiency",
            caption=f"Speedup divided by the number of {unit}; 100% is ideal.",
            x=x,
            y=Axis(title="efficiency", format="percent", minimum=0.0),
            series=(_guide(ticks, (1.0,) * len(ticks)), *_lines(found, "efficiency")),
        ),
    )
    return Section(
        key=f"{kind}-scaling",
        title=f"{kind.capitalize()} scaling",
        text=(f"Sizes are {unit}; {fixed} stays the same.",),
        blocks=(*figures, _scaling_table(found, kind, unit)),
    )


def _guide(ticks: tuple[float, ...], ideal: tuple[float, ...]) -> Series:
    return Series(name="ideal", shape="guide", x=ticks, y=ideal)


def _lines(found: Sequence[Scaling], what: str) -> list[Series]:
    lines = []
    for place, line in enumerate(found):
        values = tuple(float(getattr(step, what)) for step in line.steps)
        repeated = any(len(step.runs) > 1 for step in line.steps)
        scale = [
            value / step.speed if step.speed else 0.0
            for value, step in zip(values, line.steps, strict=True)
        ]
        lines.append(
            Series(
                name=line.name,
                look=place,
                x=tuple(float(step.size) for step in line.steps),
                y=values,
                low=tuple(k * s.low for k, s in zip(scale, line.steps, strict=True))
                if repeated
                else (),
                high=tuple(k * s.high for k, s in zip(scale, line.steps, strict=True))
                if repeated
                else (),
                labels=tuple(f"{rate(step.speed)} images/s" for step in line.steps),
            )
        )
    return lines


def _scaling_table(found: Sequence[Scaling], kind: Kind, unit: str) -> Table:
    return Table(
        key=f"{kind}-scaling",
        title="Speedup and efficiency",
        columns=("series", unit, "batch", "runs", "images/s", "speedup", "efficiency"),
        rows=tuple(
            (line.name, step.size, step.batch, ", ".join(step.runs), step.speed, step.speedup,
             step.efficiency)
            for line in found
            for step in line.steps
        ),
        formats=("", "d", ",d", "", ",.0f", ".2f", ".1%"),
    )  # fmt: skip


def batch_section(runs: Sequence[RunData]) -> Section | None:
    """Accuracy (with classes), loss, time and speed against the batch, where batches differ."""
    groups = [
        (name, sorted(members, key=lambda run: run.batch or 0))
        for name, members in grouped(
            [run for run in runs if run.batch and run.metrics],
            lambda run: (
                run.model,
                run.data,
                machine_of(run),
                f"{run.hosts} hosts" if run.hosts > 1 else "",
                run.strategy,
                f"{run.summary.get('epochs', '?')} epochs",
            ),
            lambda members: len({run.batch for run in members}) > 1,
        )
    ]
    if not groups:
        return None
    quantities = [
        ("accuracy", "Test accuracy", "test accuracy", "test_accuracy", ".2%", "test accuracy"),
        ("loss", "Test loss", "test loss", "test_loss", ".4f", "test loss"),
        (
            "time",
            "Time per epoch",
            "seconds per epoch",
            "epoch_seconds_median",
            ",.2f",
            "epoch (s)",
        ),
    ]
    members = [run for _, members in groups for run in members]
    quantities = [q for q in quantities if any(run.number(q[3]) is not None for run in members)]
    figures = [
        _batch_figure(groups, key, title, unit, column, percent=style == ".2%")
        for key, title, unit, column, style, _ in quantities
    ]
    rows: list[tuple[Cell, ...]] = [
        (name or run.model, run.batch, run.name, *(run.number(q[3]) for q in quantities), run.speed)
        for name, members in groups
        for run in members
    ]
    table = Table(
        key="batch",
        title="By batch size",
        columns=("series", "batch", "run", *(q[5] for q in quantities), "images/s"),
        rows=tuple(rows),
        formats=("", ",d", "", *(q[4] for q in quantities), ",.0f"),
    )
    return Section(key="batch", title="Against the batch size", blocks=(*figures, table))


def _batch_figure(
    groups: Sequence[tuple[str, list[RunData]]],
    key: str,
    title: str,
    unit: str,
    column: str,
    percent: bool,
) -> Figure:
    batches = sorted({float(run.batch or 0) for _, members in groups for run in members})
    series = tuple(
        Series(
            name=name or unit,
            look=place,
            x=tuple(batch for batch, _ in points),
            y=tuple(value for _, value in points),
        )
        for place, (name, members) in enumerate(groups)
        if (points := _by_batch(members, column))
    )
    captions = {
        "accuracy": "After the last epoch; the median where a batch was run more than once.",
        "loss": "After the last epoch; the median where a batch was run more than once.",
        "time": "Median over the epochs of a run, evaluation left out.",
    }
    return Figure(
        key=f"batch-{key}",
        title=f"{title} against batch size",
        caption=captions[key],
        x=Axis(title="global batch size", kind="log", ticks=tuple(batches)),
        y=Axis(title=unit, format="percent") if percent else Axis(title=unit, minimum=0.0),
        series=series,
    )


def _by_batch(runs: Sequence[RunData], column: str) -> list[tuple[float, float]]:
    found: dict[float, list[float]] = {}
    for run in runs:
        if (value := run.number(column)) is not None:
            found.setdefault(float(run.batch or 0), []).append(value)
    return [(batch, statistics.median(values)) for batch, values in sorted(found.items())]
