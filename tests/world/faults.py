"""Ranks that do not come, end, raise or call something else."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def absent() -> dict[str, str]:
    """The last rank sleeps through everything; the others collect what they are told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group(list(range(size)), timeout=timedelta(seconds=1))
    if rank == size - 1:
        time.sleep(3600)
    tensor = torch.ones(1000)
    # Nothing is queued in this group, so that the caller runs the collective itself.
    inline = {"barrier": _message(lambda: dist.barrier(group=other))}
    found = inline | {"recv": _message(lambda: dist.recv(tensor, size - 1))}
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    found["async all_reduce"] = _message(work.wait)
    found["future"] = _message(future.wait)
    found["afterwards"] = _message(lambda: dist.broadcast(tensor, 0))
    return found


def absent_in_backward() -> None:
    """DDP's own C++ waits for the gradients of a rank that has stopped."""
    network = DistributedDataParallel(nn.Linear(4, 4))
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3600)
    network(torch.ones(2, 4)).sum().backward()


def killed() -> None:
    """One rank is gone in the middle of a series of collectives."""
    for step in range(10_000):
        if step == 50 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))
    time.sleep(3600)


def raises() -> None:
    """One rank has a mistake in its program while the others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("a mistake of this rank alone")
    dist.all_reduce(torch.ones(10))


def mismatch() -> dict[str, str]:
    """Two ranks call different collectives."""
    if dist.get_rank() == 0:
        return {"0": _message(lambda: dist.all_reduce(torch.ones(10)))}
    return {"1": _message(lambda: dist.broadcast(torch.ones(10), 0))}
