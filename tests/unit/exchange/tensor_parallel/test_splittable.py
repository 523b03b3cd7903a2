"""Layers that something else knows stay whole, and the cause is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cost.split import Division
from paceline.errors import ConfigError, UnsupportedError
from paceline.exchange.tensor_parallel.chains import find_chains
from paceline.exchange.tensor_parallel.splittable import SampleTrial, look_at, retire
from paceline.plan.partition import choose_partition
from paceline.schema import ExchangeSettings

sys.path.insert(0, str(Path(__file__).parents[3] / "parity"))
import tangled_models

Loss = Callable[[Tensor, Tensor], Tensor]


def trial(loss: Loss = F.cross_entropy) -> SampleTrial:
    return SampleTrial(inputs=torch.randn(2, 1, 28, 28), targets=torch.tensor([1, 2]), loss=loss)


def names(model: nn.Module, by: SampleTrial | None = None) -> list[list[str]]:
    return [[layer.name for layer in chain] for chain in find_chains(model, by)]


@pytest.mark.parametrize("name", tangled_models.CASES)
def test_a_tangled_layer_stays_whole_and_the_cause_is_named(name: str) -> None:
    model = getattr(tangled_models, name)()
    loss = tangled_models.penalty if name == "read_in_loss" else F.cross_entropy
    seen = look_at(model, trial(loss))
    assert tangled_models.CASES[name] in seen.obstacles["fc"]
    free = [chain for chain in names(model, trial(loss)) if chain != ["back"]]
    assert free == [["other"], ["head"]]
    settings = ExchangeSettings(partition="manual", layers=("fc",))
    with pytest.raises(
        ConfigError, match=r"exchange\.layers has 'fc', which cannot be split"
    ) as raised:
        choose_partition(
            settings,
            find_chains(model, seen=seen),
            Division(parts=(12, 12), shares=(1.0, 1.0)),
            parameters=1,
            obstacles=seen.obstacles,
        )
    assert tangled_models.CASES[name] in str(raised.value)


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = list(model)
    samples = trial()
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    seen = look_at(model, samples)
    assert torch.equal(torch.rand(1), drawn)
    assert not seen.obstacles
    assert seen.rows == {"1": 1, "3": 1}
    assert [id(layer) for layer in model] == [id(layer) for layer in layers]
    assert not any(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for layer in model:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
        assert all(p.grad is None for p in layer.parameters())


class OneByOne(nn.Module):
    """Keeps what is between the layers of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        values, kept = images, []
        for step in self.steps:
            values = step(values)
            kept.append(values)
        return kept[-1] + kept[1].mean()


class Skipping(nn.Sequential):
    """A container with a way of its own through its layers."""

    def forward(self, values: Tensor) -> Tensor:
        first = self[0](values.flatten(1))
        return self[2](first) + first


def test_values_stay_whole_between_layers_that_are_not_called_by_their_container() -> None:
    assert names(OneByOne()) == [["steps.1", "steps.3", "steps.5"]]
    assert names(OneByOne(), trial()) == [["steps.1"], ["steps.3"], ["steps.5"]]
    skipping = Skipping(nn.Linear(784, 10), nn.ReLU(), nn.Linear(10, 10))
    assert names(skipping) == [["0"], ["2"]]


def test_values_stay_whole_where_something_looks_at_them() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))

    class ReLU(nn.Module):
        """Not torch's."""

        def forward(self, values: Tensor) -> Tensor:
            return values - values.mean(dim=1, keepdim=True)

    assert names(build(), trial()) == [["1", "3"]]
    hooked, own = build(), build()
    hooked[2].register_forward_hook(lambda module, values, output: None)
    own[2] = ReLU()
    for model in (hooked, own):
        assert names(model, trial()) == [["1"], ["3"]]


def test_a_model_that_cannot_be_tried_is_not_split() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("weights of classes")

    seen = look_at(model, trial(loss))
    assert "could not be tried on 2 samples (KeyError: 'weights of classes')" in seen.obstacles["1"]
    assert find_chains(model, seen=seen) == []


def test_harmless_questions_leave_a_layer_splittable() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(784, 10)

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(images.flatten(1).to(self.fc.weight.device, self.fc.weight.dtype))

    assert not look_at(Asking(), trial()).obstacles


def test_weights_of_a_split_layer_cannot_be_used_any_more() -> None:
    linear = nn.Linear(4, 3)
    weight = linear.weight
    retire(linear, "fc")
    assert weight.dtype is torch.float32
    uses: list[Callable[[], object]] = [
        lambda: weight.norm(),
        lambda: F.linear(torch.zeros(2, 4), weight),
        lambda: linear(torch.zeros(2, 4)),
        lambda: weight.shape,
        lambda: torch.cat([torch.zeros(3), weight]),
    ]
    for use in uses:
        with pytest.raises(UnsupportedError, match="the layer 'fc' is split over nodes"):
            use()
