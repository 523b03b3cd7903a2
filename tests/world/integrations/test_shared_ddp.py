"""Unequal shares in a loop of one's own, with plain DDP: no other package is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from problem import data, net  # noqa: E402

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def plainly() -> torch.nn.Module:
    """What one process makes of the same batches, with nothing of Paceline."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for number, (inputs, targets) in enumerate(DataLoader(data(), batch_size=32, shuffle=True)):
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.timeout(900)
@pytest.mark.world_size(2)
def test_weights_are_those_of_one_process(run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli("run", "--nproc", "2", HERE / "shared_ddp.py", "3,1", "two.pt")
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "two.pt")
    for name, weights in plainly().state_dict().items():
        assert torch.allclose(weights, two[name], rtol=0, atol=1e-6), name
