"""Whole runs through the public way, for comparing the weights they end with."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline import api
from paceline.config import load_config

_numbers = itertools.count()


def base_changes() -> tuple[str, ...]:
    """Settings of five updates, the last of them smaller."""
    return (
        "workload.model=mnist_cnn",
        "workload.model_options.dropout=0.0",
        "workload.data=synthetic",
        "workload.batch_size=24",
        "data.options.shape=[1, 28, 28]",
        "data.options.samples=100",
        "data.options.test_samples=20",
        "train.epochs=1",
        "train.deadline=300",  # of ranks that share two cores with other tests
        "local.strategy=sequential",
    )


def train_weights(folder: Path, *changes: str) -> dict[str, torch.Tensor]:
    """Train as `paceline train --set CHANGE ...` does, in real processes; the last weights.

    The base is five updates of mnist_cnn without dropout on made images, the last
    of them smaller (100 samples in batches of 24).
    """
    base = base_changes()
    path = folder / f"run-{next(_numbers)}"
    settings, directory, plan = api.begin(load_config(None, (*base, *changes)), run=path)
    result = api.run_training(
        api.TrainingStart(config=settings, run=directory, plan=plan, silent=True)
    )
    assert result.exit_code == 0
    assert result.summary["finished"]
    return load_file(path / "checkpoints" / "latest" / "model.safetensors")


def assert_same(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Every tensor of two sets agrees within the tolerance.

    Entries of the optimizer ("weight|entry") agree to 2% of their norm: a ReLU whose
    input is nothing but rounding passes one gradient more or less, which plain PyTorch
    shows too when it accumulates gradients over parts of a batch.
    """
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        if "|" in name:
            difference = float((actual[name] - tensor).float().norm())
            assert difference <= 0.02 * float(tensor.float().norm()), f"{name}: {difference}"
            continue
        torch.testing.assert_close(
            actual[name], tensor, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
