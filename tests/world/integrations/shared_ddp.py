"""Plain DDP with unequal shares and a loop of one's own: SHARES (as 3,1) OUT."""

import contextlib
import sys

import torch
import torch.distributed as dist
from problem import data, net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.integrations.shares import Shares


def main(shares: list[float], out: str, accumulate: int = 2) -> None:
    """Two batches make an update; DDP adds up once for both."""
    torch.manual_seed(3 + dist.get_rank())  # every rank draws another order: the first one's counts
    model, weighed = net(), Shares(shares)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = weighed.divide(DataLoader(data(), batch_size=32, shuffle=True))
    for _ in range(2):
        for number, (inputs, targets) in enumerate(weighed.batches(loader)):
            last = number % accumulate == accumulate - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
                weighed.scale(loss).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main([float(word) for word in sys.argv[1].split(",")], sys.argv[2])
    dist.destroy_process_group()
