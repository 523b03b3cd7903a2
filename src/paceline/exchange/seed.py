"""What the first node begins with, on its way to nodes that are connected in pairs alone.

Parameter servers get their shards of it from the first worker, other workers get it from the
servers, and the nodes of `hogwild` from the first node: all begin with the same weights, buffers,
optimizer state and update, whatever each has built or found on its own disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.exchange.servers.sharding import shard_bounds, slices
from paceline.exchange.wire import BadMessageError, Connection, check_finite
from paceline.local.base import OptimizerState
from paceline.local.shared import memory_view
from paceline.schema.plain import parse_json

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass
class Seed:
    """A shard's beginning, or that of all weights laid end to end."""

    update: int
    """The update that training begins with."""
    weights: torch.Tensor
    slices: list[dict[str, Any]]
    """For every slice of a parameter: `whole`, its entries in `vectors`, and `numbers`."""
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Entries of the optimizer's state, laid out like the weights."""
    rest: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The bytes of frozen weights and buffers, where they are asked for."""

    def note(self) -> dict[str, Any]:
        """What is said before the tensors are sent."""
        return {
            "update": self.update,
            "slices": self.slices,
            "vectors": sorted(self.vectors),
            "rest": len(self.rest),
        }

    def send(self, link: Connection) -> None:
        """The tensors, after the note."""
        link.send(self.weights)
        for name in sorted(self.vectors):
            link.send(self.vectors[name])
        if len(self.rest):
            link.send(self.rest)


def make_seed(
    named: Named, state: OptimizerState, update: int, *, number: int = 0, servers: int = 1
) -> Seed:
    """What the server of that number begins with, of weights and state by parameter."""
    sizes = [parameter.numel() for _, parameter in named]
    start, end = shard_bounds(sum(sizes), servers)[number]
    seed = Seed(update=update, weights=torch.empty(end - start), slices=[])
    at = 0
    for piece in slices(sizes, start, end):
        name, parameter = named[piece.parameter]
        place = slice(at, at + piece.end - piece.start)
        own = slice(piece.start, piece.end)
        seed.weights[place].copy_(memory_view(parameter.detach(), parameter)[own])
        whole, numbers = [], {}
        for key, value in state.get(name, {}).items():
            if _is_whole(key, value, parameter):
                vector = seed.vectors.setdefault(key, torch.zeros(end - start))
                vector[place].copy_(memory_view(value, parameter)[own])
                whole.append(key)
            elif value is not None:
                numbers[key] = float(value)
        seed.slices.append({"whole": whole, "numbers": numbers})
        at = place.stop
    return seed


def receive_seed(
    link: Connection, note: dict[str, Any], elements: int, pieces: int, rest: int
) -> Seed:
    """The tensors that follow a note; refused if they are not this model's."""
    check_note(note, pieces, rest)
    seed = Seed(update=note["update"], weights=torch.empty(elements), slices=note["slices"])
    link.receive(seed.weights)
    for name in note["vectors"]:
        seed.vectors[name] = link.receive(torch.empty(elements))
    if note["rest"]:
        seed.rest = link.receive(torch.empty(note["rest"], dtype=torch.uint8))
    check_finite(seed.weights, "first weights")
    return seed


def check_note(note: Any, pieces: int, rest: int) -> None:
    """Refuse a note that does not describe `pieces` slices and `rest` other bytes, or none."""
    try:
        good = (
            type(note["update"]) is int
            and note["update"] >= 0
            and note["rest"] in (0, rest)
            and len(note["slices"]) == pieces
            and all(type(name) is str for name in note["vectors"])
            and all(
                set(each["whole"]) <= set(note["vectors"])
                and all(math.isfinite(number) for number in each["numbers"].values())
                for each in note["slices"]
            )
        )
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise BadMessageError("described a first state that is not this model's")


def state_of(named: Named, seed: Seed) -> OptimizerState:
    """The optimizer's state by parameter, of a seed of all weights."""
    found: OptimizerState = {}
    at = 0
    # A parameter without elements has no slice.
    filled = [(name, parameter) for name, parameter in named if parameter.numel()]
    for (name, parameter), entry in zip(filled, seed.slices, strict=True):
        place = slice(at, at + parameter.numel())
        at = place.stop
        found[name] = {key: torch.tensor(number) for key, number in entry["numbers"].items()}
        for key in entry["whole"]:
            value = torch.empty_like(parameter).detach()
            memory_view(value, parameter).copy_(seed.vectors[key][place])
            found[name][key] = value
    return {name: entries for name, entries in found.items() if entries}


def read_note(text: str) -> dict[str, Any]:
    """A note as it came; refused unless it is one."""
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadMessageError("sent a text that is no note")
    return found


def _is_whole(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry has a number for every weight; `step` is one number even of one weight."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"
