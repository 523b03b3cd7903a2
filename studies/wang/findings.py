"""Tables, figures and verdicts of the MNIST study."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from studies.outcome import Findings, Outcomes
from studies.wang.claims import claims
from studies.wang.numbers import RECIPES, StudyRow, rows

Value = Callable[[StudyRow, str], float | None]
PUBLISHED = "published"
LOOKS = {PUBLISHED: 0, "study": 1, "paceline": 2, "stock": 3}
"""Places in the palette: a recipe looks the same in every figure."""


def findings(outcomes: Outcomes) -> Findings:
    """Everything on the page, from as many steps as are done."""
    found = rows(outcomes)
    return Findings(
        sections=(_summary(found), _times(found), _accuracy(found), _traffic(found)),
        claims=claims(found),
        notes=_notes(outcomes),
    )


def _notes(outcomes: Outcomes) -> tuple[str, ...]:
    timed = outcomes.where(what="time")
    shares = sorted({each.step.cores / _processes(each.step.facts) for each in timed})
    share = ", ".join(f"{each:g}" for each in shares)
    short = (
        "Short form: three of the nine rows, and trainings of 2 epochs over 12,288 images, whose"
        " accuracy says little about that of 5 epochs over 60,000.",
    )
    return (
        *(short if outcomes.experiment.quick else ()),
        f"Nodes are emulated hosts on this one machine. Every process has a quota of {share} core"
        " in every row, so that rows compare like with like, and the quotas of a row sum to at most"
        " 2 cores. The study's ran on the nodes of a cluster: its seconds stand beside ours for the"
        " shape of the curves, not for their height.",
        "Times: two short epochs of 8 updates, of which the second counts. Epoch = seconds per"
        " update x updates of 60,000 images; total = reading + 5 such epochs. Neither start-up"
        " nor evaluation is in it.",
        "Accuracy: whole trainings with as many processes at the full speed of the machine, since"
        " quotas and places of processes change no result: see the claim on places.",
        "The study's recipe: every process an MPI rank of its own, gradients reduced to the first,"
        " averaged there and broadcast, Adam at 0.001 x processes from the first update."
        " Paceline: processes of a host add up in shared memory, hosts by all-reduce; the same"
        " rate at its peak, reached over the first fifth of the updates, then falling in a line."
        " Stock PyTorch: DistributedDataParallel over Gloo under torchrun with the study's rate.",
    )


def _processes(facts: dict[str, object]) -> int:
    nodes, processes = facts["nodes"], facts["processes"]
    assert isinstance(nodes, int)
    assert isinstance(processes, int)
    return nodes * processes


def _summary(found: Sequence[StudyRow]) -> Section:
    """The study's own table, its numbers and Paceline's in turn."""
    parts: tuple[tuple[str, Value, str], ...] = (
        ("read", lambda row, recipe: row.read(recipe), ",.2f"),
        ("update", lambda row, recipe: row.update(recipe), ",.3f"),
        ("epoch", lambda row, recipe: row.epoch(recipe), ",.1f"),
        ("total", lambda row, recipe: row.total(recipe), ",.0f"),
        ("loss", _test_loss, ".4f"),
        ("accuracy", _accuracy_percent, ".2f"),
    )
    columns, formats = ["nodes x processes", "cores here"], ["", ".2f"]
    for name, _, spec in parts:
        unit = {"loss": "test loss", "accuracy": "accuracy %"}.get(name, f"{name} s")
        columns += [f"{unit}, study", "here"]
        formats += [_digits(name), spec]
    lines: list[tuple[Cell, ...]] = []
    for row in found:
        cells: list[Cell] = [row.name, row.cores]
        for name, value, _ in parts:
            cells += [row.published[name], value(row, "paceline")]
        lines.append(tuple(cells))
    table = Table(
        key="wang",
        title="The study's table: its numbers, and Paceline's here (a quarter of a core each)",
        columns=tuple(columns),
        rows=tuple(lines),
        formats=tuple(formats),
    )
    return Section(key="table", title="The study's table", blocks=(table,))


def _test_loss(row: StudyRow, recipe: str) -> float | None:
    return row.score(recipe, "test_loss")


def _digits(column: str) -> str:
    """How the study printed a column."""
    return ".4f" if column == "loss" else ",.2f"


def _accuracy_percent(row: StudyRow, recipe: str) -> float | None:
    accuracy = row.score(recipe, "test_accuracy")
    return None if accuracy is None else 100 * accuracy


def _compared(
    key: str,
    title: str,
    found: Sequence[StudyRow],
    value: Value,
    spec: str,
    *,
    folded: bool = False,
) -> Table:
    """One quantity: published, and by every recipe here."""
    lines: list[tuple[Cell, ...]] = [
        (
            row.name,
            row.all,
            row.published[key],
            *(value(row, recipe) for recipe in RECIPES),
        )
        for row in found
    ]
    return Table(
        key=f"wang-{key}",
        title=title,
        columns=("nodes x processes", "processes", PUBLISHED, *RECIPES.values()),
        rows=tuple(lines),
        formats=("", "d", _digits(key), *(spec for _ in RECIPES)),
        folded=folded,
    )


def _line(name: str, look: int, points: Sequence[tuple[str, float | None]]) -> Series:
    known = [(x, y) for x, y in points if y is not None]
    return Series(name=name, look=look, x=tuple(x for x, _ in known), y=tuple(y for _, y in known))


def _lines(
    found: Sequence[StudyRow], value: Callable[[StudyRow, str], float | None]
) -> tuple[Series, ...]:
    """The published line and one for every recipe, over the rows."""
    series = [
        _line(RECIPES.get(name, name), look, [(row.name, value(row, name)) for row in found])
        for name, look in LOOKS.items()
    ]
    return tuple(each for each in series if each.x)


def _relative(found: Sequence[StudyRow], column: str, *, inverse: bool) -> Value:
    """A quantity relative to that of one process, by its own recipe."""
    first = next(row for row in found if row.all == 1)

    def plain(row: StudyRow, name: str) -> float | None:
        if name == PUBLISHED:
            return row.published[column]
        return row.update(name) if column == "update" else row.epoch(name)

    def relative(row: StudyRow, name: str) -> float | None:
        value, base = plain(row, name), plain(first, name)
        if not value or not base:
            return None
        return base / value if inverse else value / base

    return relative


def _times(found: Sequence[StudyRow]) -> Section:
    names = tuple(row.name for row in found)
    axis = Axis(title="nodes x processes", kind="category")
    weak = Figure(
        key="wang-weak",
        title="Weak scaling: seconds per update",
        caption="Seconds per update with 128 images for each process, relative to one process by"
        " the same recipe; 1 is ideal. Mean of 8 updates, a quarter of a core for each process.",
        x=axis,
        y=Axis(title="seconds per update / those of 1 x 1", minimum=0.0),
        series=(
            Series(name="ideal", shape="guide", x=names, y=(1.0,) * len(names)),
            *_lines(found, _relative(found, "update", inverse=False)),
        ),
        order=names,
    )
    strong = Figure(
        key="wang-strong",
        title="Strong scaling: speedup of an epoch",
        caption="Seconds per epoch of one process divided by those of the row, by the same"
        " recipe. The study's one-process epoch is the median of 142 s and 82 s epochs.",
        x=axis,
        y=Axis(title="speedup", minimum=0.0),
        series=(
            Series(name="ideal", shape="guide", x=names, y=tuple(float(row.all) for row in found)),
            *_lines(found, _relative(found, "epoch", inverse=True)),
        ),
        order=names,
    )
    return Section(
        key="times",
        title="Time",
        blocks=(
            weak,
            strong,
            _compared("update", "Seconds per update", found, StudyRow.update, ",.3f"),
            _compared("epoch", "Seconds per epoch", found, StudyRow.epoch, ",.1f"),
            _compared(
                "total", "Seconds in all, 5 epochs", found, StudyRow.total, ",.0f", folded=True
            ),
            _compared(
                "read", "Seconds to read the data", found, StudyRow.read, ",.2f", folded=True
            ),
        ),
    )


def _accuracy(found: Sequence[StudyRow]) -> Section:
    sizes = tuple(sorted({float(row.all) for row in found}))
    lines: list[Series] = []
    for nodes in sorted({row.nodes for row in found}):
        mine = [row for row in found if row.nodes == nodes]
        lines.append(
            Series(
                name=f"{PUBLISHED}, {nodes} node{'s' if nodes > 1 else ''}",
                look=len(lines) + (len(RECIPES) if lines else 0),
                x=tuple(float(row.all) for row in mine),
                y=tuple(row.published["accuracy"] / 100 for row in mine),
            )
        )
    for recipe, name in RECIPES.items():
        points = {float(row.all): row.score(recipe, "test_accuracy") for row in found}
        known = {size: value for size, value in sorted(points.items()) if value is not None}
        if known:
            lines.append(
                Series(name=name, look=LOOKS[recipe], x=tuple(known), y=tuple(known.values()))
            )
    figure = Figure(
        key="wang-accuracy",
        title="Accuracy against processes",
        caption="Test accuracy on 10,000 images after the last epoch, one training for each point;"
        " every process takes 128 images of an update.",
        x=Axis(title="processes", ticks=sizes),
        y=Axis(title="test accuracy", format="percent"),
        series=tuple(lines),
    )
    kept = {row.all: row.score("paceline", "test_accuracy") for row in found}
    known_here = {size: score for size, score in kept.items() if score is not None}
    text: tuple[str, ...] = ()
    if known_here:
        worst = min(known_here, key=lambda size: known_here[size])
        text = (
            f"The lowest accuracy of Paceline's recipe is {known_here[worst]:.2%}, with {worst}"
            f" process{'es' if worst > 1 else ''}; the study's lowest is"
            f" {min(row.published['accuracy'] for row in found):.2f}%.",
        )
    return Section(
        key="accuracy",
        title="Accuracy",
        text=text,
        blocks=(
            figure,
            _compared(
                "accuracy",
                "Test accuracy, %; rows with as many processes share a training",
                found,
                _accuracy_percent,
                ".2f",
            ),
            _compared("loss", "Test loss", found, _test_loss, ".4f", folded=True),
        ),
    )


def _traffic(found: Sequence[StudyRow]) -> Section:
    several = [row for row in found if row.nodes > 1]
    names = tuple(row.name for row in several)
    series = [
        Series(
            name=name,
            look=LOOKS[recipe],
            shape="bar",
            x=tuple(row.name for row in several if row.sent(recipe) is not None),
            y=tuple(sent for row in several if (sent := row.sent(recipe)) is not None),
        )
        for recipe, name in RECIPES.items()
    ]
    figure = Figure(
        key="wang-traffic",
        title="What the busiest host sends",
        caption="MB that the kernel counted at the interface of the host that sent most, divided"
        " by the updates; start-up is in it. The gradient is 2.76 MB.",
        x=Axis(title="nodes x processes", kind="category"),
        y=Axis(title="MB per update", minimum=0.0),
        series=tuple(each for each in series if each.x),
        order=names,
    )
    lines: list[tuple[Cell, ...]] = [
        (row.name, *(row.sent(recipe) for recipe in RECIPES)) for row in several
    ]
    table = Table(
        key="wang-traffic",
        title="MB per update that the busiest host sends",
        columns=("nodes x processes", *RECIPES.values()),
        rows=tuple(lines),
        formats=("", *(",.2f" for _ in RECIPES)),
    )
    blocks = (figure, table) if figure.series else (table,)
    return Section(key="traffic", title="Traffic", blocks=blocks)
