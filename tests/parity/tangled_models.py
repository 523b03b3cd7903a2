"""Models of a user's own whose layer `fc` must not be split over nodes: something else knows it.

`other` is large too and can be split. Used as `workload.model = "tangled_models.py:NAME"`; CASES
has every name with the cause that a refusal gives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

CASES = {
    "forward_hook": "a forward hook",
    "forward_pre_hook": "a forward pre-hook",
    "gradient_mask": "weight has a gradient hook",
    "weight_norm": "weight is parametrized",
    "spectral": "a forward pre-hook",
    "pruned": "a forward pre-hook",
    "subclass": "Scaled, not exactly",
    "in_a_list": "another reference than fc",
    "two_names": "two names, fc and again",
    "read_in_forward": "outside the layer",
    "read_in_loss": "outside the layer",
    "regularised": "outside the layer",
    "tied": "shared with another layer",
    "attribute": "carries 'scale'",
}
"""What is asked of every model besides: a cause that names what is in the way."""
_built: list[nn.Module] = []


class Tangled(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(784, 256)
        self.other = nn.Linear(256, 512)
        self.head = nn.Linear(512, 10)

    def hidden(self, images: Tensor) -> Tensor:
        """What the first layer gives."""
        return torch.relu(self.fc(images.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.other(self.hidden(images))))


def forward_hook() -> nn.Module:
    """A hook changes what the layer gives."""
    model = Tangled()
    model.fc.register_forward_hook(lambda module, values, output: output * 0.5)
    return model


def forward_pre_hook() -> nn.Module:
    """A hook changes what the layer gets."""
    model = Tangled()
    model.fc.register_forward_pre_hook(lambda module, values: (values[0] * 0.5,))
    return model


def gradient_mask() -> nn.Module:
    """Half of the weights stay where they are."""
    model = Tangled()
    mask = (torch.arange(784) % 2).float()
    model.fc.weight.register_hook(lambda gradient: gradient * mask)
    return model


def weight_norm() -> nn.Module:
    """The weight is made from a direction and a length."""
    model = Tangled()
    parametrizations.weight_norm(model.fc)
    return model


def spectral() -> nn.Module:
    """The weight is divided by its largest singular value."""
    model = Tangled()
    spectral_norm(model.fc)
    return model


def pruned() -> nn.Module:
    """A part of the weights is masked."""
    model = Tangled()
    prune.l1_unstructured(model.fc, "weight", amount=0.5)
    return model


class Scaled(nn.Linear):
    """A linear layer that does something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


def subclass() -> nn.Module:
    """See `Scaled`."""
    model = Tangled()
    model.fc = Scaled(784, 256)
    return model


class InAList(Tangled):
    """The layer is called by a list that holds it too."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [self.fc]

    def hidden(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for step in self.steps:
            hidden = torch.relu(step(hidden))
        return hidden


def in_a_list() -> nn.Module:
    """See `InAList`."""
    return InAList()


def two_names() -> nn.Module:
    """The layer has two names in one module; the forward pass uses the first."""
    model = Tangled()
    model.again = model.fc
    return model


class ReadInForward(Tangled):
    """The weight is used a second time, outside its layer."""

    def hidden(self, images: Tensor) -> Tensor:
        return super().hidden(images) + 0.5 * F.linear(images.flatten(1), self.fc.weight)


def read_in_forward() -> nn.Module:
    """See `ReadInForward`."""
    return ReadInForward()


def read_in_loss() -> nn.Module:
    """Its loss, `penalty`, reads the weight."""
    _built[:] = [Tangled()]
    return _built[0]


def penalty(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, and the squares of the weights of the layer."""
    model = _built[0]
    assert isinstance(model, Tangled)
    return F.cross_entropy(outputs, targets) + 0.1 * model.fc.weight.square().mean()


class Regularised(Tangled):
    """Outputs that depend on the weights of all layers that the model finds in itself."""

    def forward(self, images: Tensor) -> Tensor:
        size = sum(
            module.weight.square().mean()
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear) and name == "fc"
        )
        return super().forward(images) * (1.0 + size)


def regularised() -> nn.Module:
    """See `Regularised`."""
    return Regularised()


class Tied(Tangled):
    """Another layer has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(784, 256)
        self.back.weight = self.fc.weight

    def hidden(self, images: Tensor) -> Tensor:
        return super().hidden(images) + self.back(images.flatten(1))


def tied() -> nn.Module:
    """See `Tied`."""
    return Tied()


class Attribute(Tangled):
    """The layer carries a number that the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.scale = 0.5  # type: ignore[assignment]

    def hidden(self, images: Tensor) -> Tensor:
        return super().hidden(images) * self.fc.scale


def attribute() -> nn.Module:
    """See `Attribute`."""
    return Attribute()
