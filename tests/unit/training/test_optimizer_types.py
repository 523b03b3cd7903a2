"""Named optimizers move weights of every type as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UnsupportedError
from paceline.local.base import clip_gradients
from paceline.schema import Optimizer
from paceline.training.optimizers import optimizer_factory

KINDS: dict[str, tuple[Optimizer, Any]] = {
    "sgd": (
        Optimizer(name="sgd", learning_rate=0.05),
        lambda p: torch.optim.SGD(p, lr=0.05),
    ),
    "momentum": (
        Optimizer(name="sgd", learning_rate=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (
        Optimizer(name="adam", learning_rate=0.05, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    ),
    "adamw": (
        Optimizer(name="adamw", learning_rate=0.05, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01),
    ),
}
TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_moves_as_in_plain_pytorch(kind: str, dtype: torch.dtype) -> None:
    settings, plain = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    first = [torch.randn(n, generator=generator).to(dtype) for n in (1, 15, 16, 17, 100)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in first] for _ in range(2))
    optimizers = (optimizer_factory(settings)(ours), plain(theirs))
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).to(dtype)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, first, strict=True):
        if dtype in (torch.float32, torch.float64):  # fused: rounded at other places
            torch.testing.assert_close(mine, other)
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        assert (mine != before).float().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_at_first(kind: str) -> None:
    settings, plain = KINDS[kind]
    ours, theirs = ([nn.Parameter(torch.ones(20)) for _ in range(2)] for _ in range(2))
    optimizers = (optimizer_factory(settings)(ours), plain(theirs))
    for update in range(4):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            weights[0].grad = torch.full((20,), 0.5 + update)
            weights[1].grad = torch.full((20,), 0.25) if update == 2 else None
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_with_sgd(momentum: float) -> None:
    ours, theirs = nn.Embedding(20, 8, sparse=True), nn.Embedding(20, 8, sparse=True)
    theirs.load_state_dict(ours.state_dict())
    settings = Optimizer(name="sgd", learning_rate=0.1, momentum=momentum)
    optimizers = (
        optimizer_factory(settings)(ours.parameters()),
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum),
    )
    for words in ([1, 2, 2], [2, 3, 4], [7, 1, 1]):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(torch.tensor(words)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_what_torch_refuses_of_sparse_gradients_is_a_sentence(name: str) -> None:
    model = nn.Embedding(20, 8, sparse=True)
    optimizer = optimizer_factory(Optimizer(name=name, weight_decay=0.1))(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match="clip_norm needs dense gradients"):
        clip_gradients(model.parameters(), 1.0)
