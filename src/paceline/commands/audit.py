"""`paceline audit`."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.errors import shown
from paceline.run import open_run
from paceline.schema.plain import read_json_file

if TYPE_CHECKING:
    from rich.table import Table


UNSTEADY = 0.3
"""Epochs whose updates differ by more than this part were disturbed."""


@click.command("audit")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--only-look", is_flag=True, help="Leave what plan and predict go by as it is.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs, and only that.")
def command(runs: tuple[Path, ...], only_look: bool, as_json: bool) -> None:
    """Say how far predictions were from what RUNS measured, and correct what drifts.

    Times that plan and predict give are from now on multiplied by what runs of the same
    exchange took against what was predicted for them, where there are 3 runs or more. Runs that
    were predicted or trained on a busy machine teach nothing and are left out.

    \b
    paceline audit runs/*
    """
    from paceline.schema import encode
    from paceline.workflow.calibration import keep_factors

    folders = [path for path in runs if not path.is_symlink()] or list(runs)
    disturbed = {str(path): why for path in folders if (why := disturbance(path))}
    found = audit([path for path in folders if str(path) not in disturbed])
    found = dataclasses.replace(found, skipped={**found.skipped, **disturbed})
    kept = None
    if found.factors and not only_look:
        kept = keep_factors(found.factors, found.counts)
    if as_json:
        click.echo(json.dumps(encode(found), indent=2))
        return
    from paceline.report.tables import wide_console

    console = wide_console()
    if found.runs:
        console.print(table(found))
    for line in [*_sums(found), *_factors(found)]:
        console.print(line, highlight=False)
    for path, why in found.skipped.items():
        console.print(f"not compared: {path}: {why}", highlight=False, soft_wrap=True)
    if kept is not None:
        console.print(
            f"plan and predict go by these factors now: {kept}", highlight=False, soft_wrap=True
        )


def disturbance(run: Path) -> str:
    """Why a run says more of what else its machine did than of the model; empty where nothing.

    Its prediction was measured beside other programs, or its own epochs differ much: a run
    takes the same time for every update, and what changes is the machine.
    """
    from paceline.report.load import finite
    from paceline.schema.machines import BUSY
    from paceline.schema.plain import parse_json, read_text

    busy = _read(run / "race.json").get("busy", 0.0)
    if isinstance(busy, float) and busy > BUSY:
        return f"other programs used {busy:.0%} of the cores during its race"
    if any("other programs used" in str(text) for text in _read(run / "machines.json").values()):
        return "other programs used the cores while its hosts were measured"
    times = []
    try:
        for line in read_text(run / "metrics.jsonl").splitlines():
            value = parse_json(line).get("update_seconds_median")
            times += [value] if finite(value) else []
    except (OSError, ValueError, AttributeError):
        return ""
    steady = times[1:] or times  # the first epoch warms up
    if steady and max(steady) > (1 + UNSTEADY) * min(steady):
        return f"its updates took {min(steady):.3g} to {max(steady):.3g} s by epoch"
    return ""


def _read(path: Path) -> dict[str, Any]:
    from paceline.schema.plain import read_json_file

    try:
        found = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def table(found: Audit) -> Table:
    """Every run with the error of each quantity."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "exchange"):
        made.add_column(name, no_wrap=True)
    for name in ("nodes", "update ms", "predicted", "error", "images/s", "bytes", "memory"):
        made.add_column(name, justify="right", no_wrap=True)
    for run in found.runs:
        made.add_row(
            Path(run.run).name,
            run.exchange + ("" if run.compared else " (computing only)"),
            str(run.nodes),
            f"{1000 * run.measured.get('update_seconds', 0.0):.3g}",
            f"{1000 * run.predicted['update_seconds']:.3g}",
            *(
                f"{run.errors[key]:+.0%}" if key in run.errors else "-"
                for key in ("update_seconds", "images_per_second", "bytes_per_update", "memory_mb")
            ),
        )
    return made


def _sums(found: Audit) -> list[str]:
    words = {
        "update_seconds": "time per update",
        "images_per_second": "images/s",
        "bytes_per_update": "bytes",
        "memory_mb": "memory",
    }
    return [
        f"{words[key]}: error {found.mean[key]:.0%} in the mean, {found.worst[key]:.0%} at worst"
        for key in words
        if key in found.mean
    ]


def _factors(found: Audit) -> list[str]:

    lines = []
    for name, count in found.counts.items():
        factor = found.factors.get(name)
        if name in found.noisy:
            low, high = found.noisy[name]
            lines.append(
                f"{name}: runs took {low:.2f} to {high:.2f} times what was predicted: they disagree"
                " too much for a factor; was the machine busy?"
            )
        elif factor is None:
            lines.append(f"{name}: {count} of the {ENOUGH} runs that a factor must stand on")
        elif abs(factor - 1) <= SAME:
            lines.append(f"{name}: predictions are right in the middle ({factor:.2f})")
        else:
            lines.append(f"{name}: multiply predicted times by {factor:.2f} ({count} runs)")
    return lines


QUANTITIES = ("update_seconds", "images_per_second", "bytes_per_update", "memory_mb")
ENOUGH = 3
"""Runs of one exchange that a factor must stand on."""
DISAGREE = 0.3
"""Quartile distance of the ratios, in parts of their median, above which they are noise."""
SAME = 0.02
"""A factor this near to 1 changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One run: what was predicted, what came, and the error of each in parts of what came."""

    run: str
    exchange: str
    nodes: int
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    """Measured time of an update over predicted time, before any calibration."""
    compared: bool = True
    """False where only computing was predicted: such a run teaches nothing about an exchange."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """All runs together."""

    runs: tuple[Audited, ...]
    skipped: dict[str, str]
    """Runs that cannot be compared, and why."""
    mean: dict[str, float]
    worst: dict[str, float]
    """Of the errors' sizes, per quantity."""
    factors: dict[str, float]
    """Per exchange with enough runs that agree: median of measured over predicted time."""
    counts: dict[str, int]
    noisy: dict[str, tuple[float, float]]
    """Exchanges whose runs disagree too much for a factor: smallest and largest ratio."""


def audit(paths: Sequence[Path]) -> Audit:
    """Compare what the runs at `paths` were predicted to do with what they did."""
    runs: list[Audited] = []
    skipped: dict[str, str] = {}
    for path in paths:
        open_run(path)
        try:
            summary = read_json_file(path / "run.json")
        except FileNotFoundError:
            skipped[str(path)] = "it has no run.json: it did not end"
            continue
        except (OSError, ValueError) as error:
            skipped[str(path)] = f"its run.json cannot be read: {error}"
            continue
        found = audited(str(path), summary)
        if isinstance(found, str):
            skipped[str(path)] = found
        else:
            runs.append(found)
    sizes = {key: [abs(run.errors[key]) for run in runs if key in run.errors] for key in QUANTITIES}
    ratios: dict[str, list[float]] = {}
    for run in runs:
        if run.ratio is not None and run.compared:
            ratios.setdefault(run.exchange, []).append(run.ratio)
    enough = {name: values for name, values in ratios.items() if len(values) >= ENOUGH}
    noisy = {
        name: (min(values), max(values)) for name, values in enough.items() if _disagree(values)
    }
    return Audit(
        runs=tuple(runs),
        skipped=skipped,
        mean={key: statistics.fmean(values) for key, values in sizes.items() if values},
        worst={key: max(values) for key, values in sizes.items() if values},
        factors={
            name: statistics.median(values) for name, values in enough.items() if name not in noisy
        },
        counts={name: len(values) for name, values in ratios.items()},
        noisy=noisy,
    )


def _disagree(ratios: Sequence[float]) -> bool:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return high - low > DISAGREE * middle


def audited(name: str, summary: Any) -> Audited | str:
    """One run's run.json, compared; a string says why it cannot be."""
    if not isinstance(summary, dict):
        return f"its run.json is {shown(summary)}, not a table of keys"
    predicted = _numbers(summary.get("predicted"))
    measured = _numbers(summary.get("measured"))
    if not measured:
        return "its run.json has nothing measured: it was made by an older version"
    if not predicted.get("update_seconds"):
        return "nothing was predicted: its strategy was asked for, not measured"
    errors = {
        key: predicted[key] / measured[key] - 1
        for key in QUANTITIES
        if predicted.get(key) and measured.get(key)
    }
    if not errors:
        return "it trained too little to be measured"
    ratio = None
    if measured.get("update_seconds"):
        raw = predicted["update_seconds"] / predicted.get("calibration", 1.0)
        ratio = measured["update_seconds"] / raw
    nodes = int(measured.get("nodes", 1))
    return Audited(
        run=name,
        exchange=str(summary.get("exchange") or "alone"),
        nodes=nodes,
        predicted=predicted,
        measured=measured,
        errors=errors,
        ratio=ratio if ratio is not None and math.isfinite(ratio) else None,
        compared=nodes == 1 or "exposed_seconds" in predicted,
    )


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
