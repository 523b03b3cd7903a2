"""A Lightning module on all cores, its batches divided by shares, the weights those of one process.

pip install 'paceline[lightning]'
paceline run examples/lightning_module.py
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import SharesStrategy


class Spirals(LightningModule):
    """Tells two spirals apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        points, which = batch
        return functional.cross_entropy(self.layers(points), which)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def spirals(count: int) -> TensorDataset:
    which = torch.arange(count) % 2
    turn = torch.rand(count) * 6
    angle = turn + which * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn.unsqueeze(1) / 6
    return TensorDataset(points + 0.02 * torch.randn(count, 2), which)


def main() -> None:
    seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data, module = spirals(2000), Spirals()
    trainer = Trainer(
        # The batch of 100 is the global one. Shares by hosts.toml, or as SharesStrategy([3, 1]).
        strategy=SharesStrategy() if ranks > 1 else "auto",
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        use_distributed_sampler=False,
        max_epochs=15,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=100, shuffle=True))
    if trainer.is_global_zero:
        points, which = data.tensors
        with torch.no_grad():
            right = (module.layers(points).argmax(dim=1) == which).float().mean()
        print(f"{ranks} ranks: {right:.1%} of the points are on the right spiral")


if __name__ == "__main__":
    main()
