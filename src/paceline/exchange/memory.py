"""What exchanges carry from update to update, on its way into checkpoints and back.

Every node has errors of its own that compressing took off its gradients. A checkpoint is written by
the first node alone: the others send it theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.exchange.base import Memory
from paceline.exchange.buckets import Buckets
from paceline.exchange.network import Network

ENTRY = ".exchange"
"""Where a checkpoint's optimizer state has it: no parameter's name begins with a dot."""


def errors_named(errors: Mapping[int, torch.Tensor]) -> Memory:
    """The errors of all buckets under names."""
    return {f"error-{number}": error for number, error in errors.items()}


def errors_of(saved: Memory, buckets: Buckets) -> dict[int, torch.Tensor]:
    """What `errors_named` has named; none at all where buckets have other sizes now."""
    sizes = [sum(weight.numel() for weight in group) for group in buckets.groups]
    return numbered(saved, "error", sizes)


def numbered(saved: Mapping[str, Any], name: str, sizes: Sequence[int]) -> dict[int, torch.Tensor]:
    """What is saved as "NAME-0", "NAME-1" and so on; none at all where a size is another."""
    found = {
        number: saved[f"{name}-{number}"].clone()
        for number in range(len(sizes))
        if f"{name}-{number}" in saved
    }
    return found if all(len(each) == sizes[number] for number, each in found.items()) else {}


def gathered(own: Memory, network: Network) -> dict[str, torch.Tensor]:
    """On the first node: the memory of all nodes, under "NODE/name"; all nodes call it."""
    if not own:
        return {}
    names = sorted(own)
    if network.rank > 0:
        for name in names:
            network.send(own[name].contiguous(), 0).wait()
        return {}
    found = {f"0/{name}": own[name] for name in names}
    for node in range(1, network.size):
        for name in names:
            received = torch.empty_like(own[name])
            network.receive(received, node).wait()
            found[f"{node}/{name}"] = received
    return found


def of_node(entries: Mapping[str, Any], node: int) -> Memory:
    """One node's part of what `gathered` gave."""
    prefix = f"{node}/"
    return {key.removeprefix(prefix): v for key, v in entries.items() if key.startswith(prefix)}
