"""A small model that takes as long as a test wants, so that the test can act in the middle.

While a file `pace` lies beside it, each forward pass of training takes as many seconds more as
stand in there, and a file `asleep` with the same number says that one has begun. While a file
`hold` lies there, evaluations stand still, and a file `held-PID` says that one does.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent


class Paced(torch.nn.Module):
    def __init__(self, channels: int = 1, image_size: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(channels * image_size**2, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, classes),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pace = HERE / "pace"
        if self.training and pace.exists():
            seconds = pace.read_text()
            (HERE / "asleep").write_text(seconds)
            time.sleep(float(seconds or 0))
        end = time.monotonic() + 300
        while not self.training and (HERE / "hold").exists() and time.monotonic() < end:
            (HERE / f"held-{os.getpid()}").touch()
            time.sleep(0.01)
        result: torch.Tensor = self.layers(inputs)
        return result


def put_into(folder: Path) -> str:
    """A copy in a folder of its own, where `pace` can be set; what `workload.model` is then."""
    shutil.copyfile(__file__, folder / "paced.py")
    return f"{folder / 'paced.py'}:Paced"
