"""Which linear layers are split by feature over nodes, and what every node then sends.

A chain is a run of linear layers with nothing but elementwise layers between them. Between
two layers an activation is in one of two states:

    batch     a node has the rows of its own samples, with all features
    feature   a node has the rows of the whole global batch, with its own features

A layer is run in one of three ways, with weights W (outputs x inputs):

    batch     W on every node, batch -> batch; its gradient is summed over nodes
    column    a node has some rows of W (outputs): needs whole rows, gives state feature
    row       a node has some columns of W (inputs): needs state feature, gives partial sums

Bytes that all N nodes send together for one change of hands, forward and backward, of a
global batch of B rows of X features (node i has b_i rows and x_i features):

    batch -> whole rows        sum b_i X (N-1) + (B - b_i) X    = 2 (N-1) B X
    feature -> whole rows      sum B x_i (N-1) + B (X - x_i)    = 2 (N-1) B X
    partial sums -> batch      as batch -> whole rows, the other way round
    partial sums -> feature    as feature -> whole rows, the other way round
    batch <-> feature          sum b_i (X - x_i) + (B - b_i) x_i
    gradient of w weights      2 (N-1) w
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.schema.machines import LinearLayer

Way = Literal["batch", "column", "row"]
State = Literal["batch", "feature"]

START = 128 * 1024
"""What a change of hands costs besides its bytes, in bytes: two operations that computing waits
for, each about half a millisecond, on 1 Gbit/s."""
WAITED = 1.25
"""A byte of activations counts this much more than one of gradients, which travel while the
backward pass still computes."""
GRADIENT_BYTES = 4


Chain = tuple[LinearLayer, ...]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """How a layer is run."""

    layer: LinearLayer
    way: Way = "batch"
    enter: State = "batch"
    leave: State = "batch"

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

    @property
    def bias_split(self) -> bool:
        """Whether a node has only its own features' part of the bias."""
        return self.way == "column" or (self.way == "row" and self.leave == "feature")


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a global batch and the features are divided."""

    parts: tuple[int, ...]
    """Samples of every node."""
    shares: tuple[float, ...]
    """What features are divided by: every node's part of the speed."""
    value_bytes: int = 4
    """Of one activation."""

    @property
    def nodes(self) -> int:
        return len(self.parts)


def divide_features(features: int, shares: Sequence[float]) -> list[int]:
    """Features of every node in proportion to shares, by largest remainder, at least one each.

    >>> divide_features(10, [3.0, 1.0])
    [7, 3]
    >>> divide_features(10, [1.0, 0.0])
    [9, 1]
    """
    nodes, total = len(shares), math.fsum(shares)
    assert features >= nodes
    exact = [(features - nodes) * share / total for share in shares]
    parts = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(nodes), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: features - nodes - sum(parts)]:
        parts[i] += 1
    return [part + 1 for part in parts]


def arrange(
    chain: Chain, division: Division, *, split: frozenset[str] | None = None
) -> tuple[Placed, ...]:
    """The cheapest way to run every layer of a chain, which is entered and left in state batch.

    Dynamic programming over the state between layers. With `split`, exactly those layers are
    split; without, whichever saves bytes.
    """
    best: dict[State, tuple[float, tuple[Placed, ...]]] = {"batch": (0.0, ())}
    for layer in chain:
        found: dict[State, tuple[float, tuple[Placed, ...]]] = {}
        for state, (cost, placed) in best.items():
            for option in _options(layer, state, division.nodes, split):
                total = cost + _weighed(option, division)
                if option.leave not in found or total < found[option.leave][0]:
                    found[option.leave] = (total, (*placed, option))
        best = found
    return best["batch"][1]


def can_split(layer: LinearLayer, nodes: int) -> bool:
    """Whether there is a feature for every node, on both sides."""
    return min(layer.inputs, layer.outputs) >= nodes


def _options(
    layer: LinearLayer, state: State, nodes: int, split: frozenset[str] | None
) -> Iterator[Placed]:
    wanted = split is None or layer.name in split
    if state == "batch" and not (split is not None and wanted):
        yield Placed(layer=layer)
    if wanted and can_split(layer, nodes):
        ways: tuple[Way, ...] = ("column", "row")
        states: tuple[State, ...] = ("feature", "batch")
        for way in ways:
            for leave in states:
                yield Placed(layer=layer, way=way, enter=state, leave=leave)


def _weighed(placed: Placed, division: Division) -> float:
    moved = sum(activation_bytes(placed, division))
    gradients = sum(gradient_bytes(placed, division.nodes))
    return WAITED * moved + gradients + START * division.nodes * _changes(placed)


def _changes(placed: Placed) -> int:
    """How often an activation changes hands."""
    if placed.way == "column":
        return 1 if placed.leave == "feature" else 2
    if placed.way == "row":
        return 1 if placed.enter == "feature" else 2
    return 0


def activation_bytes(placed: Placed, division: Division) -> list[int]:
    """Bytes of activations that every node sends for one layer in one update."""
    layer, nodes = placed.layer, division.nodes
    if placed.way == "batch":
        return [0] * nodes
    rows = [part * layer.rows for part in division.parts]
    before = divide_features(layer.inputs, division.shares)
    after = divide_features(layer.outputs, division.shares)
    sent = []
    for node in range(nodes):
        own, all_rows = rows[node], sum(rows)
        values = 0
        if placed.way == "column":
            values += _spread(placed.enter, own, all_rows, before[node], layer.inputs, nodes)
            if placed.leave == "batch":
                values += _turned(own, all_rows, after[node], layer.outputs)
        else:
            values += _spread(placed.leave, own, all_rows, after[node], layer.outputs, nodes)
            if placed.enter == "batch":
                values += _turned(own, all_rows, before[node], layer.inputs)
        sent.append(values * division.value_bytes)
    return sent


def _spread(state: State, own: int, rows: int, part: int, features: int, nodes: int) -> int:
    """Values sent between a state and whole rows (or partial sums), both ways."""
    if state == "batch":
        return own * features * (nodes - 1) + (rows - own) * features
    return rows * part * (nodes - 1) + rows * (features - part)


def _turned(own: int, rows: int, part: int, features: int) -> int:
    """Values sent between the states batch and feature, both ways."""
    return own * (features - part) + (rows - own) * part


def gradient_bytes(placed: Placed, nodes: int) -> list[float]:
    """Bytes of gradients that every node sends for one layer in one update, by a ring."""
    return [allreduced(_summed(placed), nodes)] * nodes


def _summed(placed: Placed) -> int:
    """How many weights of a layer are on all nodes, so that their gradients are summed."""
    if placed.way == "batch":
        return placed.layer.parameters
    return placed.layer.outputs if placed.layer.bias and not placed.bias_split else 0


def allreduced(weights: int, nodes: int) -> float:
    """Bytes that every node sends to sum the gradient of so many weights: 2 (N-1)/N x 4 w.

    >>> allreduced(57_150_000, 2) / 1e6
    228.6
    """
    return 2 * (nodes - 1) / nodes * GRADIENT_BYTES * weights


def step_bytes(
    chains: Sequence[Sequence[Placed]], division: Division, *, other_parameters: int = 0
) -> list[float]:
    """Bytes that every node sends in one update; `other_parameters` are outside the chains."""
    sent = [allreduced(other_parameters, division.nodes)] * division.nodes
    for chain in chains:
        for placed in chain:
            moved = activation_bytes(placed, division)
            summed = gradient_bytes(placed, division.nodes)
            sent = [a + b + c for a, b, c in zip(sent, moved, summed, strict=True)]
    return sent


@dataclass(frozen=True)
class Split:
    """Chains of which some layers are split over nodes, and what that means for an update."""

    chains: tuple[tuple[Placed, ...], ...]
    division: Division

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that are split."""
        return tuple(each.name for chain in self.chains for each in chain if each.way != "batch")

    @functools.cached_property
    def summed(self) -> dict[str, float]:
        """Bytes of gradients of every layer that are still summed over all nodes."""
        each = (placed for chain in self.chains for placed in chain)
        return {placed.name: float(GRADIENT_BYTES * _summed(placed)) for placed in each}

    @functools.cached_property
    def moved(self) -> float:
        """Bytes of activations that the busiest node sends per update."""
        sent = [0] * self.division.nodes
        for placed in (each for chain in self.chains for each in chain):
            own = activation_bytes(placed, self.division)
            sent = [a + b for a, b in zip(sent, own, strict=True)]
        return float(max(sent))

    @functools.cached_property
    def changes(self) -> int:
        """How often activations change hands in a forward pass."""
        return sum(_changes(placed) for chain in self.chains for placed in chain)

    @functools.cached_property
    def held(self) -> float:
        """Bytes of the chains' weights on the node that holds most of them."""
        return GRADIENT_BYTES * float(max(held_parameters(self.chains, self.division.shares)))

    @property
    def weights(self) -> float:
        """Bytes of all weights of the chains."""
        each = (placed.layer.parameters for chain in self.chains for placed in chain)
        return GRADIENT_BYTES * float(sum(each))


def best_split(
    chains: Sequence[Chain], division: Division, *, split: frozenset[str] | None = None
) -> Split | None:
    """The cheapest way to split a model's chains (see `arrange`); None where none is split.

    None also where `split` names a layer with fewer features than there are nodes.
    """
    named = (layer for chain in chains for layer in chain if layer.name in (split or ()))
    if division.nodes < 2 or not all(can_split(layer, division.nodes) for layer in named):
        return None
    found = Split(tuple(arrange(chain, division, split=split) for chain in chains), division)
    return found if found.layers else None


def held_parameters(chains: Sequence[Sequence[Placed]], shares: Sequence[float]) -> list[int]:
    """How many of the chains' weights every node holds."""
    held = [0] * len(shares)
    for placed in (each for chain in chains for each in chain):
        layer = placed.layer
        for node in range(len(shares)):
            if placed.way == "batch":
                held[node] += layer.parameters
                continue
            after = divide_features(layer.outputs, shares)[node]
            before = divide_features(layer.inputs, shares)[node]
            held[node] += after * layer.inputs if placed.way == "column" else before * layer.outputs
            if layer.bias:
                held[node] += after if placed.bias_split else layer.outputs
    return held
