"""Weights and gradients of other kinds: right, or refused in a sentence, in every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import assert_same, train_weights

from paceline.errors import StrategyError

MODELS = Path(__file__).with_name("typed_models.py")
PROCESSES = ("local.strategy=processes", "local.processes=2", "local.threads=1")
SGD = ("optimizer.name=sgd", "optimizer.learning_rate=0.1")
MOMENTUM = (*SGD, "optimizer.momentum=0.9", "optimizer.weight_decay=0.1")


def weights(folder: Path, model: str, *changes: str) -> dict[str, torch.Tensor]:
    named = f"workload.model={MODELS}:{model}"
    return train_weights(folder, named, "workload.model_options={}", *changes)


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ("optimizer.name=adam",)], ids=["sgd", "adam"])
def test_types(kind: str, optimizer: tuple[str, ...], tmp_path: Path) -> None:
    changes = (*optimizer, f"workload.model_options.kind={kind}")
    alone = weights(tmp_path, "Typed", *changes)
    torch.manual_seed(0)
    replicas = weights(tmp_path, "Typed", *changes, "local.strategy=replicas", "local.replicas=2")
    loose = 2e-2 if kind == "bfloat16" else 1e-4
    assert_same(replicas, alone, rtol=loose, atol=loose / 10)
    assert alone["weight"].dtype is getattr(torch, kind)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("Typed", "share fp32 weights on the CPU: use local.strategy = 'threads'"),
        ("Sparse", "sparse, but ranks of one node add up dense ones"),
    ],
)
def test_ranks_that_share_weights_refuse_others(model: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=sentence):
        weights(tmp_path, model, *SGD, *PROCESSES)


def test_sparse_gradients(tmp_path: Path) -> None:
    changes = (*SGD, "optimizer.momentum=0.9")
    alone = weights(tmp_path, "Sparse", *changes)
    replicas = weights(tmp_path, "Sparse", *changes, "local.strategy=replicas", "local.replicas=2")
    assert_same(replicas, alone)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MOMENTUM, ("optimizer.name=adam",)], ids=["sgd", "adam"])
def test_a_gradient_that_comes_late(optimizer: tuple[str, ...], tmp_path: Path) -> None:
    """A weight without a gradient is left alone: no decay, and no update counted."""
    changes = (*optimizer, "optimizer.weight_decay=0.1")
    alone = weights(tmp_path, "Late", *changes)
    assert_same(weights(tmp_path, "Late", *changes, *PROCESSES), alone)
