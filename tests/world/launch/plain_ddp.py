"""A plain script of torch.distributed that knows nothing of Paceline: OUT [--steps N]."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 32


def problem(steps: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A model and its batches, the same everywhere."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    return model, torch.randn(steps, BATCH, 8), torch.randn(steps, BATCH, 2)


def train(model: torch.nn.Module, steps: int, part: slice = slice(None)) -> None:
    """Plain SGD on a part of every batch."""
    _, inputs, targets = problem(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(model(inputs[step][part]), targets[step][part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, _, _ = problem(options.steps)
    part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    train(DistributedDataParallel(model), options.steps, part)
    print(f"{torch.get_num_threads()} threads on {len(os.sched_getaffinity(0))} cores")
    if rank == 0:
        torch.save(model.state_dict(), options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
