"""The figures of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.report.figure import Axis, Figure, Series
from studies.shi.lost import WINDOW, Course
from studies.shi.measures import Measured
from studies.shi.study import KINDS, TITLES, Study

KERNEL = "by the kernel's counters at its interface, mean over three updates, start-up left out"


def traffic(study: Study) -> list[Figure]:
    """The concatenated figure in MB, the same as multiples of the gradient, and packets."""
    figures = [_multiples(study)]
    for key, title, unit, value in (
        ("traffic-mb", "MB sent and received by a node in an update", "MB", _megabytes),
        (
            "traffic-packets",
            "Packets sent and received by a node in an update",
            "packets",
            _packets,
        ),
    ):
        figures.append(_concatenated(study, key, title, unit, value))
    return [each for each in figures if each.series]


def _multiples(study: Study) -> Figure:
    """Server and ring in gradients, all networks on one line: their size cancels."""
    series = []
    parts: dict[str, Callable[[Measured], float | None]] = {
        "server": lambda each: each.server.bytes if each.server else None,
        "ring": lambda each: each.worker.bytes if each.worker else None,
        "ddp": lambda each: each.worker.bytes if each.worker else None,
    }
    names = {"server": "the server", "ring": "a node of the ring", "ddp": "a node of stock DDP"}
    for look, kind in enumerate(("server", "ring", "ddp")):
        by_workers: dict[int, list[float]] = {}
        for each in study.of(kind):
            moved, gradient = parts[kind](each), study.gradient(each.model)
            if moved is not None and gradient:
                by_workers.setdefault(each.workers, []).append(moved / gradient)
        if by_workers:
            counts = sorted(by_workers)
            means = [sum(by_workers[n]) / len(by_workers[n]) for n in counts]
            series.append(
                Series(
                    name=names[kind],
                    x=tuple(float(n) for n in counts),
                    y=tuple(means),
                    look=look,
                    low=tuple(min(by_workers[n]) for n in counts),
                    high=tuple(max(by_workers[n]) for n in counts),
                )
            )
    workers = tuple(float(n) for n in study.published["workers"])
    if series:
        several = tuple(n for n in workers if n > 1)
        series += [
            Series(name="2 N", x=workers, y=tuple(2 * n for n in workers), look=0, shape="guide"),
            Series(
                name="4 (N-1)/N",
                x=several,
                y=tuple(4 * (n - 1) / n for n in several),
                look=1,
                shape="guide",
            ),
        ]
    return Figure(
        key="traffic-gradients",
        title="The server's traffic grows with the workers, the ring's stays flat",
        caption=f"Bytes sent and received by one node in an update, as multiples of the network's"
        f" gradient, {KERNEL}; mean over the networks, bars from the least to the most. Thin lines:"
        " what the study's formulas say for both directions together.",
        x=Axis(title="workers", ticks=workers, minimum=0.0),
        y=Axis(title="gradients", minimum=0.0),
        series=tuple(series),
    )


def _concatenated(
    study: Study,
    key: str,
    title: str,
    unit: str,
    value: Callable[[Measured, str], float | None],
) -> Figure:
    """Every network and number of workers side by side, as the study draws it."""
    series = []
    for look, (name, kind, node) in enumerate(
        (
            ("the server", "server", "server"),
            ("a node of the ring", "ring", "worker"),
            ("a worker of the server", "server", "worker"),
            ("a node of stock DDP", "ddp", "worker"),
        )
    ):
        points = [
            (_place(study, each), found)
            for model in study.models
            for each in study.of(kind, model)
            if (found := value(each, node)) is not None
        ]
        if points:
            series.append(
                Series(
                    name=name,
                    x=tuple(place for place, _ in points),
                    y=tuple(found for _, found in points),
                    look=look,
                    shape="bar",
                )
            )
    return Figure(
        key=key,
        title=title,
        caption=f"Both directions together, {KERNEL}. Numbers under the bars are workers.",
        x=Axis(title="network and workers", kind="category"),
        y=Axis(title=unit, minimum=0.0),
        series=tuple(series),
        order=_order(study, least=1),
    )


def _place(study: Study, each: Measured) -> str:
    return f"{study.title(each.model)} {each.workers}"


def _order(study: Study, *, least: int) -> tuple[str, ...]:
    """Places on the category axis that any step with traffic has."""
    return tuple(
        dict.fromkeys(
            _place(study, each)
            for model in study.models
            for workers in study.workers(model)
            for kind in KINDS
            for each in study.of(kind, model)
            if each.workers == workers >= least
        )
    )


def _megabytes(each: Measured, node: str) -> float | None:
    counts = each.server if node == "server" else each.worker
    return counts.bytes / 1e6 if counts is not None else None


def _packets(each: Measured, node: str) -> float | None:
    counts = each.server if node == "server" else each.worker
    if counts is None or counts.packets_sent is None or counts.packets_received is None:
        return None
    return counts.packets_sent + counts.packets_received


def speeds(study: Study) -> list[Figure]:
    """Speedup of every network, and the load of the workers."""
    order = _order(study, least=2)
    found = []
    ideal = _bars(study, "worker by worker", len(KINDS), lambda each: float(each.workers), "ring")
    speedup = [_bars(study, TITLES[k], n, study.speedup, k) for n, k in enumerate(KINDS)]
    speedup = [each for each in speedup if each.x]
    if speedup:
        found.append(
            Figure(
                key="speedup",
                title="Speedup over one worker",
                caption="Images per second over those of one worker alone on a host of the same"
                " quota, without the first update. Numbers under the bars are workers;"
                " triangles: that many times the speed of one.",
                x=Axis(title="network and workers", kind="category"),
                y=Axis(title="speedup", minimum=0.0),
                series=(*speedup, *_as_guide(ideal)),
                order=order,
            )
        )
    loads = [_bars(study, TITLES[k], n, lambda each: each.cpu, k) for n, k in enumerate(KINDS)]
    loads = [each for each in loads if each.x]
    if loads:
        found.append(
            Figure(
                key="cpu",
                title="How busy workers are",
                caption="Processor time of the workers' processes during the updates over their"
                " quota of 0.28 of a core, mean over workers; from samples twice a second.",
                x=Axis(title="network and workers", kind="category"),
                y=Axis(title="CPU", format="percent", minimum=0.0),
                series=tuple(loads),
                order=order,
            )
        )
    return found


def _bars(
    study: Study, name: str, look: int, value: Callable[[Measured], float | None], kind: str
) -> Series:
    points = [
        (_place(study, each), found)
        for model in study.models
        for each in study.of(kind, model)
        if each.workers > 1 and (found := value(each)) is not None
    ]
    return Series(
        name=name,
        x=tuple(place for place, _ in points),
        y=tuple(found for _, found in points),
        look=look,
        shape="bar",
    )


def _as_guide(series: Series) -> tuple[Series, ...]:
    if not series.x:
        return ()
    return (Series(name="linear", x=series.x, y=series.y, look=series.look, shape="points"),)


def lost(courses: Sequence[Course]) -> list[Figure]:
    """Speed and loss of trainings whose workers died."""
    shown = [each for each in courses if each.speeds]
    if not shown:
        return []
    lines = [
        Series(
            name=_who(each),
            x=tuple(seconds for seconds, _ in each.speeds),
            y=tuple(speed for _, speed in each.speeds),
            look=look,
        )
        for look, each in enumerate(shown)
    ]
    epochs = [
        Series(
            name=_who(each),
            x=tuple(float(n) for n in range(1, len(each.train_losses) + 1)),
            y=each.train_losses,
            look=look,
        )
        for look, each in enumerate(shown)
        if each.train_losses
    ]
    found = [
        Figure(
            key="lost-speed",
            title="Speed while workers die",
            caption=f"Updates of the first worker times the workers alive, in windows of"
            f" {WINDOW:.0f} s. {'; '.join(_who(each) for each in shown)}.",
            x=Axis(title="seconds after the first update began", minimum=0.0),
            y=Axis(title="images/s", minimum=0.0),
            series=tuple(lines),
        )
    ]
    if epochs:
        found.append(
            Figure(
                key="lost-loss",
                title="Loss while workers die",
                caption="Training loss of each epoch, over the samples that were trained on.",
                x=Axis(title="epoch"),
                y=Axis(title="training loss"),
                series=tuple(epochs),
            )
        )
    return found


def _who(course: Course) -> str:
    lost = ", ".join(
        f"{loss.host} at {loss.seconds:.0f} s" for loss in course.losses if loss.seconds is not None
    )
    return f"{course.kind}: lost {lost}" if lost else course.kind
