"""`threads`, `replicas` and `processes` end with the weights of `sequential`.

Tolerance: rtol 1e-4 and atol 1e-5 in fp32 (Adam: atol 1e-4) after five updates, for
weights and optimizer state; only the order of additions differs.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from cases import Case, flat, reference, run_cases, sequential, train

# isort: split
from matrix import ALONE, FOUR_RANKS, TINY_LAST, TWO_RANKS, bit_equal, node, table, tolerance
from runs import assert_same

DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.mark.parametrize("case", ALONE, ids=lambda case: str(case.node))
def test_one_process(case: Case) -> None:
    found, expected = flat(*train(case, case.job())), reference(case)
    if bit_equal(case):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert_same(found, expected, atol=tolerance(case))


def test_replicas_are_proved_wherever_pythons_generator_stands() -> None:
    """On every node but the first nothing has been drawn, or begun anew, before a proof."""
    case = Case(node={"strategy": "replicas", "replicas": 2})
    random.seed(7)
    weights, _ = train(case, dataclasses.replace(case.job(), still=True))
    plain, _ = train(sequential(case), dataclasses.replace(sequential(case).job(), still=True))
    assert_same(weights, plain)


@pytest.mark.world_size(2)
def test_two_ranks(tmp_path: Path) -> None:
    compare(TWO_RANKS, tmp_path)


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_four_ranks(tmp_path: Path) -> None:
    compare(FOUR_RANKS, tmp_path)


def compare(cases: list[Case], folder: Path) -> None:
    for case, found in zip(cases, run_cases(folder, cases), strict=True):
        try:
            assert_same(found, reference(case), atol=tolerance(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_weights_rounded_once_per_node_by_two_ranks(tmp_path: Path) -> None:
    compare_rounded(2, tmp_path)


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_weights_rounded_once_per_node_by_four_ranks(tmp_path: Path) -> None:
    compare_rounded(4, tmp_path)


def compare_rounded(ranks: int, folder: Path) -> None:
    """bf16 with the rounded weights in shared memory, against autocast on each rank."""
    base = Case(node=node("processes", processes=ranks), precision="bf16")
    cases = [
        dataclasses.replace(base, optimizer="adam", clip_norm=0.05),
        dataclasses.replace(base, memory_format="channels_last", sizes=TINY_LAST),
        dataclasses.replace(base, model="resnet18", memory_format="channels_last", sizes=(8, 8)),
        dataclasses.replace(base, model="normalised", sizes=(16, 16, 12)),
        dataclasses.replace(base, model="onto_one_pixel", memory_format="channels_last"),
        dataclasses.replace(base, model="used_twice"),
    ]
    plain = [dataclasses.replace(case, rounded=False) for case in cases]
    found = run_cases(folder, [*cases, *plain])
    halves = found[: len(cases)], found[len(cases) :]
    for case, ours, theirs in zip(cases, *halves, strict=True):
        if case.model == "used_twice":  # its parts meet in fp32, autocast adds them in bf16
            assert_same(ours, theirs, rtol=1e-2, atol=1e-3)
        else:
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), case


def test_the_table_in_the_docs_is_the_matrix() -> None:
    assert table() in DOCS.read_text(), (
        "run: python tests/parity/matrix.py, and paste into the docs"
    )


@pytest.mark.world_size(2)
def test_dropout_and_batch_norm_with_several_workers(tmp_path: Path) -> None:
    """What docs/strategies.md says of layers that look beyond one sample, or at chance."""
    twice = [Case(node=node("processes", processes=2), model="with_dropout")] * 2
    normalised = Case(
        node=node("processes", processes=2), model="normalised", local_batch_norm=True
    )
    first, second, statistics = run_cases(tmp_path, [*twice, normalised])
    # Dropout repeats from run to run, but is not what one worker would have drawn.
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(AssertionError):
        assert_same(first, reference(twice[0]))
    # Where it is allowed, BatchNorm sees the first worker's half: five updates, other statistics.
    alone = reference(normalised)
    counted = [name for name in statistics if name.endswith("num_batches_tracked")]
    assert counted
    assert all(int(statistics[name]) == 5 for name in counted)
    means = [name for name in statistics if name.endswith("running_mean")]
    assert not all(torch.allclose(statistics[name], alone[name]) for name in means)


def test_dropout_in_replicas_repeats() -> None:
    case = Case(node=node("replicas", replicas=2), model="with_dropout")
    first, second = (flat(*train(case, case.job())) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dataclasses.replace(case, node=node("replicas", replicas=3))
    with pytest.raises(AssertionError):
        assert_same(flat(*train(other, other.job())), first)
