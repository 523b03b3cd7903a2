"""A model and data of one's own, trained from Python.

python examples/own_model.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class TwoMoons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


def moons(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    side = torch.randint(2, (samples,), generator=generator)
    angle = torch.rand(samples, generator=generator) * torch.pi
    sign = 1.0 - 2.0 * side
    points = torch.stack([sign * angle.cos() + side, sign * (angle.sin() - 0.25)], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(samples, 2, generator=generator), side)


if __name__ == "__main__":
    result = paceline.train(
        paceline.Workload(
            model=TwoMoons,
            data=(moons(4000, 0), moons(1000, 1)),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            batch_size=100,
        ),
        epochs=3,
    )
    print(f"accuracy {result.accuracy:.1%}, run directory {result.run}")
    model = result.load_model(TwoMoons())
