"""`pipeline` and `hybrid` end with the weights of `sequential` on the same global batches.

Tolerance: rtol 1e-4, atol 1e-5 in fp32, for weights and optimizer state after five
updates, some of a size that M does not divide. Only the order of additions differs.
Adam divides a gradient by its own size, so that a gradient of nothing but rounding
moves a weight by up to the learning rate of 0.001: there atol is 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import Case, reference, run_cases, sequential

# isort: split
from matrix import UNEVEN
from runs import assert_same, train_weights

Weights = dict[str, torch.Tensor]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def compiler_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch sets this variable at the first step of an optimizer, and leaves it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def node(stages: int, micro_batches: int = 1, **more: object) -> dict[str, object]:
    settings: dict[str, object] = {"strategy": "pipeline", "stages": stages}
    return settings | {"micro_batches": micro_batches} | more


TWO_STAGES = [
    Case(node=node(2, 1), optimizer="adam"),
    Case(node=node(2, 2)),
    Case(node=node(2, 2, schedule="1f1b"), optimizer="adam"),
    Case(node=node(2, 4), optimizer="adam"),
    Case(node=node(2, 4, schedule="1f1b")),
    Case(node=node(2, 4), clip_norm=0.05),
    Case(node=node(2, 4), memory_format="channels_last"),
    Case(node=node(2, 2), model="build"),
    Case(node=node(2, 2, split_at=("third",)), model="build"),
    Case(node=node(2, 2, split_at=("relu",)), model="build"),
    Case(node=node(2, 2, schedule="1f1b"), model="Conditional", sizes=(16, 12)),
    Case(node=node(2, 2), model="sequential_of_opaque", optimizer="adam"),
    # One micro-batch: BatchNorm sees the whole batch, as in `sequential`.
    Case(node=node(2, 1), model="normalised"),
]
THREE_STAGES = [
    Case(node=node(3, 2), optimizer="adam"),
    Case(node=node(3, 4, schedule="1f1b"), clip_norm=0.05),
    # The stem's output is needed by the last stage: it travels through the second.
    Case(node=node(3, 2, split_at=("second", "third")), model="build"),
    Case(node=node(3, 2, split_at=("second", "third"), schedule="1f1b"), model="build"),
]
_TWO_ROWS = {"strategy": "hybrid", "replicas": 2}
ROWS = [
    Case(node=node(2, 2, **_TWO_ROWS)),
    Case(node=node(2, 4, schedule="1f1b", **_TWO_ROWS), optimizer="adam", clip_norm=0.05),
    Case(node=node(2, 2, **_TWO_ROWS), model="build"),
    # The last batch has one sample: the second row has nothing to do.
    Case(node=node(2, 2, **_TWO_ROWS), sizes=(8, 8, 1)),
    Case(node=node(2, 1, **_TWO_ROWS), model="normalised", sizes=UNEVEN),
    Case(node=node(2, 1, **_TWO_ROWS), model="normalised", optimizer="adam", clip_norm=0.05),
]
BF16 = [
    Case(node=node(2, 1), precision="bf16"),
    Case(node=node(2, 4, schedule="1f1b"), precision="bf16", memory_format="channels_last"),
]
RESNET = Case(node=node(2, 4), model="resnet18", sizes=(8, 8), local_batch_norm=True)


def compare(cases: list[Case], found: list[Weights]) -> None:
    for case, weights in zip(cases, found, strict=True):
        atol = 1e-4 if case.optimizer == "adam" else 1e-5
        try:
            assert_same(weights, reference(case), atol=atol)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.slow
def test_two_stages(tmp_path: Path) -> None:
    plain = [sequential(case) for case in BF16]
    found = run_cases(tmp_path, [*TWO_STAGES, *BF16, *plain, RESNET])
    count = len(TWO_STAGES)
    compare(TWO_STAGES, found[:count])
    precise = found[count : count + len(BF16)]
    for weights, expected in zip(precise, found[count + len(BF16) :], strict=False):
        parameters = {n: t for n, t in expected.items() if "|" not in n}
        assert_same({n: weights[n] for n in parameters}, parameters, rtol=0.01, atol=5e-3)
    # Where that is allowed, every micro-batch has BatchNorm statistics of its own, so the running
    # ones move four times an update; those of both stages reach the rank that saves them.
    resnet = found[-1]
    assert int(resnet["bn1.num_batches_tracked"]) == 4 * len(RESNET.sizes)
    assert int(resnet["layer4.1.bn2.num_batches_tracked"]) == 4 * len(RESNET.sizes)
    assert all(bool(tensor.isfinite().all()) for tensor in resnet.values())


@pytest.mark.slow
def test_three_stages(tmp_path: Path) -> None:
    compare(THREE_STAGES, run_cases(tmp_path, THREE_STAGES))


@pytest.mark.slow
def test_rows_of_stages(tmp_path: Path) -> None:
    compare(ROWS, run_cases(tmp_path, ROWS))


@pytest.mark.slow
def test_whole_run(tmp_path: Path) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.learning_rate=0.05", "optimizer.momentum=0.9")
    expected = train_weights(tmp_path, *sgd)
    found = train_weights(tmp_path, *sgd, "local.strategy=hybrid", "local.stages=2")
    assert_same(found, expected)


@pytest.mark.slow
def test_model_from_a_file_outside_the_package(tmp_path: Path) -> None:
    own = Path(__file__).with_name("own_models.py")
    changes = (f"workload.model={own}:build", "workload.model_options={}")
    expected = train_weights(tmp_path, *changes)
    found = train_weights(tmp_path, *changes, "local.strategy=pipeline")
    assert_same(found, expected, atol=1e-4)
