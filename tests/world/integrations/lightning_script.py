"""A Lightning script: SHARES (as 3,1) OUT, and what `--help` lists."""

from __future__ import annotations

import argparse
import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from problem import data, net

from paceline.integrations.lightning import SharesStrategy


class Module(LightningModule):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.net = net(norm)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shares", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--backend")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--own-sampler", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    loader = torch.utils.data.DataLoader(
        data(), batch_size=32, shuffle=True, num_workers=options.workers
    )
    torch.manual_seed(5)
    module = Module(options.norm)
    trainer = Trainer(
        strategy=SharesStrategy(options.shares, process_group_backend=options.backend),
        accelerator="cpu",
        # Under mpiexec nobody sets it.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", len(options.shares))),
        use_distributed_sampler=options.own_sampler,
        accumulate_grad_batches=options.accumulate,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        torch.save(module.net.state_dict(), options.out)


if __name__ == "__main__":
    main()
