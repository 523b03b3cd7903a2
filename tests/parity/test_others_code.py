"""What other people's code keeps or does on the way: trained as plain PyTorch does, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import DivergedError
from paceline.references import object_name

REPLICAS = {"local.strategy": "replicas", "local.replicas": 2}
COUNT = {"steps": 0}
BUILT: list[torch.Tensor] = []


def data() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(40) % 2
    return TensorDataset(inputs[:32], targets[:32]), TensorDataset(inputs[32:], targets[32:])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs.flatten(1))))


class Thawing(Net):
    """Trains its first layer from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.first.requires_grad_(int(self.seen) > 2)
        return super().forward(inputs)


class Held(Net):
    """Calls its last layer through a function that holds it, as minGPT's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        last = self.last
        self.head = lambda inputs: last(inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(inputs.flatten(1))))


class Tracked(nn.Module):
    """Keeps the statistics of the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.last = nn.Linear(12, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(inputs).flatten(1))


class OwnTrain(Net):
    def train(self, positive: Any, negative: Any) -> None:  # type: ignore[override]
        raise AssertionError


class Short(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)[1:]


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(2, 2))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - self.centers[targets]).pow(2).mean()


class WithoutRate(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None


def counting_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Grows heavier from batch to batch, by a number beside the model."""
    if model.training:
        COUNT["steps"] += 1
    return functional.cross_entropy(model(batch[0]), batch[1]) * (1 + COUNT["steps"])


def perceptual_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Draws a fixed projection when it is first called."""
    if not BUILT:
        BUILT.append(torch.randn(2, 5, generator=torch.Generator().manual_seed(3)))
    outputs = model(batch[0])
    return (outputs @ BUILT[0]).pow(2).mean() + functional.cross_entropy(outputs, batch[1])


def balanced_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """With a small term for classes that a batch uses unequally, as mixtures of experts have."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs, batch[1]) + 1e-3 * balance(outputs)


def balanced_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets) + 1e-3 * balance(outputs)


def balance(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(dim=1).mean(dim=0).pow(2).sum()


def single_precise_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Takes no float64, in which its parts would be compared."""
    assert batch[0].dtype is torch.float32
    return functional.cross_entropy(model(batch[0]), batch[1])


class Critic(nn.Module):
    """Whose spectral norms take a step of the power iteration in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), spectral_norm(nn.Linear(12, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def penalty_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """A critic's, with the penalty on its gradient."""
    inputs = batch[0].clone().requires_grad_()
    scores = model(inputs)
    (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return scores.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()


def trained(folder: Path, settings: dict[str, Any], **parts: Any) -> paceline.Result:
    work = {"model": Net, "data": data(), "optimizer": sgd, "batch_size": 8, **parts}
    return paceline.train(
        paceline.Workload(**work), epochs=2, run=folder, silent=True, settings=settings
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_proof_leaves_nothing_behind_that_was_drawn_without_chance(tmp_path: Path) -> None:
    BUILT.clear()
    trained(tmp_path / "run", REPLICAS, step=perceptual_step)
    assert torch.equal(BUILT[0], torch.randn(2, 5, generator=torch.Generator().manual_seed(3)))


def test_a_step_that_counts_beside_the_model_is_refused_by_threads_that_share_it(
    tmp_path: Path,
) -> None:
    COUNT["steps"] = 5
    with pytest.raises(paceline.UserError, match="COUNT"):
        trained(tmp_path / "run", REPLICAS, step=counting_step)
    assert COUNT["steps"] == 5
    assert not (tmp_path / "run").exists()


REFUSED = {
    "statistics of samples": (
        {"model": Tracked}, REPLICAS, "other statistics for norm.running_mean",
    ),
    "a small term over the batch in a step": (
        {"step": balanced_step}, REPLICAS, "not the mean of its parts' losses",
    ),
    "a small term over the batch in a loss": (
        {"loss": balanced_loss}, REPLICAS, "not a mean over samples",
    ),
    "layers held by functions": (
        {"model": Held}, REPLICAS, "calls the layer of last.weight through something",
    ),
    "weights trained later": (
        {"model": Thawing}, {"local.strategy": "sequential"}, "begins to train first.weight",
    ),
    "a method train": (
        {"model": OwnTrain}, {"local.strategy": "sequential"}, "method train of its own",
    ),
    "a loss with weights": (
        {"loss": Centers()}, {"local.strategy": "sequential"}, r"weights of its own \(centers\)",
    ),
    "an optimizer without a rate": (
        {"optimizer": WithoutRate}, {"local.strategy": "sequential"}, "has lr = None",
    ),
    "a step of the model alone": (
        {"step": lambda model: 0}, {}, r"takes \(model\), but is called with \(model, batch\)",
    ),
    "a loss of the outputs alone": (
        {"loss": lambda outputs: 0}, {}, r"takes \(outputs\), but is called with \(outputs, ",
    ),
    "a metric of the outputs alone": (
        {"metrics": {"five": lambda outputs: 0}}, {}, "metric 'five' takes",
    ),
    "no data": ({"data": None}, {}, "data = None"),
    "nothing to train": (
        {"model": lambda: Net().requires_grad_(False)}, {}, "only frozen weights",
    ),
    "a target too many": (
        {"data": (TensorDataset(torch.rand(8, 3, 4), torch.arange(8)), data()[1])},
        {"local.strategy": "sequential"}, "targets from 0 to 7 for outputs of 2 classes",
    ),
    "fewer outputs than samples": (
        {"model": Short}, {"local.strategy": "sequential"}, "one output per sample",
    ),
    "a metric that is none": ({"metrics": {"five": 5}}, {}, "metric 'five' is a int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_trained_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    parts, settings, said = REFUSED[name]
    with pytest.raises(paceline.UserError, match=said):
        trained(tmp_path / "run", settings, **parts)
    if name != "weights trained later":  # which had begun
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: paceline.train(Net), "give paceline.Workload"),  # type: ignore[arg-type]
        (lambda: paceline.train(settings=["train.epochs"]), "settings is a list"),  # type: ignore[arg-type]
        (lambda: paceline.train(run=5), "run is a int"),  # type: ignore[arg-type]
        (
            lambda: paceline.train(paceline.Workload(metrics=[abs])),  # type: ignore[arg-type]
            "metrics is a list",
        ),
        (lambda: paceline.evaluate(5), "was given a int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_another_type_is_refused(call: Any, said: str) -> None:
    with pytest.raises(paceline.UserError, match=said):
        call()


def test_many_items_are_not_all_named() -> None:
    assert object_name([1] * 20) == "object:(builtins.int(), builtins.int(), ... 20 in all)"


def test_a_loss_with_frozen_weights_is_taken(tmp_path: Path) -> None:
    loss = Centers().requires_grad_(False)
    assert trained(tmp_path / "run", {"local.strategy": "sequential"}, loss=loss).exit_code == 0


@pytest.mark.parametrize(
    "parts",
    [{"step": single_precise_step}, {"step": penalty_step, "model": Critic}],
    ids=["takes no float64", "changes with every call"],
)
def test_a_step_that_is_a_mean_is_divided(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert trained(tmp_path / "run", REPLICAS, **parts).exit_code == 0


def test_a_divergence_names_a_remedy_that_has_an_effect(tmp_path: Path) -> None:
    def far(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e30)

    with pytest.raises(DivergedError, match="lower the learning rate that your optimizer sets"):
        trained(tmp_path / "run", {"local.strategy": "sequential"}, optimizer=far)
