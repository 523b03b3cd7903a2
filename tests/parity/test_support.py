"""The support matrix, cell by cell: what it allows trains, what it does not is refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path

import pytest
import torch
from node_series import Run, train_series
from runs import assert_same
from support_table import table

from paceline.errors import UnsupportedError
from paceline.schema import ExchangeSettings, NodePlan, Plan
from paceline.schema.support import (
    BACKENDS,
    COMPRESSIONS,
    DDP,
    EXCHANGES,
    PARTITIONS,
    RULES,
    SEVERAL_RANKS,
    SHARES,
    STRATEGIES,
    SUMS,
    Combination,
    check_support,
    refusal,
)

DOCS = Path(__file__).parents[2] / "docs" / "support.md"
SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.05")
PARTS = {"equal": (1.0, 1.0), "unequal": (3.0, 1.0), "zero": (1.0, 0.0)}
SHAPES = {
    "processes": {"processes": 2},
    DDP: {"processes": 2, "sync": "ddp"},
    "hogwild": {"processes": 2},
    "replicas": {"replicas": 2},
    "pipeline": {"stages": 2, "micro_batches": 2},
    "hybrid": {"stages": 2, "replicas": 1, "micro_batches": 2},
}


def every_cell() -> Iterator[Combination]:
    """The whole matrix."""
    for strategy, exchange, compression, partition, shares, backend in product(
        STRATEGIES, EXCHANGES, COMPRESSIONS, PARTITIONS, SHARES, BACKENDS
    ):
        yield Combination(
            strategy=strategy,
            exchange=exchange,
            compression=compression,
            partition=partition,
            shares=shares,
            backend=backend,
        )


WORKING = [cell for cell in every_cell() if not refusal(cell)]


def shows_something_new(cell: Combination) -> bool:
    """Whether no cheaper cell shows it: where every run starts ranks, that is nearly all it costs.

    Equal shares are unequal ones of a kind. What a share of 0 does to ranks of a node shows over
    Gloo, and what it does over MPI shows in nodes of one process.
    """
    if cell.strategy not in SEVERAL_RANKS:
        return True
    return cell.shares == "unequal" or (cell.shares == "zero" and cell.backend == "gloo")


def plan_nodes(cell: Combination) -> list[NodePlan]:
    """Two workers, and a server where there is one."""
    strategy = cell.strategy.partition(",")[0]
    shape = SHAPES.get(cell.strategy, {})
    nodes = [NodePlan(strategy=strategy, share=s, **shape) for s in PARTS[cell.shares]]  # type: ignore[arg-type]
    return [*nodes, NodePlan()] if cell.exchange == "parameter_server" else nodes


def as_run(cell: Combination) -> Run:
    changes = (
        *SGD,
        f"exchange.kind={cell.exchange}",
        f"exchange.compression={cell.compression}",
        f"exchange.partition={'auto' if cell.partition == 'feature' else 'none'}",
        "exchange.rebalance=false",
    )
    return Run(cell.exchange, changes, plan_nodes(cell), cell.partition == "feature")


def check(cells: list[Combination], alone, tmp_path: Path, timeout: float) -> None:
    """Train all of them; exact ones end with the weights of one process, others with numbers."""
    cells.sort(key=lambda cell: (cell.backend, len(plan_nodes(cell))))
    groups = groupby(cells, lambda cell: (cell.backend, len(plan_nodes(cell))))
    for number, ((backend, _), group) in enumerate(groups):
        chosen = list(group)
        folder = tmp_path / str(number)
        runs = [as_run(cell) for cell in chosen]
        for cell, found in zip(
            chosen, train_series(folder, runs, backend=backend, timeout=timeout), strict=True
        ):
            try:
                if cell.compression == "none" and cell.exchange in (*SUMS, "parameter_server"):
                    assert_same(found, alone(SGD))
                assert all(torch.isfinite(tensor).all() for tensor in found.values())
            except AssertionError as error:
                raise AssertionError(f"{cell}: {error}") from None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi4py", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("strategy", sorted({cell.strategy for cell in WORKING}))
def test_what_is_allowed_trains(strategy: str, backend: str, alone, tmp_path: Path) -> None:
    cells = [cell for cell in WORKING if (cell.strategy, cell.backend) == (strategy, backend)]
    cells = [cell for cell in cells if shows_something_new(cell)]
    assert cells
    check(cells, alone, tmp_path, timeout=800.0)


@pytest.mark.parametrize("number", range(len(RULES)))
def test_every_rule_refuses_something_with_a_remedy(number: int) -> None:
    """And no rule is hidden by those before it."""
    rule = RULES[number]
    cells = [cell for cell in every_cell() if refusal(cell) == rule.why]
    assert cells, "other rules say it already"
    assert ": " in rule.why
    cell = cells[0]
    plan = Plan(
        nodes=tuple(plan_nodes(cell)),
        exchange=cell.exchange,
        feature_layers=("classifier.1",) if cell.partition == "feature" else (),
    )
    settings = ExchangeSettings(compression=cell.compression)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError) as found:
        check_support(plan, settings, cell.backend)
    assert rule.why in str(found.value)


def test_one_node_may_be_anything() -> None:
    for strategy, shape in SHAPES.items():
        node = NodePlan(strategy=strategy.partition(",")[0], **shape)  # type: ignore[arg-type]
        check_support(Plan(nodes=(node,)), ExchangeSettings(), "gloo")


def test_every_strategy_with_several_ranks_is_known() -> None:
    for strategy, shape in SHAPES.items():
        node = NodePlan(strategy=strategy.partition(",")[0], **shape)  # type: ignore[arg-type]
        assert (node.ranks > 1) == (strategy in SEVERAL_RANKS)


def test_the_table_in_the_docs_is_the_matrix() -> None:
    assert table() in DOCS.read_text(), "run: python tests/parity/support_table.py, and paste it"
