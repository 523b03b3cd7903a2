"""Regression with two inputs: the price of a drive from where it goes and when.

python examples/two_inputs.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


class Price(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hours = nn.Embedding(24, 8)
        self.layers = nn.Sequential(nn.Linear(4 + 8, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, places: torch.Tensor, hour: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([places, self.hours(hour)], dim=1)).squeeze(1)


def drives(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(count, 4, generator=generator)
    hour = torch.randint(24, (count,), generator=generator)
    distance = (places[:, :2] - places[:, 2:]).norm(dim=1)
    return TensorDataset(places, hour, 2.0 + 9.0 * distance * (1.0 + 0.5 * (hour % 12 == 8)))


def step(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, object]:
    places, hour, price = batch
    guess = model(places, hour)
    return {
        "loss": functional.mse_loss(guess, price),
        "mae": (guess - price).abs(),
    }


if __name__ == "__main__":
    result = paceline.train(
        paceline.Workload(
            model=Price, data=(drives(4000, 0), drives(1000, 1)), step=step, batch_size=100
        ),
        epochs=5,
        monitor="mae:min",
        settings={"optimizer.learning_rate": 0.01},
    )
    print(f"off by {result.summary['best_value']:.2f} on average")
