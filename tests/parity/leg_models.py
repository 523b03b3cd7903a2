"""Models whose computing is sleeping, so that two nodes are faster than one on any machine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.local.cores import quota_cores

SECONDS = 0.006
"""For each sample of a forward pass."""


class Paced(nn.Module):
    """Two layers; with `centred`, a sample's output depends on the other samples."""

    def __init__(self, *, centred: bool = False) -> None:
        super().__init__()
        self.centred = centred
        self.first = nn.Linear(784, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(SECONDS * len(images))
        hidden = self.first(images.flatten(1))
        if self.centred:
            hidden = hidden - hidden.mean(dim=0)
        return self.head(torch.relu(hidden))


def paced() -> nn.Module:
    """Can be trained in every way."""
    return Paced()


class Held(Paced):
    """Slow while a file is there, so that a test can act in the middle; then fast."""

    def __init__(self, hold: str = "") -> None:
        super().__init__()
        self.hold = Path(hold)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.hold.exists():
            time.sleep(5 * SECONDS * len(images))
        hidden = self.first(images.flatten(1))
        return self.head(torch.relu(hidden))


class Killed(Paced):
    """Once, the second rank of the second node is killed in the middle of a leg."""

    def __init__(self, flag: str = "") -> None:
        super().__init__()
        self.flag, self.seen = Path(flag), 0

    def forward(self, images: Tensor) -> Tensor:
        place = (os.environ.get("PACELINE_NODE"), os.environ.get("PACELINE_LOCAL_RANK"))
        self.seen += self.training and self.flag.name != "" and place == ("1", "1")
        if self.seen > 5 and not self.flag.exists():  # no copy is proved for so long
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


class PacedByCores(Paced):
    """Computes as long as the cores that its host has at the moment would."""

    def forward(self, images: Tensor) -> Tensor:
        # Long beside whatever a busy machine does to an exchange.
        time.sleep(10 * SECONDS * len(images) / (quota_cores() or 1.0))
        return super().forward(images)


def paced_by_cores() -> nn.Module:
    """Four times slower on a host whose cores are cut to a quarter, however busy the machine."""
    return PacedByCores()


def elsewhere_missing() -> nn.Module:
    """Cannot be built on the second node."""
    if os.environ.get("PACELINE_NODE") == "1":
        raise FileNotFoundError("no such file on this host")
    return Paced()


def centred() -> nn.Module:
    """Cannot be trained on parts of a batch."""
    return Paced(centred=True)
