"""Which runs belong to one scaling series, their speedup and efficiency: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.report.load import RunData

Kind = Literal["strong", "weak"]
Unit = Literal["hosts", "cores"]


@dataclass(frozen=True)
class ScalingStep:
    """The runs of one size in a scaling series."""

    size: int
    batch: int
    speed: float
    """Median images per second of the runs of this size."""
    low: float
    high: float
    runs: tuple[str, ...]
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Scaling:
    """One line of a scaling figure."""

    name: str
    kind: Kind
    unit: Unit
    steps: tuple[ScalingStep, ...]


def scalings(runs: Sequence[RunData], kind: Kind) -> list[Scaling]:
    """Series of at least two sizes: the same batch (strong) or the same batch per size (weak).

    Sizes are hosts where any run has several, else cores. Runs that differ in model, data,
    machine or in how they agree are lines of their own; the smallest size, where there is
    nobody to agree with, belongs to all lines of its model, data and batch.
    """
    unit: Unit = "hosts" if any(run.hosts > 1 for run in runs) else "cores"
    usable = [run for run in runs if run.speed and run.batch]
    groups: dict[tuple[str, ...], list[RunData]] = {}
    alone: dict[tuple[str, ...], list[RunData]] = {}
    for run in usable:
        key = _sort(run, kind, unit)
        if size_of(run, unit) == 1:
            alone.setdefault(key, []).append(run)
        else:
            groups.setdefault((*key, _variant(run, unit)), []).append(run)
    found: list[tuple[tuple[str, ...], Sequence[RunData]]] = []
    for variant, members in groups.items():
        together = [*alone.get(variant[:-1], []), *members]
        if len({size_of(run, unit) for run in together}) > 1:
            found.append((variant, together))
    names = distinct([key for key, _ in found])
    return [
        Scaling(name=name or "measured", kind=kind, unit=unit, steps=_steps(together, kind, unit))
        for name, (_, together) in zip(names, found, strict=True)
    ]


def size_of(run: RunData, unit: Unit) -> int:
    return run.hosts if unit == "hosts" else run.cores


def machine_of(run: RunData) -> str:
    """The first rank's host: what tells two machines apart."""
    if run.sessions:
        return run.sessions[0].start.host
    return run.plan.nodes[0].host if run.plan is not None else ""


def _sort(run: RunData, kind: Kind, unit: Unit) -> tuple[str, ...]:
    batch = run.batch or 0
    # Rounded: with 3 hosts a batch of 128 is not divided evenly.
    work = batch if kind == "strong" else round(batch / size_of(run, unit))
    share = "batch" if kind == "strong" else f"batch per {unit.removesuffix('s')}"
    precision = run.plan.precision if run.plan is not None else ""
    return (run.model, run.data, f"{share} {work}", precision, machine_of(run))


def _variant(run: RunData, unit: Unit) -> str:
    if unit == "hosts" or run.plan is None:
        return run.exchange
    layout = run.plan.memory_format
    strategy = run.plan.nodes[0].strategy
    return strategy if layout == "contiguous" else f"{strategy} {layout}"


def _steps(runs: Sequence[RunData], kind: Kind, unit: Unit) -> tuple[ScalingStep, ...]:
    sizes: dict[int, list[RunData]] = {}
    for run in runs:
        sizes.setdefault(size_of(run, unit), []).append(run)
    smallest = min(sizes)
    first = statistics.median(run.speed or 0.0 for run in sizes[smallest])
    steps = []
    for size in sorted(sizes):
        speeds = [run.speed or 0.0 for run in sizes[size]]
        speed = statistics.median(speeds)
        steps.append(
            ScalingStep(
                size=size,
                batch=sizes[size][0].batch or 0,
                speed=speed,
                low=min(speeds),
                high=max(speeds),
                runs=tuple(run.name for run in sizes[size]),
                speedup=speed / first,
                efficiency=speed / first * smallest / size,
            )
        )
    return tuple(steps)


def distinct(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """Names made of the parts in which the keys differ.

    >>> distinct([("mnist", "ring"), ("mnist", "allreduce")])
    ['ring', 'allreduce']
    """
    if not keys:
        return []
    differs = [len(set(column)) > 1 for column in zip(*keys, strict=True)]
    return [
        ", ".join(part for part, other in zip(key, differs, strict=True) if other and part)
        for key in keys
    ]


def grouped(
    runs: Iterable[RunData],
    key: Callable[[RunData], tuple[str, ...]],
    wanted: Callable[[list[RunData]], bool] = bool,
) -> list[tuple[str, list[RunData]]]:
    """The wanted groups of runs by key, named by what tells their keys apart."""
    groups: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    kept = {name: members for name, members in groups.items() if wanted(members)}
    return list(zip(distinct(list(kept)), kept.values(), strict=True))
