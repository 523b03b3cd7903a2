"""A script with Accelerate: SHARES (as 3,1) OUT [--accumulate N] [--norm]."""

from __future__ import annotations

import argparse
import os

import torch
from accelerate.utils import set_seed
from problem import data, net
from torch.utils.data import DataLoader

from paceline.backends import register_mpi
from paceline.integrations.accelerate import SharesAccelerator


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shares", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("out")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--backend", help="mpi4py, under mpiexec")
    options = parser.parse_args()
    if options.backend:
        register_mpi()
        torch.distributed.init_process_group(options.backend)
    set_seed(3)
    accelerator = SharesAccelerator(
        cpu=True, shares=options.shares, gradient_accumulation_steps=options.accumulate
    )
    size = 32 // int(os.environ.get("WORLD_SIZE", "1"))
    model = net(options.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    loader = accelerator.prepare_training_loader(
        DataLoader(data(), batch_size=size, shuffle=True, generator=generator)
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
