"""Small models that do what other people's models do: hooks, counters, branches, shared memory.

Each takes 12 numbers, or 6 tokens where `tokens` is set, and gives scores of 4 classes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

FEATURES, TOKENS, CLASSES, WIDTH = 12, 6, 4, 16


class Plain(nn.Module):
    """Three layers; the others change one thing about it."""

    tokens = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def middle(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.second(hidden))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.first(inputs)))
        return self.head(torch.tanh(self.third(hidden)))


class ClampGradient(torch.autograd.Function):
    """The identity; its backward pass keeps gradients below a limit."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-ctx.limit, ctx.limit), None


class OwnFunction(Plain):
    limit = 1e-3

    def middle(self, hidden: Tensor) -> Tensor:
        return super().middle(ClampGradient.apply(hidden, self.limit))


class OwnFunctionAtRest(OwnFunction):
    """Does nothing on a sample of noise, and may on the thousandth batch."""

    limit = 1e3


class NoGrad(Plain):
    def middle(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return super().middle(hidden)


class ActivationHook(Plain):
    def middle(self, hidden: Tensor) -> Tensor:
        result = super().middle(hidden)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * 0.5)
        return result


class QuietActivationHook(Plain):
    """A hook that only looks: gradients are the same with and without it."""

    def middle(self, hidden: Tensor) -> Tensor:
        result = super().middle(hidden)
        if result.requires_grad:
            result.register_hook(lambda gradient: None)
        return result


class MaskedParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(WIDTH, WIDTH).tril()
        self.second.weight.register_hook(lambda gradient: gradient * mask)


class ClampedParameter(Plain):
    """A hook that is not linear: on parts of a batch it would give something else."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        self.head.bias.register_hook(lambda gradient: gradient.sign())


class AccumulatedHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.third.weight, self.first.bias):
            parameter.register_post_accumulate_grad_hook(self.shorten)

    @staticmethod
    def shorten(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-4, 1e-4)


class BackwardHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda layer, inward, out: (inward[0] * 0.5,))


class ForwardHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda layer, inputs, outputs: outputs * 1.5)


class Counter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().middle(hidden) * (1.0 + 0.5 * self.calls)


class Reassigned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def middle(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen + 1.0
        return super().middle(hidden) * (1.0 + 0.5 * self.seen)


class Overwritten(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def middle(self, hidden: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return super().middle(hidden)


class HistoryInObject(Plain):
    """What changes lies in an object of its own."""

    class Log:
        def __init__(self) -> None:
            self.lengths: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.log = self.Log()

    def middle(self, hidden: Tensor) -> Tensor:
        self.log.lengths.append(1)
        return super().middle(hidden)


class PythonDepth(Plain):
    """Stochastic depth with Python's own random numbers."""

    def middle(self, hidden: Tensor) -> Tensor:
        return super().middle(hidden) if random.random() < 0.5 else hidden


class TorchDepth(Plain):
    def middle(self, hidden: Tensor) -> Tensor:
        keep = (torch.rand(1) < 0.5).float()
        return hidden + keep * super().middle(hidden)


class FunctionalDropout(Plain):
    def middle(self, hidden: Tensor) -> Tensor:
        return F.dropout(super().middle(hidden), 0.5, self.training)


class AlwaysDropout(nn.Dropout):
    """Monte Carlo dropout: also when the model is evaluated."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.p, True)


class MonteCarlo(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = AlwaysDropout(0.5)

    def middle(self, hidden: Tensor) -> Tensor:
        return self.drop(super().middle(hidden))


class HeldDropout(Plain):
    """A layer that is also held in a list, and used from there."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.held = [self.drop]

    def middle(self, hidden: Tensor) -> Tensor:
        return self.held[0](super().middle(hidden))


class AllDropped(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(super().middle(hidden))


class SizeBranch(Plain):
    """Takes another way for small batches."""

    def middle(self, hidden: Tensor) -> Tensor:
        if hidden.shape[0] > 6:
            return super().middle(super().middle(hidden))
        return super().middle(hidden)


class SizeFactor(Plain):
    """The same operations for any size, with another number."""

    def middle(self, hidden: Tensor) -> Tensor:
        return super().middle(hidden) * (2.0 if hidden.shape[0] > 6 else 0.5)


class Unused(Plain):
    """A layer that takes no part: momentum and decay must leave it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class SometimesUsed(Counter):
    """A layer that takes part in every second update."""

    def middle(self, hidden: Tensor) -> Tensor:
        hidden = super().middle(hidden)
        return torch.tanh(self.spare(hidden)) if self.calls % 2 else hidden

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Tokens(nn.Module):
    """Integers come in, and cross every cut: the mask is needed at the end."""

    tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(self.embedding(tokens)))
        hidden = torch.tanh(self.third(hidden))
        return self.head((hidden * (tokens > 4).unsqueeze(-1)).mean(dim=1))


class EitherType(Tokens):
    """Runs on numbers too, if one tries."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.long().abs() % 20)


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, hidden: Tensor) -> Tensor:
        return self.norm(super().middle(hidden))


class ViewOfWeight(Plain):
    """A buffer that is a view of a parameter: an update of one is one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.second.weight.data.view(-1))

    def middle(self, hidden: Tensor) -> Tensor:
        return super().middle(hidden) + self.view.mean()


class TwoParametersOneMemory(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.third.weight = nn.Parameter(self.second.weight.data)


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LazyLinear(WIDTH)


class Parametrized(Plain):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.second)


class OldSpectralNorm(Plain):
    """Implemented as a forward pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        old_spectral_norm(self.second)


class InitialisedByData(Plain):
    """Sets a parameter from the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.fresh = True

    def middle(self, hidden: Tensor) -> Tensor:
        if self.fresh:
            self.shift.data.copy_(hidden.detach().mean(dim=0))
            self.fresh = False
        return super().middle(hidden) - self.shift


class OnePixel(nn.Module):
    """A convolution onto one pixel with a hook, a mask on its weight, and a second holder."""

    tokens = False

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1, stride=2)
        self.held = [self.conv]
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.conv.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.held[0](inputs.view(-1, 3, 2, 2)).flatten(1)
        return self.head(torch.tanh(self.third(torch.tanh(hidden))))
