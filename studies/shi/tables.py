"""The tables of the page: the study's numbers beside those of here and stock PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.figure import Cell, Table
from studies.shi.lost import Course
from studies.shi.measures import Counts, Measured
from studies.shi.study import KINDS, TITLES, Study

TRAFFIC_TEXT = (
    "Counted by the kernel at each host's interface, from before the first update's gradients leave"
    " to after the last update's have come: frames with their headers and acknowledgements, without"
    " start-up, first weights and checkpoints. Beside it what the exchange itself counted: the"
    " bytes it was to move, no headers. Frames of an emulated host hold up to 64 KB, so headers"
    " weigh less than on a real network card (about 3% at 1,500 bytes), and packets are fewer."
)
SPEED_TEXT = (
    "Images per second of all workers together from the end of the first update to the end of the"
    " last; speedup is over one worker alone on a host of the same quota. CPU is the part of their"
    " quota that the workers' processes used during the updates; that of the server's host is over"
    " the whole step, start and end included."
)
LOST_TEXT = (
    "What the study asked for: workers killed half-way. A small network (two convolutions, two"
    " dense layers) at a rate of 0.01 with momentum 0.9, so that there are hundreds of updates and"
    " the loss moves; four workers and a server on the same hosts. Speed is the first worker's"
    " updates times the workers alive: all have the same quota."
)


def traffic(study: Study) -> Table:
    """Bytes and packets of a node per update."""
    rows: list[tuple[Cell, ...]] = []
    for model in study.models:
        for kind in KINDS:
            for each in study.of(kind, model):
                rows += _traffic_rows(study, each)
    return Table(
        key="traffic",
        title="Traffic of a node per update, by the kernel's counters",
        columns=(
            "network",
            "exchange",
            "workers",
            "node",
            "MB sent",
            "MB received",
            "packets sent",
            "packets received",
            "sent / gradient",
            "formula",
            "difference",
            "MB sent, own count",
        ),
        rows=tuple(rows),
        formats=("", "", "", "", ",.1f", ",.1f", ",.0f", ",.0f", ".3f", ".3f", "+.2%", ",.1f"),
    )


def _traffic_rows(study: Study, each: Measured) -> list[tuple[Cell, ...]]:
    """One row for a worker, one more for a server."""
    gradient = study.gradient(each.model)
    if each.worker is None or gradient is None:
        return []
    head = (study.title(each.model), TITLES[each.kind], each.workers)
    ring = 2 * (each.workers - 1) / each.workers
    expected = 1.0 if each.kind == "server" else ring
    own = each.counted.bytes_sent / 1e6 if each.counted else None
    rows = [(*head, "worker", *_counts(each.worker, gradient, expected), own)]
    if each.server is not None:
        own = own * each.workers if own is not None else None
        counts = _counts(each.server, gradient, float(each.workers))
        rows.append((*head, "server", *counts, own))
    return rows


def _counts(counts: Counts, gradient: int, expected: float) -> tuple[Cell, ...]:
    part = counts.bytes_sent / gradient
    return (
        counts.bytes_sent / 1e6,
        counts.bytes_received / 1e6,
        counts.packets_sent,
        counts.packets_received,
        part,
        expected,
        part / expected - 1,
    )


def speeds(study: Study) -> Table:
    """Images per second, speedup and load."""
    rows: list[tuple[Cell, ...]] = []
    for model in study.models:
        alone = study.one(model, "alone", 1)
        for workers in study.workers(model):
            found = [study.one(model, kind, workers) for kind in KINDS]
            if workers == 1:
                found[0] = alone
            server = found[KINDS.index("server")]
            server_cpu = server.server_cpu if server is not None else None
            rows.append(
                (
                    study.title(model),
                    workers,
                    *(each.speed if each is not None else None for each in found),
                    *(study.speedup(each) if each is not None else None for each in found),
                    str(study.published["ring"]) if workers > 1 else None,
                    str(study.published["server"]) if workers > 1 else None,
                    *(each.cpu if each is not None else None for each in found[:4]),
                    server_cpu,
                )
            )
    return Table(
        key="speeds",
        title="Images per second, speedup and CPU (ring of one worker: alone, no exchange)",
        columns=(
            "network",
            "workers",
            "ring images/s",
            "server images/s",
            "DDP images/s",
            "TensorFlow ring images/s",
            "TensorFlow server images/s",
            "ring speedup",
            "server speedup",
            "DDP speedup",
            "TensorFlow ring speedup",
            "TensorFlow server speedup",
            "study: ring",
            "study: server",
            "ring CPU",
            "server's workers CPU",
            "DDP CPU",
            "TensorFlow ring CPU",
            "server host CPU",
        ),
        rows=tuple(rows),
        formats=("", "", *(",.1f",) * 5, *(".2f",) * 5, "", "", *(".0%",) * 5),
    )


def lost(courses: Sequence[Course]) -> list[Table]:
    """Who died when, and what became of speed and loss."""
    rows: list[tuple[Cell, ...]] = []
    for course in courses:
        if not course.updates:
            continue
        for number, loss in enumerate(course.losses):
            phases = [*course.phases, (loss.left, None), (loss.left, None)]
            before, after = phases[number : number + 2]
            rows.append(
                (
                    course.kind,
                    f"{loss.host} at update {loss.update}",
                    loss.seconds,
                    before[1],
                    after[1],
                    f"{before[0]} to {after[0]}",
                    course.pauses[number],
                    course.losses_before[number],
                    course.train_losses[-1] if course.train_losses else None,
                    _end(course),
                )
            )
        if not course.losses:
            rows.append((course.kind, course.what, *(None,) * 7, _end(course)))
    return [
        Table(
            key="lost",
            title="Workers that died during training",
            columns=(
                "exchange",
                "lost",
                "after s",
                "images/s before",
                "images/s after",
                "workers",
                "longest pause s",
                "train loss before",
                "train loss at the end",
                "how it ended",
            ),
            rows=tuple(rows),
            formats=("", "", ".1f", ",.0f", ",.0f", "", ".2f", ".3f", ".3f", ""),
        )
    ]


def _end(course: Course) -> str:
    if course.finished:
        return f"went on to its end, {course.updates} updates"
    return f"ended after {course.updates} updates: {course.failed or course.said}"


def models(study: Study) -> Table:
    """The study's table with what the networks are here."""
    rows: list[tuple[Cell, ...]] = []
    for model in study.models:
        own, gradient = study.published[model], study.gradient(model)
        rows.append(
            (
                own["title"],
                own["megabytes"],
                own["top1"],
                own["top5"],
                own["gflops"],
                gradient // 4 if gradient else None,
                gradient / 1e6 if gradient else None,
            )
        )
    return Table(
        key="models",
        title="The networks: the study's table (224x224, 1000 classes), and here (32x32, 10)",
        columns=(
            "network",
            "study MB",
            "study top-1 %",
            "study top-5 %",
            "study GFLOPs",
            "parameters here",
            "MB here",
        ),
        rows=tuple(rows),
        formats=("", "", ".1f", ".1f", ".1f", ",.0f", ",.1f"),
    )
