"""A plain script of torch.distributed that knows nothing of Paceline: OUT [--steps N]."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    inputs, targets = torch.randn(options.steps, 32, 8), torch.randn(options.steps, 32, 2)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(options.steps):
        part = slice(rank * 32 // ranks, (rank + 1) * 32 // ranks)
        loss = torch.nn.functional.mse_loss(wrapped(inputs[step][part]), targets[step][part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} on {torch.get_num_threads()} of {len(os.sched_getaffinity(0))}")
    if rank == 0:
        torch.save(model.state_dict(), options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
