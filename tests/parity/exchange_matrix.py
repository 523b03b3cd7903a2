"""The parity matrix of exchanges: which trainings over nodes are held against one process.

`python tests/parity/exchange_matrix.py` prints the table of docs/exchanges.md; a test compares
the two, and test_exchanges.py runs every row. A new exact exchange is one entry of EXCHANGES.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Row:
    """One training of five updates over nodes."""

    exchange: str
    backend: str
    optimizer: str
    shares: tuple[float, ...]

    @property
    def kind(self) -> str:
        """The exchange of the plan."""
        return self.exchange.partition(",")[0]

    @property
    def is_split(self) -> bool:
        """Whether layers are split over nodes."""
        return self.exchange.endswith("partition")

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs from the base of all runs; a small bucket, so that there are several."""
        return (
            *OPTIMIZERS[self.optimizer],
            *EXCHANGES[self.exchange],
            "exchange.bucket_mb=0.05",
            "exchange.rebalance=false",
        )


def rows(backend: str, nodes: int | None = None) -> list[Row]:
    """What the same processes can run one after the other: over MPI, one number of nodes."""
    return [
        Row(exchange, backend, optimizer, shares)
        for exchange in EXCHANGES
        for optimizer, shares in CELLS[backend]
        if nodes in (None, len(shares))
    ]


def table() -> str:
    """The whole matrix as Markdown."""
    lines = [
        "| exchange | backend | nodes | shares | optimizer | weights |",
        "|---|---|---|---|---|---|",
    ]
    for exchange in EXCHANGES:
        for backend, cells in CELLS.items():
            for optimizer, shares in cells:
                text = ":".join(f"{share:g}" for share in shares)
                lines.append(
                    f"| {exchange} | {backend} | {len(shares)} | {text} | {optimizer} |"
                    f" within {TOLERANCES[optimizer]:.0e} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
