"""The buyer's guide: what more machines like this one would give, from `paceline forecast`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from studies.outcome import Claim, Outcomes, StepOutcome, Verdict

TITLES = {"shallow_cnn": "shallow CNN", "resnet18": "ResNet-18"}


def predictions(outcomes: Outcomes) -> dict[str, StepOutcome]:
    """By model, those for equal machines."""
    return {
        str(each.step.facts["model"]): each
        for each in outcomes.where(about="guide", mix=False)
        if each.done and each.result.get("rows")
    }


def best_rows(outcome: StepOutcome) -> dict[int, Mapping[str, Any]]:
    """By number of nodes, the fastest exact exchange that fits into memory."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in outcome.result["rows"]:
        if not row["exact"] or not row["fits"]:
            continue
        best = found.get(row["nodes"])
        if best is None or row["images_per_second"] > best["images_per_second"]:
            found[row["nodes"]] = row
    return dict(sorted(found.items()))


def coordination(row: Mapping[str, Any]) -> float:
    """Seconds of communication and waiting per second of computing."""
    terms = row["terms"]
    return float((terms["exposed"] + terms["waiting"]) / terms["compute"])


def plain_row(outcome: StepOutcome, nodes: int) -> Mapping[str, Any] | None:
    """All-reduce, as the study's data parallel training does it."""
    rows = outcome.result["rows"]
    return next((r for r in rows if r["nodes"] == nodes and r["exchange"] == "allreduce"), None)


def guide_section(outcomes: Outcomes) -> Section | None:
    """Speedup, ratio and cost against machines, and the sentence of each prediction."""
    found = predictions(outcomes)
    if not found:
        return None
    text = []
    for model, outcome in found.items():
        text.append(f"{TITLES[model]}, batch {_batch(outcome):,}: {outcome.result['verdict']}.")
        text.append(_turn(model, outcome))
    for outcome in outcomes.where(about="guide", mix=True):
        if outcome.done:
            text.append(
                f"With a second machine twenty times slower ({TITLES['shallow_cnn']}):"
                f" {outcome.result['verdict']}."
            )
    notes = [note for outcome in found.values() for note in outcome.result.get("notes", ())]
    if notes:
        text.append(f"Notes: {'; '.join(dict.fromkeys(notes))}.")
    return Section(
        key="guide",
        title="What more machines would give",
        text=tuple(line for line in text if line),
        blocks=(*_figures(found), _table(found)),
    )


def _batch(outcome: StepOutcome) -> int:
    return int(outcome.step.settings["workload.batch_size"])


def _turn(model: str, outcome: StepOutcome) -> str:
    even = outcome.result.get("break_even")
    if not even:
        return ""
    parts = []
    if even["link_bits_per_second"]:
        parts.append(f"a link of {even['link_bits_per_second'] / 1e6:,.0f} Mbit/s")
    if even["batch"]:
        parts.append(f"a batch of {even['batch']:,}")
    if not parts:
        return f"{TITLES[model]}: no link or batch makes {even['nodes']} machines as fast as one."
    where = " or, on this link, with ".join(parts)
    return f"{TITLES[model]}: {even['nodes']} machines are as fast as one with {where}."


def _figures(found: Mapping[str, StepOutcome]) -> list[Figure]:
    nodes = sorted({count for outcome in found.values() for count in best_rows(outcome)})
    ticks = tuple(float(count) for count in nodes)
    guide = Series(name="ideal", shape="guide", x=ticks, y=ticks)
    caption = (
        "Predicted from updates, layers and memory measured on this machine, for equal machines"
        " joined by 1 Gbit/s at 0.2 ms, the global batch kept the same; the fastest exact exchange"
        " for each number. Whiskers: quartiles of what was measured, and of the link."
    )
    speedups = []
    ratios = []
    for place, (model, outcome) in enumerate(found.items()):
        rows = best_rows(outcome)
        x = tuple(float(count) for count in rows)
        speedups.append(
            Series(
                name=TITLES[model],
                look=place,
                x=x,
                y=tuple(float(row["speedup"]) for row in rows.values()),
                low=tuple(float(row["speedup_low"]) for row in rows.values()),
                high=tuple(float(row["speedup_high"]) for row in rows.values()),
                labels=tuple(str(row["exchange"]) for row in rows.values()),
            )
        )
        plain = {count: plain_row(outcome, count) for count in rows if count > 1}
        known = {count: coordination(row) for count, row in plain.items() if row is not None}
        ratios.append(
            Series(
                name=TITLES[model],
                look=place,
                x=tuple(float(count) for count in known),
                y=tuple(known.values()),
            )
        )
    return [
        Figure(
            key="guide-speedup",
            title="Predicted speedup against machines",
            caption=caption,
            x=Axis(title="machines", kind="log", ticks=ticks),
            y=Axis(title="speedup", kind="log"),
            series=(guide, *speedups),
        ),
        Figure(
            key="guide-ratio",
            title="Coordination to computation, plain all-reduce",
            caption="Predicted seconds of exposed communication and waiting per second of"
            " computing; above 1 more time goes to coordination.",
            x=Axis(title="machines", kind="log", ticks=ticks[1:]),
            y=Axis(title="coordination / computation", minimum=0.0),
            series=tuple(ratios),
        ),
    ]


def _table(found: Mapping[str, StepOutcome]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for model, outcome in found.items():
        for count, row in best_rows(outcome).items():
            plain = plain_row(outcome, count)
            rows.append(
                (
                    TITLES[model],
                    count,
                    str(row["exchange"]),
                    row["images_per_second"],
                    row["speedup"],
                    row["efficiency"],
                    row["epoch_seconds"],
                    row["epoch_cost"],
                    row["bytes_sent"] / 1e6,
                    coordination(plain) if plain is not None else None,
                )
            )
    return Table(
        key="guide",
        title="The guide: fastest exact exchange for each number of machines, 0.4 per machine and"
        " hour",
        columns=("network", "machines", "exchange", "images/s", "speedup", "of ideal", "epoch s",
                 "cost per epoch", "MB per update", "coordination / computation (all-reduce)"),
        rows=tuple(rows),
        formats=("", "d", "", ",.0f", ".2f", ".0%", ",.1f", ".4f", ",.2f", ".2f"),
    )  # fmt: skip


def guide_claims(outcomes: Outcomes) -> list[Claim]:
    """What the predictions say of the study's sentences."""
    found = predictions(outcomes)
    one = "For the small network one GPU beats 2, 4 and 8, in that order."
    ratio = "The ratio of coordination to computation decides whether more machines help."
    waiting: Verdict = "cannot be tested here"
    claims = []
    if "shallow_cnn" in found:
        rows = {n: plain_row(found["shallow_cnn"], n) for n in (2, 4, 8)}
        speeds = [row["speedup"] for row in rows.values() if row is not None]
        words = ", ".join(f"{speed:.2f}" for speed in speeds)
        falls = [1.0, *speeds] == sorted([1.0, *speeds], reverse=True)
        claims.append(
            Claim(
                claim=one,
                verdict="holds" if falls and len(speeds) == 3 else "does not hold",
                because=f"On machines like this one instead of GPUs, predicted for all-reduce over"
                f" 1 Gbit/s at batch {_batch(found['shallow_cnn'])}: speedups {words} with 2, 4"
                " and 8.",
            )
        )
    else:
        claims.append(Claim(claim=one, verdict=waiting, because="Its step is not run."))
    pairs = []
    for model, outcome in found.items():
        row = plain_row(outcome, 4)
        if row is not None:
            pairs.append((coordination(row), float(row["speedup"]), TITLES[model]))
    if len(pairs) == 2:
        low, high = sorted(pairs)
        claims.append(
            Claim(
                claim=ratio,
                verdict="holds" if low[1] > high[1] else "does not hold",
                because=f"4 machines, all-reduce, predicted: {low[2]} {low[0]:.2f} and speedup"
                f" {low[1]:.2f}; {high[2]} {high[0]:.2f} and speedup {high[1]:.2f}.",
            )
        )
    else:
        because = "Both networks' predictions are needed (the short form leaves ResNet-18 out)."
        claims.append(Claim(claim=ratio, verdict=waiting, because=because))
    return claims
