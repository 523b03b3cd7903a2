"""The parity matrix of exchanges: which trainings over nodes are held against one process.

`python tests/parity/exchange_matrix.py` prints the table of docs/exchanges.md; a test compares
the two, and test_exchanges.py runs every row. A new exact exchange is one entry of EXCHANGES.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OPTIMIZERS = {
    "sgd, momentum": (
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "optimizer.learning_rate=0.05",
    ),
    "adam": ("optimizer.name=adam",),
}
TOLERANCES = {"sgd, momentum": 1e-5, "adam": 1e-4}
"""Adam divides a gradient by its own size: rounding alone can move a weight by its rate."""

EXCHANGES: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "ring": ("exchange.kind=ring",),
    "reduce_broadcast": ("exchange.kind=reduce_broadcast",),
    "allreduce, partition": ("exchange.kind=allreduce", "exchange.partition=auto"),
    "parameter_server, sync": ("exchange.kind=parameter_server", "exchange.mode=sync"),
}
"""Every exact exchange, with the settings that it needs besides its name. With the partition the
linear layers are split; with parameter_server the last node serves and its share means nothing."""

CELLS: dict[str, list[tuple[str, tuple[float, ...]]]] = {
    "gloo": [
        ("sgd, momentum", (1, 1)),
        ("adam", (3, 1)),
        ("sgd, momentum", (1, 0)),
        ("adam", (1, 1, 1, 1)),
        ("sgd, momentum", (3, 1, 2, 1)),
    ],
    "mpi4py": [
        ("adam", (1, 1)),
        ("sgd, momentum", (3, 1)),
        ("adam", (1, 0)),
        ("sgd, momentum", (1, 1, 1, 1)),
        ("adam", (3, 1, 2, 1)),
    ],
}
"""By backend: optimizer and shares. With 2 and 4 nodes every pair of backend, number of nodes,
optimizer and kind of shares (equal or not) occurs, not every combination of all four."""


NORMALISED: dict[str, list[tuple[str, str, tuple[float, ...]]]] = {
    "gloo": [
        ("allreduce", "sgd, momentum", (3, 1)),
        ("ring", "adam", (1, 0)),
        ("reduce_broadcast", "sgd, momentum", (3, 1, 2, 1)),
    ],
    "mpi4py": [
        ("allreduce", "adam", (3, 1)),
        ("ring", "sgd, momentum", (1, 0)),
        ("allreduce", "sgd, momentum", (1, 1, 1, 1)),
    ],
}
"""By backend: exchange, optimizer and shares of a model with BatchNorm, whose statistics nodes add
up in the middle of every pass."""
_OWN = Path(__file__).with_name("own_models.py")


@dataclass(frozen=True)
class Row:
    """One training of five updates over nodes."""

    exchange: str
    backend: str
    optimizer: str
    shares: tuple[float, ...]
    model: str = "mnist_cnn"

    @property
    def kind(self) -> str:
        """The exchange of the plan."""
        return self.exchange.partition(",")[0]

    @property
    def is_split(self) -> bool:
        """Whether layers are split over nodes."""
        return self.exchange.endswith("partition")

    @property
    def workload(self) -> tuple[str, ...]:
        """What one process trains too."""
        own = (f"workload.model={_OWN}:{self.model}", "workload.model_options={}")
        return (*OPTIMIZERS[self.optimizer], *(own if self.model != "mnist_cnn" else ()))

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs from the base of all runs; a small bucket, so that there are several."""
        return (
            *self.workload,
            *EXCHANGES[self.exchange],
            "exchange.bucket_mb=0.05",
            "exchange.rebalance=false",
        )


def rows(backend: str, nodes: int | None = None) -> list[Row]:
    """What the same processes can run one after the other: over MPI, one number of nodes."""
    plain = [
        Row(exchange, backend, optimizer, shares)
        for exchange in EXCHANGES
        for optimizer, shares in CELLS[backend]
    ]
    normalised = [
        Row(exchange, backend, optimizer, shares, "normalised")
        for exchange, optimizer, shares in NORMALISED[backend]
    ]
    return [row for row in (*plain, *normalised) if nodes in (None, len(row.shares))]


def table() -> str:
    """The whole matrix as Markdown."""
    lines = [
        "| exchange | backend | nodes | shares | model | optimizer | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    every = [row for backend in CELLS for row in rows(backend)]
    order = list(EXCHANGES)
    for row in sorted(every, key=lambda row: (order.index(row.exchange), row.model)):
        text = ":".join(f"{share:g}" for share in row.shares)
        lines.append(
            f"| {row.exchange} | {row.backend} | {len(row.shares)} | {text} | {row.model} |"
            f" {row.optimizer} | within {TOLERANCES[row.optimizer]:.0e} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
