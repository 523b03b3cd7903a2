"""A node twenty times slower than the other: shares by speed, equal parts, stock DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.figure import Axis, Figure, Section, Series, Table
from paceline.report.load import finite
from studies.outcome import Claim, Outcomes, StepOutcome

BAR = 0.93
ALONE, SHARES, EQUAL = "alone", "shares by speed", "equal parts"


def rows_of(outcome: StepOutcome | None) -> dict[str, Mapping[str, Any]]:
    """What the bench printed, by name; rows that failed are left out."""
    if outcome is None or not outcome.done:
        return {}
    return {
        str(row["name"]): row
        for row in outcome.result.get("rows", ())
        if not row.get("failed") and finite(row.get("images_per_second"))
    }


def part_of_alone(outcomes: Outcomes, name: str) -> float | None:
    """Images per second together against the sum of what each host does by itself."""
    rows = rows_of(outcomes.one(about="shares"))
    if ALONE not in rows or name not in rows:
        return None
    return float(rows[name]["images_per_second"] / rows[ALONE]["images_per_second"])


def shares_section(outcomes: Outcomes) -> Section | None:
    """One row per way of dividing the batch."""
    outcome = outcomes.one(about="shares")
    rows = rows_of(outcome)
    if outcome is None or not rows:
        return None
    cores, batch = outcome.step.facts["cores"], outcome.step.facts["batch"]
    words = " and ".join(f"{part:g}" for part in cores)
    table = Table(
        key="shares",
        title=f"Two hosts of {words} cores, batch {batch:,}, 1 Gbit/s",
        columns=("batch divided", "images/s", "of the sum alone", "s per update", "fastest round",
                 "slowest round", "MB per update", "waiting for the network"),
        rows=tuple(
            (
                name,
                row["images_per_second"],
                part_of_alone(outcomes, name),
                row["seconds"],
                row["low"],
                row["high"],
                row["mb_sent"],
                row["waiting"],
            )
            for name, row in rows.items()
        ),
        formats=("", ",.0f", ".1%", ".3f", ".3f", ".3f", ",.2f", ".0%"),
    )  # fmt: skip
    names = tuple(rows)
    figure = Figure(
        key="shares",
        title="A node twenty times slower than the other",
        caption=f"mnist_cnn on emulated hosts of {words} cores, all ways in turns in the same"
        " processes; medians over rounds. Alone: the sum of what each host does by itself at the"
        " same time on its share.",
        x=Axis(title="batch divided", kind="category"),
        y=Axis(title="images/s", minimum=0.0),
        series=(
            Series(
                name="images/s",
                shape="bar",
                x=names,
                y=tuple(float(rows[name]["images_per_second"]) for name in names),
            ),
        ),
        horizontal=True,
    )
    return Section(
        key="shares",
        title="Unequal nodes",
        text=(
            f"The study names the ideal share of a node {outcomes.published['slower']} times"
            f" slower: 1/{outcomes.published['slower'] + 1} of the batch. Shares follow measured"
            " speeds.",
        ),
        blocks=(figure, table),
    )


def shares_claim(outcomes: Outcomes) -> Claim:
    """The bar: at least 93% of what both do by themselves."""
    claim = (
        "Batch sizes by node speed would make unequal nodes worth while (its wish): with shares,"
        f" nodes of 20:1 reach at least {BAR:.0%} of the sum of their own speeds."
    )
    found, equal = part_of_alone(outcomes, SHARES), part_of_alone(outcomes, EQUAL)
    if found is None or equal is None:
        return Claim(claim=claim, verdict="cannot be tested here", because="Its step is not run.")
    return Claim(
        claim=claim,
        verdict="holds" if found >= BAR else "does not hold",
        because=f"{found:.1%} of the sum with shares, {equal:.1%} with equal parts.",
    )
