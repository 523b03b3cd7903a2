"""Every node begins with what the first one has, however each has built its model.

Weights, buffers and frozen weights are drawn without a seed, so that only nodes that have taken
over the first one's end with the weights that plain PyTorch makes of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from node_runs import state, train_apart, train_nodes
from node_series import Run, train_series
from runs import assert_same, base_changes, train_weights
from unseeded_model import Unseeded

from paceline import api
from paceline.config import load_config
from paceline.data.sampler import GlobalSampler
from paceline.schema import NodePlan
from paceline.training.parts import make_parts

MODEL = (
    f"workload.model={Path(__file__).with_name('unseeded_model.py')}:build",
    "workload.model_options={}",
    "exchange.rebalance=false",
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.05",
    "optimizer.momentum=0.0",
    "optimizer.schedule=constant",
    "optimizer.warmup=0.0",
)
STILL = ("optimizer.learning_rate=1e-30",)
"""Weights stay where they began: mixing changes them only if others began elsewhere."""
ONE, TWO = NodePlan(), NodePlan(strategy="processes", processes=2)


def kind(name: str, *changes: str) -> tuple[str, ...]:
    return (*MODEL, f"exchange.kind={name}", *changes)


def trained_by_hand(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same updates in plain PyTorch, from what the run says that it began with."""
    config = api.resolve(load_config(None, (*base_changes(), *MODEL)))
    parts = make_parts(config, None)
    sampler = GlobalSampler(samples=100, batch_size=24, seed=config.seed)
    model = Unseeded()
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(found["beginning"].clone(), list(model.parameters()))
        model.mask.copy_(found["mask"])
        model.beginning.copy_(found["beginning"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(sampler.steps_per_epoch):
        inputs, targets = parts.dataset.train.fetch(sampler.batch(0, step), epoch=0, augment=True)
        optimizer.zero_grad()
        parts.loss(model(inputs), targets).backward()
        optimizer.step()
    parts.dataset.close()
    return dict(model.state_dict())


EXACT = {
    "allreduce": Run("allreduce", kind("allreduce", "exchange.partition=none"), [ONE, ONE]),
    "partition": Run("allreduce", kind("allreduce"), [ONE, ONE], split=True),
    "ring": Run("ring", kind("ring"), [TWO, ONE]),
    "averaging": Run("averaging", kind("averaging"), [ONE, TWO]),
    "servers": Run(
        "parameter_server", kind("parameter_server", "exchange.servers=2"), [ONE, ONE, ONE, ONE]
    ),
}
INEXACT = {
    "hogwild": Run("hogwild", kind("hogwild", "exchange.mix_every=1", *STILL), [ONE] * 3),
    "async": Run(
        "parameter_server", kind("parameter_server", "exchange.mode=async", *STILL), [ONE] * 4
    ),
    "server groups": Run(
        "parameter_server",
        kind(
            "parameter_server",
            "exchange.mode=async",
            "exchange.servers=2",
            "exchange.server_groups=2",
            "exchange.mix_every=1",
            *STILL,
        ),
        [ONE] * 4,
    ),
}


def check(found: dict[str, torch.Tensor], *, moved: bool) -> None:
    weights = {name: tensor for name, tensor in found.items() if "|" not in name}
    if moved:
        assert_same(weights, trained_by_hand(weights))
        return
    names = [name for name, _ in Unseeded().named_parameters()]
    last = torch.cat([weights[name].flatten() for name in names])
    torch.testing.assert_close(last, weights["beginning"], rtol=0.0, atol=1e-6)


@pytest.mark.slow
def test_over_gloo(tmp_path: Path) -> None:
    runs = EXACT | INEXACT
    for name, found in zip(runs, train_series(tmp_path, list(runs.values())), strict=True):
        try:
            check(found, moved=name in EXACT)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.slow
@pytest.mark.mpi
def test_over_mpi(tmp_path: Path) -> None:
    four = [ONE] * 4
    runs = [
        Run("allreduce", kind("allreduce"), four, split=True),
        Run("ring", kind("ring"), four),
        Run("averaging", kind("averaging"), four),
        EXACT["servers"],
        INEXACT["async"],
    ]
    found = train_series(tmp_path, runs, backend="mpi4py")
    for number, weights in enumerate(found):
        check(weights, moved=number < 4)


def test_ranks_of_one_node(tmp_path: Path) -> None:
    train_weights(tmp_path, *MODEL, "local.strategy=processes", "local.processes=2")
    check(state(next(tmp_path.iterdir())), moved=True)


RESUMED = {
    "allreduce": ("allreduce", [ONE, TWO]),
    "servers": ("parameter_server", [ONE, ONE, ONE]),
    "hogwild": ("hogwild", [ONE, ONE]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_that_only_the_first_node_has(name: str, alone, tmp_path: Path) -> None:
    """Without shared files: one node has no checkpoint, or one of another training."""
    exchange, nodes = RESUMED[name]
    sgd = (
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "optimizer.schedule=constant",
        "optimizer.warmup=0.0",
        "data.options.samples=60",
        "exchange.rebalance=false",
        f"exchange.kind={exchange}",
    )
    still = STILL if name == "hogwild" else ("optimizer.learning_rate=0.05",)
    first = tmp_path / "first"
    before = train_nodes(first, [ONE], *sgd, *still)
    older = tmp_path / "older"
    train_nodes(older, [ONE], *sgd, "optimizer.learning_rate=0.3", "train.epochs=2", "seed=9")
    folders = [tmp_path / f"node-{number}" for number in range(len(nodes))]
    for folder in folders:
        folder.mkdir()
    shutil.copytree(first, folders[0], symlinks=True, dirs_exist_ok=True)
    shutil.copytree(older / "checkpoints", folders[1] / "checkpoints", symlinks=True)
    found = train_apart(folders, nodes, *sgd, *still, "train.epochs=2", exchange=exchange)
    if name == "hogwild":
        weights = {key: tensor for key, tensor in before.items() if "|" not in key}
        assert_same({key: found[key] for key in weights}, weights)
    else:
        assert_same(found, alone((*sgd[:-1], *still, "train.epochs=2")))


SHUFFLED = '''
import os, torch
from torch import nn

class Shuffled(nn.Module):
    """Layers in an order that differs from process to process, as that of a set does."""
    def __init__(self):
        super().__init__()
        names = ["first", "second"]
        for name in reversed(names) if os.environ.get("PACELINE_NODE") == "1" else names:
            setattr(self, name, nn.Linear(784, 784))
        self.head = nn.Linear(784, 10)
    def forward(self, images):
        return self.head(torch.relu(self.second(torch.relu(self.first(images.flatten(1))))))
'''


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["allreduce", "parameter_server"])
def test_another_order_of_parameters_is_refused(exchange: str, tmp_path: Path) -> None:
    model = tmp_path / "shuffled.py"
    model.write_text(SHUFFLED)
    changes = (f"workload.model={model}:Shuffled", "workload.model_options={}")
    with pytest.raises(AssertionError, match="the model on host-1 has other parameters or buffers"):
        train_nodes(tmp_path / "run", [ONE] * 3, *changes, exchange=exchange)
