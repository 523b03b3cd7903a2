"""The figures of a report, drawn by our own drawer and by matplotlib: CPU seconds and bytes.

    python -m benchmarks.figures RUN

CPU seconds are counted, not the clock on the wall, so that other work on the machine disturbs
little. Each drawer has a process of its own, and both draw the same frozen figures, as SVG and as
PNG at twice the size. matplotlib is not among Paceline's packages: pip install matplotlib.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.report.figure import Figure, look
from paceline.report.load import load_run
from paceline.report.make import make_report


def figures_of(run: Path) -> list[Figure]:
    report = make_report([load_run(run)])
    return [figure for section in report.sections for figure in section.figures]


def draw_ours(figures: list[Figure]) -> list[tuple[int, int]]:
    from paceline.report.drawing import figure_png, figure_svg

    return [(len(figure_svg(each).encode()), len(figure_png(each))) for each in figures]


def draw_matplotlib(figures: list[Figure]) -> list[tuple[int, int]]:
    import matplotlib as library

    library.use("Agg")
    from matplotlib import pyplot

    found = []
    for each in figures:
        picture, axes = pyplot.subplots(figsize=(7.6, 4.2), layout="constrained")
        _fill(axes, each)
        sizes = []
        for kind in ("svg", "png"):
            kept = io.BytesIO()
            picture.savefig(kept, format=kind, dpi=200)
            sizes.append(kept.tell())
        pyplot.close(picture)
        found.append((sizes[0], sizes[1]))
    return found


def _fill(axes: Any, figure: Figure) -> None:
    """What the figure shows, with matplotlib's own layout, ticks and legend."""
    for series in figure.series:
        colour = look(series.look).light
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if series.shape != "bar":
            axes.plot(xs, ys, color=colour, label=series.name)
        elif figure.horizontal:
            axes.barh(xs, ys, left=list(series.base) or None, color=colour, label=series.name)
        else:
            axes.bar(xs, ys, color=colour, label=series.name)
    axes.set_title(figure.title)
    axes.set_xlabel(figure.x.title)
    axes.set_ylabel(figure.y.title)
    if len(figure.series) > 1:
        axes.legend()


def measure(name: str, run: Path) -> None:
    figures = figures_of(run)
    draw = {"ours": draw_ours, "matplotlib": draw_matplotlib}[name]
    before = time.process_time()
    draw([])
    imported = time.process_time()
    sizes = draw(figures)
    drawn = time.process_time()
    svg, png = (sum(column) / 1000 for column in zip(*sizes, strict=True))
    print(
        f"{name}: {len(figures)} figures, import {imported - before:.2f} CPU s, drawing"
        f" {drawn - imported:.2f} CPU s, SVG {svg:.0f} kB, PNG {png:.0f} kB"
    )


def main() -> None:
    if len(sys.argv) == 3:
        measure(sys.argv[1], Path(sys.argv[2]))
        return
    for name in ("ours", "matplotlib", "ours", "matplotlib"):
        subprocess.run([sys.executable, "-m", "benchmarks.figures", name, sys.argv[1]], check=True)


if __name__ == "__main__":
    main()
