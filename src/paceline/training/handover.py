"""What passes from one leg to the next: all that a checkpoint holds, in memory.

Weights, buffers and optimizer state by parameter name, the position, and the sums of the epoch.
Between processes of one machine it goes through anonymous memory that only they can read, between
nodes over the network of the leg that begins.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import StrategyError
from paceline.exchange.agreement import broadcast_tensors, broadcast_text
from paceline.exchange.network import Network
from paceline.local.base import OptimizerState
from paceline.schema.codec import decode, encode
from paceline.schema.plain import parse_json
from paceline.training.checkpoint import Checkpoints, TrainState, pack_state, unpack_state

_LINE = 64
"""Tensors begin at multiples of so many bytes: a view of any type may begin there."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The state of a training between two updates."""

    state: TrainState
    model: dict[str, torch.Tensor]
    optimizer: OptimizerState
    durations: tuple[float, ...] = ()
    """Seconds of the updates of the current epoch so far."""
    saved_at: int = -1
    """The update that the newest checkpoint is of."""
    unclosed: bool = False
    """The epoch's last update is done, but not its evaluation and its line."""

    @classmethod
    def of(cls, checkpoints: Checkpoints, path: Path) -> Handover:
        """What a checkpoint holds."""
        state, model, optimizer = checkpoints.load(path)
        update = state.position.update
        return cls(state=state, model=model, optimizer=optimizer, saved_at=update)

    def store(self, descriptor: int) -> dict[str, Any]:
        """Write the tensors to anonymous memory; where they are, and the rest, as plain data."""
        numbers, tensors = pack_state(self.optimizer)
        rest = self._rest(numbers)
        return rest | {"places": _write(descriptor, {"model": self.model, "optimizer": tensors})}

    def _rest(self, numbers: Any) -> dict[str, Any]:
        """All but the tensors, as plain data."""
        for name, value in self.model.items():
            if not isinstance(value, torch.Tensor):
                raise StrategyError(f"{name} of the model is no tensor, and stays in its process")
        return {
            "state": encode(self.state),
            "numbers": numbers,
            "durations": list(self.durations),
            "saved_at": self.saved_at,
            "unclosed": self.unclosed,
        }

    @classmethod
    def spread(cls, handover: Handover | None, network: Network) -> Handover:
        """The first node's handover, on every node of a network; all of them call it."""
        name = "the state between two legs"
        if handover is None:
            rest = parse_json(broadcast_text(network, "", name))
            tensors: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
            for part, key, kind, shape in rest["places"]:
                tensors[part][key] = torch.empty(shape, dtype=getattr(torch, kind))
        else:
            numbers, packed = pack_state(handover.optimizer)
            tensors = {"model": handover.model, "optimizer": packed}
            rest = handover._rest(numbers) | {
                "places": [
                    [part, key, _kind(tensor), list(tensor.shape)]
                    for part, held in tensors.items()
                    for key, tensor in held.items()
                ]
            }
            broadcast_text(network, json.dumps(rest), name)
        every = [tensor for held in tensors.values() for tensor in held.values()]
        broadcast_tensors(network, every, name)
        return handover if handover is not None else cls._of(rest, tensors)

    @classmethod
    def fetch(cls, descriptor: int, rest: dict[str, Any]) -> Handover:
        """What `store` wrote, in memory of its own: the next one is written to the same place."""
        return cls._of(rest, _read(descriptor, rest["places"]))

    @classmethod
    def _of(cls, rest: dict[str, Any], parts: dict[str, dict[str, torch.Tensor]]) -> Handover:
        return cls(
            state=decode(TrainState, rest["state"]),
            model=parts["model"],
            optimizer=unpack_state(rest["numbers"], parts["optimizer"]),
            durations=tuple(rest["durations"]),
            saved_at=rest["saved_at"],
            unclosed=rest["unclosed"],
        )


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write(descriptor: int, parts: dict[str, dict[str, torch.Tensor]]) -> list[list[Any]]:
    """Lay tensors end to end; part, name, type, shape and first byte of each."""
    places: list[list[Any]] = []
    end = 0
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            places.append([part, name, _kind(tensor), list(tensor.shape), end])
            end += -(-tensor.nbytes // _LINE) * _LINE
    os.ftruncate(descriptor, max(end, 1))
    with mmap.mmap(descriptor, max(end, 1)) as memory:
        for part, name, kind, shape, start in places:
            tensor = parts[part][name].detach()
            if tensor.numel():
                _view(memory, kind, shape, start).copy_(tensor)
    return places


def _read(descriptor: int, places: list[list[Any]]) -> dict[str, dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as memory:
        for part, name, kind, shape, start in places:
            found = torch.empty(shape, dtype=getattr(torch, kind))
            if found.numel():
                found.copy_(_view(memory, kind, shape, start))
            parts[part][name] = found
    return parts


def _view(memory: mmap.mmap, kind: str, shape: list[int], start: int) -> torch.Tensor:
    count = math.prod(shape)
    flat = torch.frombuffer(memory, dtype=getattr(torch, kind), count=count, offset=start)
    return flat.view(shape)
