"""Which linear layers of a model follow each other with nothing but elementwise layers between."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
from torch import nn

from paceline.cost.model import TRANSPARENT
from paceline.cost.split import Chain, LinearLayer


def find_chains(model: nn.Module, sample_shape: tuple[int, ...] = ()) -> list[Chain]:
    """The model's chains of linear layers, in the order of its modules.

    Layers of one `nn.Sequential` can follow each other; any other linear layer is a chain by
    itself. Left out are layers whose weights are shared, frozen, or not in fp32, and what is not
    exactly an `nn.Linear`. With `sample_shape` two samples of zeros are run through the model,
    and layers are left out that are not called exactly once with the batch as first dimension.
    """
    rows = _rows_per_sample(model, sample_shape) if sample_shape else None
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    users = Counter(id(child) for module in model.modules() for child in module.children())
    chains: list[Chain] = []
    for prefix, module in model.named_modules():
        open_chain: list[LinearLayer] = []
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if _splittable(child, owners, users) and (rows is None or path in rows):
                open_chain.append(_layer(path, child, rows[path] if rows else 1))
                if isinstance(module, nn.Sequential):
                    continue
            elif isinstance(module, nn.Sequential) and type(child).__name__ in TRANSPARENT:
                continue
            if open_chain:
                chains.append(tuple(open_chain))
                open_chain = []
        if open_chain:
            chains.append(tuple(open_chain))
    return chains


def _splittable(module: nn.Module, owners: Counter[int], users: Counter[int]) -> bool:
    return (
        type(module) is nn.Linear
        and users[id(module)] == 1
        and all(
            owners[id(p)] == 1 and p.requires_grad and p.dtype is torch.float32
            for p in module.parameters()
        )
    )


def _layer(name: str, module: nn.Module, rows: int) -> LinearLayer:
    assert isinstance(module, nn.Linear)
    return LinearLayer(
        name=name,
        inputs=module.in_features,
        outputs=module.out_features,
        bias=module.bias is not None,
        rows=rows,
    )


def _rows_per_sample(model: nn.Module, sample_shape: tuple[int, ...]) -> dict[str, int]:
    """Rows per sample of every linear layer that is called once, with the batch first."""
    calls: dict[str, list[tuple[int, ...]]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def note(_: nn.Module, values: tuple[torch.Tensor, ...], name: str = name) -> None:
                calls.setdefault(name, []).append(tuple(values[0].shape))

            handles.append(module.register_forward_pre_hook(note))
    modes = [(module, module.training) for module in model.modules()]
    first = next(model.parameters(), torch.empty(0))
    model.eval()
    try:
        # A model that does not take zeros has no layer that could be split.
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
            model(torch.zeros((2, *sample_shape), device=first.device))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return {
        name: torch.Size(shapes[0][1:-1]).numel()
        for name, shapes in calls.items()
        if len(shapes) == 1 and len(shapes[0]) >= 2 and shapes[0][0] == 2
    }
