"""Torch's optimizers without torch's compiler: the same numbers, a lighter process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.training import lean

KINDS = ["SGD", "Adam", "AdamW"]


def trained(kind: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    options = {"momentum": 0.9, "nesterov": True} if "SGD" in repr(kind) else {}
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.01, fused=True, **options)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})
    for seed in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


@pytest.mark.parametrize("name", KINDS)
def test_same_weights_and_state_as_torch(name: str) -> None:
    ours = nn.Linear(6, 3)
    theirs = copy.deepcopy(ours)
    made = trained(getattr(lean, name), ours)
    stock = trained(getattr(torch.optim, name), theirs)
    assert isinstance(made, getattr(torch.optim, name))
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    mine, other = made.state_dict(), stock.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    for key, tensors in other["state"].items():
        for part, value in tensors.items():
            assert torch.equal(torch.as_tensor(mine["state"][key][part]), torch.as_tensor(value))
    made.load_state_dict(other)


@pytest.mark.parametrize("name", KINDS)
def test_closures_and_hooks_work(name: str) -> None:
    start = nn.Linear(2, 1)
    losses = {}
    for place in (lean, torch.optim):
        model = copy.deepcopy(start)
        seen: list[str] = []
        optimizer = getattr(place, name)(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("hook"))

        def loss(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                value: torch.Tensor = model(torch.ones(1, 2)).square().sum()
                value.backward()  # type: ignore[no-untyped-call]
            return value

        losses[place.__name__] = [optimizer.step(loss).item() for _ in range(5)]
        assert seen == ["hook"] * 5
    ours, theirs = losses.values()
    assert ours == theirs
    assert len(set(ours)) == 5


def test_training_does_not_import_the_compiler(tmp_path: Path) -> None:
    program = f"""
import sys, paceline
work = paceline.Workload(model="shallow_cnn", data="synthetic")
settings = {{"local.strategy": "threads", "local.threads": 1, "train.steps": 2,
            "data.options": {{"shape": [1, 28, 28], "samples": 256, "test_samples": 16}}}}
paceline.train(work, epochs=1, settings=settings, run={str(tmp_path / "run")!r}, silent=True)
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
