"""A GAN in a loop of one's own: points on a ring, two models, two optimizers.

python examples/gan.py, or on all cores: paceline run examples/gan.py
"""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as score
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 30


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )  # fmt: skip


torch.manual_seed(0)
angle = 2 * math.pi * torch.rand(4096)
ring = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(4096, 2)
pace = paceline.Pace(monitor="off_the_ring:min")
maker, judge = net(8, 2), net(2, 1)
maker, judge, of_maker, of_judge, loader = pace.prepare(
    maker,
    judge,
    torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    DataLoader(TensorDataset(ring), batch_size=128, shuffle=True),
)
for epoch in pace.epochs(EPOCHS):
    for (real,) in loader:
        ones = torch.ones(len(real), 1)
        made = maker(torch.randn(len(real), 8))

        of_judge.zero_grad()
        pace.backward(score(judge(real), ones))
        pace.backward(score(judge(made.detach()), 0 * ones))
        of_judge.step()

        of_maker.zero_grad()
        pace.backward(score(judge(made), ones))
        of_maker.step()
        off = (made.detach().norm(dim=1) - 1).abs()
        pace.log(off_the_ring=off)
    pace.print(f"epoch {epoch + 1}: {pace.mean(off):.3f} off the ring")
