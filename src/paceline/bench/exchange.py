"""Every exchange and stock DDP side by side, on the same emulated hosts in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.bench.cluster import Row, run_in_lab, summarise
from paceline.bench.trials import Bench, Trial
from paceline.errors import ConfigError, unknown_name
from paceline.lab import LabSpec
from paceline.schema import NodePlan, Plan

STOCK = "stock DDP"
PARTITION = "partition"
LATE = "allreduce, no overlap"


@dataclass(frozen=True, kw_only=True)
class Model:
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
    "mnist_cnn": Model(
        name="mnist_cnn", batch=128, shape=(1, 28, 28), classes=10, optimizer="adam"
    ),
    "alexnet": Model(name="alexnet", batch=32, shape=(3, 224, 224), classes=10),
    "vgg16": Model(name="vgg16", batch=8, shape=(3, 224, 224), classes=10),
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
class Cell:
    """All exchanges for one model on one lab."""

    model: str
    hosts: int
    rate: str
    rows: tuple[Row, ...]


def run_exchanges(
    spec: LabSpec,
    models: Sequence[str],
    exchanges: Sequence[str] = EXCHANGES,
    *,
    rounds: int = 2,
    updates: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """One cell per model; the exchanges of a model take turns."""
    cells = []
    for name in models:
        if name not in MODELS:
            raise ConfigError(unknown_name("bench model", name, MODELS))
        trials = tuple(_trial(MODELS[name], kind, spec, updates) for kind in exchanges)
        timings = run_in_lab(spec, Bench(trials=trials, rounds=rounds, deadline=600.0), say=say)
        rows = tuple(summarise(trials, timings))
        rate = str(spec.link.rate or "unshaped")
        cells.append(Cell(model=name, hosts=len(spec.hosts), rate=rate, rows=rows))
    return cells


def _trial(model: Model, kind: str, spec: LabSpec, updates: int) -> Trial:
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
        updates=updates,
    )
