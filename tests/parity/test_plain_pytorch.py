"""Paceline's `sequential` against a bare PyTorch loop: the same weights, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_same, train_weights
from torch import nn
from torch.nn import functional as F

from paceline.data.base import DataRequest
from paceline.data.registry import open_dataset
from paceline.models import build

SAMPLES, BATCH, EPOCHS = 100, 24, 2
RATE = 0.01

# name of the case: (settings of Paceline, the optimizer of the bare loop, length of gradients)
Case = tuple[list[str], Callable[[list[nn.Parameter]], torch.optim.Optimizer], float | None]
CASES: dict[str, Case] = {
    "sgd with momentum": (
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.001"],
        lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=0.001),
        None,
    ),
    "clipped sgd with nesterov": (
        [
            "optimizer.name=sgd",
            "optimizer.momentum=0.9",
            "optimizer.nesterov=true",
            "optimizer.clip_norm=0.5",
        ],
        lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True),
        0.5,
    ),
    "adam": (["optimizer.name=adam"], lambda p: torch.optim.Adam(p, lr=RATE, fused=True), None),
    "adamw": (
        ["optimizer.name=adamw", "optimizer.weight_decay=0.05"],
        lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.05, fused=True),
        None,
    ),
}


def bare_loop(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clip: float | None
) -> dict[str, torch.Tensor]:
    """What anyone would write: a permutation per epoch, batches, backward, step."""
    dataset = open_dataset(
        DataRequest(
            name="synthetic",
            image_size=28,
            options={"shape": [1, 28, 28], "samples": SAMPLES, "test_samples": 20},
        )
    )
    every = np.arange(SAMPLES)
    images, labels = dataset.train.fetch(every, epoch=0, augment=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build("mnist_cnn", classes=10, channels=1, image_size=28, options={"dropout": 0.0})
    optimizer = make_optimizer(list(model.parameters()))
    updates = EPOCHS * -(-SAMPLES // BATCH)
    update = 0
    for epoch in range(EPOCHS):
        order = np.random.default_rng([0, epoch]).permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            part = torch.from_numpy(order[start : start + BATCH])
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - update / updates)
            optimizer.zero_grad()
            F.cross_entropy(model(images[part]), labels[part]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            update += 1
    dataset.close()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def fingerprint(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """A hash of every tensor's bits."""
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_bit_equal_weights(case: str, tmp_path: Path) -> None:
    settings, make_optimizer, clip = CASES[case]
    found = train_weights(
        tmp_path,
        *settings,
        f"optimizer.learning_rate={RATE}",
        "optimizer.schedule=linear",
        "optimizer.warmup=0",
        f"train.epochs={EPOCHS}",
        f"workload.batch_size={BATCH}",
        f"data.options.samples={SAMPLES}",
        "data.augment=false",
        "numerics.precision=fp32",
    )
    expected = bare_loop(make_optimizer, clip)
    assert fingerprint(found) == fingerprint(expected)


def test_one_process_that_shares_its_memory_with_nobody(tmp_path: Path) -> None:
    """`processes` with one process is a rank of its own with shared memory, like any number."""
    alone = train_weights(tmp_path, "local.strategy=processes", "local.processes=1")
    assert_same(alone, train_weights(tmp_path))
