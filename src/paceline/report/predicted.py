"""What the plan predicted beside what the run measured, under the same names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData, finite
from paceline.text import rate

QUANTITIES = {
    "images_per_second": ("images/s", 1.0),
    "update_seconds": ("time per update (ms)", 1000.0),
    "compute_seconds": ("computing, per update (ms)", 1000.0),
    "exposed_seconds": ("exposed communication, per update (ms)", 1000.0),
    "waiting_seconds": ("waiting for others, per update (ms)", 1000.0),
    "data_seconds": ("waiting for data, per update (ms)", 1000.0),
    "bubble_seconds": ("bubble of the pipeline, per update (ms)", 1000.0),
    "epoch_seconds": ("time per epoch (s)", 1.0),
    "bytes_per_update": ("sent per update by the busiest node (MB)", 1e-6),
    "memory_mb": ("memory of a node (MB)", 1.0),
}
"""How a prediction is shown: its name, and what its number is multiplied by."""
ASIDE = ("images_per_second_low", "images_per_second_high", "calibration", "speedup")
"""Said in a sentence: nothing that a run measures stands beside them."""
LEAST = 0.01
"""Terms below this part of an update are too small for their error to mean anything."""


def measured(run: RunData) -> dict[str, float]:
    """What the run measured, by the names that plans predict under.

    First what run.json says was measured, by which later predictions are corrected; then what
    the epochs and the ranks' events tell.
    """
    found = {
        "images_per_second": run.speed,
        "update_seconds": run.number("update_seconds_median"),
        "epoch_seconds": run.number("epoch_seconds_median"),
        "memory_mb": _memory(run),
        "bytes_per_update": _bytes(run),
        **_terms(run),
    }
    said = run.summary.get("measured")
    if isinstance(said, Mapping):
        found |= {key: finite(value) for key, value in said.items()}
    if run.plan is not None and not run.plan.servers:
        # The exchange counts updates alone; a server, which may be busier, writes no events.
        found["bytes_per_update"] = _bytes(run) or found.get("bytes_per_update")
    return {key: value for key, value in found.items() if value is not None}


def _memory(run: RunData) -> float | None:
    """Largest memory of a node: that of its ranks added up, each at its largest."""
    nodes: dict[int, float] = {}
    for each in run.sessions:
        if each.samples:
            peak = max(sample.resident for sample in each.samples)
            nodes[each.start.node] = nodes.get(each.start.node, 0.0) + peak / 1e6
    return max(nodes.values(), default=None)


def _bytes(run: RunData) -> float | None:
    sent = [
        rank.exchange.bytes_sent / rank.exchange.updates
        for rank in (run.ledger.ranks if run.ledger is not None else ())
        if rank.exchange.updates
    ]
    return max(sent, default=None)


def _terms(run: RunData) -> dict[str, float]:
    """The terms of an update as ranks booked them: medians over updates, means over ranks."""
    workers = run.ledger.workers if run.ledger else []
    booked = [rank.per_update for rank in workers if rank.per_update]
    if not booked:
        return {}

    def mean(*categories: str) -> float:
        return statistics.fmean(sum(each.get(name, 0.0) for name in categories) for each in booked)

    return {
        "compute_seconds": mean("compute", "optimizer"),
        "exposed_seconds": mean("communication"),
        "waiting_seconds": mean("waiting"),
        "data_seconds": mean("data"),
    }


def predicted_section(run: RunData, found: Mapping[str, float]) -> Section | None:
    """Predicted beside measured, with the error; `found` by the names of the plan."""
    predicted = dict(run.plan.predicted) if run.plan is not None else {}
    if not predicted:
        return None
    rows: list[tuple[Cell, ...]] = []
    names, ratios = [], []
    for key in sorted(set(predicted) - set(ASIDE), key=_place):
        guess, value = predicted[key], found.get(key)
        if not guess and not value:
            continue
        label, scale = QUANTITIES.get(key, (key.replace("_", " "), 1.0))
        error = value / guess - 1 if value is not None and guess else None
        rows.append((label, guess * scale, None if value is None else value * scale, error))
        if error is not None and _is_large(key, predicted):
            names.append(label)
            ratios.append(error + 1)
    table = Table(
        key="predicted",
        title="Predicted and measured",
        columns=("quantity", "predicted", "measured", "measured against predicted"),
        rows=tuple(rows),
        formats=("", ",.4g", ",.4g", "+.1%"),
    )
    text = _text(predicted, found, complete=all(row[2] is not None for row in rows))
    blocks = (_figure(names, ratios), table) if names else (table,)
    return Section(key="predicted", title="Predicted beside measured", text=text, blocks=blocks)


def _place(key: str) -> tuple[int, str]:
    order = list(QUANTITIES)
    return (order.index(key) if key in order else len(order), key)


def _is_large(key: str, predicted: Mapping[str, float]) -> bool:
    """A term of an update that matters for it, or no term at all."""
    whole = predicted.get("update_seconds", 0.0)
    if not key.endswith("_seconds") or key in ("update_seconds", "epoch_seconds") or not whole:
        return True
    return predicted[key] >= LEAST * whole


def _text(
    predicted: Mapping[str, float], found: Mapping[str, float], *, complete: bool
) -> tuple[str, ...]:
    text = ["The plan's predictions beside what the run measured."]
    low, high = (predicted.get(f"images_per_second_{end}") for end in ("low", "high"))
    speed = found.get("images_per_second")
    if low and high and speed:
        where = "within" if low <= speed <= high else "outside"
        text.append(
            f"The plan expected {rate(low)} to {rate(high)} images/s: what came lies {where} that."
        )
    factor = predicted.get("calibration")
    if factor and factor != 1.0:
        text.append(f"Times were multiplied by {factor:.2f}, as past runs of this exchange took.")
    if not complete:
        text.append("What the run did not measure is left empty.")
    return (" ".join(text),)


def _figure(names: list[str], ratios: list[float]) -> Figure:
    return Figure(
        key="predicted",
        title="Measured as part of predicted",
        caption="100% is a prediction that came true. Speeds above 100% are faster than predicted;"
        " times, bytes and memory above it are more than predicted. Terms of an update are the"
        " medians over updates, in the mean of the ranks; those under 1% of it are only in the"
        " table.",
        x=Axis(title="quantity", kind="category"),
        y=Axis(title="measured / predicted", format="percent", minimum=0.0),
        series=(
            Series(name="predicted", shape="bar", look=6, x=tuple(names), y=(1.0,) * len(names)),
            Series(name="measured", shape="bar", look=0, x=tuple(names), y=tuple(ratios)),
        ),
        horizontal=True,
    )
