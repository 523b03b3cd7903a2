"""Segmentation: which pixels belong to a disc; pixels at its edge are ignored.

python examples/segmentation.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline

IGNORED = -100


def discs(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    middle = 8 + 16 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 3 + 4 * torch.rand(count, 1, 1, generator=generator)
    rows = torch.arange(32.0).view(1, 32, 1)
    distance = ((rows - middle[:, 0]) ** 2 + (rows.mT - middle[:, 1]) ** 2).sqrt() - radius
    pixels = (distance < 0).float() + 0.5 * torch.randn(count, 32, 32, generator=generator)
    classes = torch.where(distance.abs() < 0.5, IGNORED, (distance < 0).long())
    return TensorDataset(pixels.unsqueeze(1), classes)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(),
        nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(),
        nn.Conv2d(16, 2, 1),
    )  # fmt: skip


def step(network: nn.Module, batch: list[torch.Tensor]) -> dict[str, object]:
    pixels, classes = batch
    scores, counts = network(pixels), classes != IGNORED
    return {
        "loss": functional.cross_entropy(scores, classes, ignore_index=IGNORED),
        "weight": counts.sum(),
        "pixels": (scores.argmax(dim=1) == classes)[counts].float(),
    }


if __name__ == "__main__":
    result = paceline.train(
        paceline.Workload(
            model=model, data=(discs(800, 0), discs(200, 1)), step=step, batch_size=32
        ),
        epochs=2,
        monitor="pixels:max",
        settings={"optimizer.learning_rate": 0.005},
    )
    print(f"{result.summary['best_value']:.1%} of the pixels are right")
