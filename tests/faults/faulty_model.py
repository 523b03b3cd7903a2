"""A model that fails on one rank at one update: `faulty_model.py:build`, steered by its options."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


class Faulty(nn.Module):
    def __init__(self, fault: str, rank: int, update: int, slow_until: str) -> None:
        super().__init__()
        self.slow_until = slow_until
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
        self.fault, self.update = fault, update
        self.seen = itertools.count(1)  # of this process: a number would go along from leg to leg
        self.mine = os.environ.get("PACELINE_RANK", "0") == str(rank)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.slow_until and not Path(self.slow_until).exists():
                time.sleep(0.1)
            if next(self.seen) == self.update and self.mine:
                self.fail()
        return self.layers(images)

    def fail(self) -> None:
        if self.slow_until:
            Path(self.slow_until).touch()
        if self.fault == "raise":
            raise ValueError("the sample of doom")
        if self.fault == "ended":  # as `timeout` and systemd end all processes of a training
            os.kill(os.getppid(), signal.SIGTERM)
            raise ValueError("this process is to end, too")
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "memory":
            torch.empty(2**47)  # 512 TiB: more than an address has room for
        if self.fault == "hang":
            time.sleep(3600)


def build(fault: str = "raise", rank: int = 1, update: int = 3, slow_until: str = "") -> nn.Module:
    """`slow_until`: a file that whoever fails leaves; updates are long as long as it is missing."""
    return Faulty(fault, rank, update, slow_until)
