"""Which linear layers of a model follow each other with nothing but elementwise layers between."""

from __future__ import annotations

from torch import nn

from paceline.cost.split import Chain
from paceline.exchange.tensor_parallel.splittable import (
    SampleTrial,
    Seen,
    is_chain,
    is_elementwise,
    look_at,
)
from paceline.schema.machines import LinearLayer


def find_chains(
    model: nn.Module, trial: SampleTrial | None = None, *, seen: Seen | None = None
) -> list[Chain]:
    """The model's chains of linear layers, in the order of its modules.

    Layers of one `nn.Sequential` can follow each other; any other linear layer is a chain by
    itself. Layers that must stay whole (see `splittable`) are left out. `seen` is what `look_at`
    has found with the trial, where that was done already.
    """
    seen = look_at(model, trial) if seen is None else seen
    chains: list[Chain] = []
    for prefix, module in model.named_modules():
        follows = is_chain(module) and prefix not in seen.apart
        open_chain: list[LinearLayer] = []
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(child, nn.Linear) and path not in seen.obstacles:
                open_chain.append(_layer(path, child, seen.rows[path] if seen.rows else 1))
                if follows:
                    continue
            elif follows and is_elementwise(child):
                continue
            if open_chain:
                chains.append(tuple(open_chain))
                open_chain = []
        if open_chain:
            chains.append(tuple(open_chain))
    return chains


def _layer(name: str, module: nn.Linear, rows: int) -> LinearLayer:
    return LinearLayer(
        name=name,
        inputs=module.in_features,
        outputs=module.out_features,
        bias=module.bias is not None,
        rows=rows,
    )
