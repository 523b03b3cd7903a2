"""Every exchange and stock DDP side by side, on the same emulated hosts in one run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab.cluster import TrialRow, run_in_lab, summarise
from benchmarks.lab.trials import Bench, Trial
from paceline.errors import ConfigError, unknown_name
from paceline.lab import LabSpec
from paceline.schema import NodePlan, Plan, read_json, write_json

STOCK = "stock DDP"
PARTITION = "partition"
LATE = "allreduce, no overlap"


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A workload of the bench: made images of the right shape."""

    name: str
    batch: int
    shape: tuple[int, int, int]
    classes: int
    optimizer: str = "sgd"

    def settings(self) -> dict[str, object]:
        """As in a configuration."""
        extra = {"optimizer.momentum": 0.9} if self.optimizer == "sgd" else {}
        return {
            "workload.model": self.name,
            "workload.data": "synthetic",
            "workload.batch_size": self.batch,
            "data.options": {
                "shape": list(self.shape),
                "classes": self.classes,
                "samples": 2 * self.batch,
                "test_samples": self.classes,
            },
            "optimizer.name": self.optimizer,
            "train.deadline": 600.0,
            **extra,
        }


MODELS = {
    "mnist_cnn": BenchModel(
        name="mnist_cnn", batch=128, shape=(1, 28, 28), classes=10, optimizer="adam"
    ),
    "alexnet": BenchModel(name="alexnet", batch=32, shape=(3, 224, 224), classes=10),
    "vgg16": BenchModel(name="vgg16", batch=8, shape=(3, 224, 224), classes=10),
}
EXCHANGES = (
    STOCK,
    "allreduce",
    LATE,
    "allreduce bf16",
    "ring",
    "reduce_broadcast",
    "averaging",
    PARTITION,
    "parameter_server",
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long each trial is timed."""

    rounds: int = 2
    updates: int = 2
    warmup: int = 1
    """Updates before each turn that are not timed; 0 where one takes a minute on the wire."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Exchanges that took turns for one model on one lab."""

    model: str
    hosts: int
    cores: tuple[float | None, ...]
    rate: str
    effort: Effort
    rows: tuple[TrialRow, ...] = ()

    @property
    def title(self) -> str:
        """What it is about, in words."""
        cores = ", ".join(f"{count:g}" for count in dict.fromkeys(self.cores) if count)
        size = f" of {cores} core{'' if cores == '1' else 's'}" if cores else ""
        return f"{self.model} on {self.hosts} hosts{size} at {self.rate}"

    def answers(self, wanted: Cell, exchanges: Sequence[str]) -> bool:
        """Whether it is of the model, lab and effort that are wanted, with all these exchanges."""
        done = {row.name for row in self.rows if not row.failed}
        return replace(self, rows=wanted.rows) == wanted and done >= set(exchanges)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cells that are done: kept in a file, so that a run that was ended can go on."""

    cells: tuple[Cell, ...] = ()


def run_matrix(
    specs: Sequence[LabSpec],
    models: Sequence[str],
    exchanges: Sequence[str],
    effort: Effort,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Cell, ...]:
    """One cell per lab and model; one that is in `out` whole is not timed again.

    What stands in a cell was always timed in the same turns: a cell of which anything is missing is
    timed anew.
    """
    known = read_json(Matrix, out).cells if out is not None and out.exists() else ()
    cells: list[Cell] = []
    for name in models:
        if name not in MODELS:
            raise ConfigError(unknown_name("bench model", name, MODELS))
    for spec, name in itertools.product(specs, models):
        wanted = Cell(
            model=name,
            hosts=len(spec.hosts),
            cores=tuple(host.cores for host in spec.hosts),
            rate=str(spec.link.rate or "no limit"),
            effort=effort,
        )
        cell = next((each for each in known if each.answers(wanted, exchanges)), None)
        if cell is None:
            say(f"{wanted.title}: {', '.join(exchanges)}")
            trials = tuple(_trial(MODELS[name], kind, spec, effort) for kind in exchanges)
            bench = Bench(trials=trials, rounds=effort.rounds, deadline=600.0)
            timings = run_in_lab(spec, bench, timeout=2 * 3600.0, say=say)
            cell = replace(wanted, rows=tuple(summarise(trials, timings)))
            known = (*known, cell)
            if out is not None:
                write_json(out, Matrix(cells=known))
        rows = tuple(row for row in cell.rows if row.name in exchanges)
        cells.append(replace(cell, rows=rows))
    return tuple(cells)


def _trial(model: BenchModel, kind: str, spec: LabSpec, effort: Effort) -> Trial:
    if kind not in EXCHANGES:
        raise ConfigError(unknown_name("exchange", kind, EXCHANGES))
    settings = model.settings()
    exchange, _, compression = kind.partition(" ")
    nodes = [NodePlan(host=host.name) for host in spec.hosts]
    if kind in (STOCK, PARTITION, LATE):
        exchange, compression = "allreduce", ""
    if kind == LATE:
        settings["exchange.overlap"] = False
    settings["exchange.partition"] = "auto" if kind == PARTITION else "none"
    if compression:
        settings["exchange.compression"] = compression
    plan = Plan(nodes=tuple(nodes), exchange=exchange, batch_size=model.batch).with_servers(1)
    return Trial(
        name=kind,
        kind="ddp" if kind == STOCK else "plan",
        settings=settings,
        plan=plan,
        updates=effort.updates,
        warmup=effort.warmup,
    )
