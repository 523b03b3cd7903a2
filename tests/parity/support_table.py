"""Prints docs/support.md's table: `python tests/parity/support_table.py`; a test compares the two.

Rows and columns whose cells are the same everywhere else are not shown apart: shares and backends
are folded into a cell's words.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.schema.support import (
    BACKENDS,
    COMPRESSIONS,
    EXCHANGES,
    SHARES,
    STRATEGIES,
    Combination,
    refusal,
)

COLUMNS = (
    *((exchange, "none", "none") for exchange in EXCHANGES),
    *(("allreduce", compression, "none") for compression in COMPRESSIONS[1:]),
    ("allreduce", "none", "feature"),
)


def cell(strategy: str, exchange: str, compression: str, partition: str) -> str:
    """ "yes", "no", or what of it works."""
    asked = Combination(
        strategy=strategy, exchange=exchange, compression=compression, partition=partition
    )
    works = {
        (shares, backend): not refusal(replace(asked, shares=shares, backend=backend))
        for shares in SHARES
        for backend in BACKENDS
    }
    if all(works.values()):
        return "yes"
    if not any(works.values()):
        return "-"
    words = [
        name
        for name, place, values in (("share 0", 0, SHARES), ("MPI", 1, BACKENDS))
        if not any(ok for key, ok in works.items() if key[place] == values[-1])
    ]
    return f"not with {' or '.join(words)}"


def table() -> str:
    """The matrix as Markdown."""
    names = [
        exchange
        + (f", {compression}" if compression != "none" else "")
        + (", split layers" if partition != "none" else "")
        for exchange, compression, partition in COLUMNS
    ]
    lines = [f"| local strategy | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for strategy in STRATEGIES:
        cells = [cell(strategy, *column) for column in COLUMNS]
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
