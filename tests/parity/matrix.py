"""The parity matrix: which trainings are held against `sequential`, and how closely.

`python tests/parity/matrix.py` prints the table of docs/parity.md; a test compares
the two, and every row is run by test_matrix.py or test_pipeline.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from cases import Case  # noqa: E402


def node(strategy: str, **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, **options}


TINY_LAST = (16, 16, 12, 16, 1)
"""The last batch has one sample: all workers but one have nothing to do."""
UNEVEN = (16, 15, 12, 2, 3)
"""With BatchNorm, which needs two: parts of one sample, and workers that have nothing to do."""

ALONE = [
    Case(node=node("threads", threads=1)),
    Case(node=node("threads", threads=2)),
    Case(node=node("threads", threads=2), optimizer="adam", clip_norm=0.05),
    Case(node=node("threads", threads=2), memory_format="channels_last"),
    Case(node=node("replicas", replicas=2)),
    Case(node=node("replicas", replicas=3), optimizer="adam"),
    Case(node=node("replicas", replicas=2, threads=2), clip_norm=0.05),
    Case(node=node("replicas", replicas=2), memory_format="channels_last", sizes=TINY_LAST),
    Case(node=node("threads", threads=2), model="normalised", optimizer="adam"),
    Case(node=node("replicas", replicas=2), model="normalised"),
    Case(node=node("replicas", replicas=2), model="normalised", optimizer="adam", clip_norm=0.05),
    Case(node=node("replicas", replicas=4), model="normalised", sizes=UNEVEN),
    Case(
        node=node("replicas", replicas=4),
        model="normalised",
        optimizer="adam",
        memory_format="channels_last",
        sizes=UNEVEN,
    ),
]
TWO_RANKS = [
    Case(node=node("processes", processes=2)),
    Case(node=node("processes", processes=2, threads=2), optimizer="adam"),
    Case(node=node("processes", processes=2), clip_norm=0.05),
    Case(node=node("processes", processes=2), optimizer="adam", memory_format="channels_last"),
    Case(node=node("processes", processes=2), model="build", sizes=TINY_LAST),
    Case(node=node("processes", processes=2, sync="ddp")),
    Case(node=node("processes", processes=2, sync="ddp"), optimizer="adam", clip_norm=0.05),
    Case(node=node("processes", processes=2, sync="ddp"), sizes=TINY_LAST),
    Case(node=node("processes", processes=2), model="normalised"),
    Case(node=node("processes", processes=2), model="normalised", optimizer="adam", sizes=UNEVEN),
    Case(
        node=node("processes", processes=2),
        model="synchronised",
        clip_norm=0.05,
        memory_format="channels_last",
    ),
    Case(node=node("processes", processes=2, sync="ddp"), model="normalised"),
]
FOUR_RANKS = [
    Case(node=node("processes", processes=4)),
    Case(node=node("processes", processes=4), optimizer="adam", clip_norm=0.05),
    Case(node=node("processes", processes=4), sizes=TINY_LAST),
    Case(node=node("processes", processes=4, sync="ddp"), optimizer="adam"),
    Case(node=node("processes", processes=4), model="normalised", sizes=UNEVEN),
    Case(node=node("processes", processes=4), model="normalised", optimizer="adam", sizes=UNEVEN),
    Case(
        node=node("processes", processes=4, sync="ddp"),
        model="normalised",
        optimizer="adam",
        sizes=UNEVEN,
    ),
]


def bit_equal(case: Case) -> bool:
    """One process and one thread add in the same order as `sequential`."""
    return case.node == node("threads", threads=1)


def tolerance(case: Case) -> float:
    """Adam divides a gradient by its own size: rounding alone can move a weight by its rate."""
    return 1e-4 if case.optimizer == "adam" else 1e-5


def table() -> str:
    """The whole matrix as Markdown."""
    from test_pipeline import RESNET, ROWS, THREE_STAGES, TWO_STAGES

    lines = [
        "| strategy | options | model | optimizer | clip | layout | samples per update | weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = [ALONE, TWO_RANKS, FOUR_RANKS, TWO_STAGES, THREE_STAGES, ROWS]
    for case in (case for group in groups for case in group if case is not RESNET):
        options = {k: v for k, v in case.node.items() if k != "strategy"}
        text = ", ".join(f"{key} {_shown(value)}" for key, value in options.items())
        close = "bit-equal" if bit_equal(case) else f"within {tolerance(case):.0e}"
        sizes = " ".join(map(str, case.sizes))
        clip = case.clip_norm or ""
        lines.append(
            f"| {case.node['strategy']} | {text} | {case.model} | {case.optimizer} | {clip} |"
            f" {case.memory_format} | {sizes} | {close} |"
        )
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple | list) else str(value)


if __name__ == "__main__":
    print(table(), end="")
