"""Per layer: exchange its gradients, or split its weights and exchange activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.cost.model import SPLITTABLE, TRANSPARENT, ModelCost
from paceline.cost.transfer import Wire, allreduce_bytes

Modes = tuple[str, ...]
"""Per layer `batch`; `column`: its outputs are split over nodes; `row`: its inputs are."""


def transitions(model: ModelCost, modes: Sequence[str]) -> list[tuple[float, bool]]:
    """Activations that change hands: (bytes per sample, whether each node holds only its part).

    Batch-wise, a node has its samples' whole rows. A `column` layer needs all rows, so its
    input is gathered forward and its gradient summed and scattered backward: (I, False). Its
    output is split by feature. A `row` layer takes it as it is and gives partial sums, which
    are scattered forward and gathered backward: (O, False). Where a split output meets another
    `column` layer it is gathered; where it meets any other layer, or the end, each node
    exchanges only the part it holds: (O, True).
    """
    found: list[tuple[float, bool]] = []
    split = 0.0  # bytes per sample of the split activation, 0 when rows are whole
    for layer, mode in zip(model.layers, modes, strict=True):
        if mode == "column":
            found.append((layer.input_bytes, False))
            split = layer.output_bytes
        elif mode == "row":
            found.append((layer.output_bytes, False))
            split = 0.0
        elif split and layer.kind not in TRANSPARENT:
            found.append((split, True))
            split = 0.0
    if split:
        found.append((split, True))
    return found


def transition_bytes(per_sample: float, held: bool, nodes: int, batch: float) -> float:
    """Bytes that each node sends for one change of hands, forward and backward together.

    gather and scatter   2 (N-1)/N   b x        held part only   2 (N-1)/N^2 b x
    """
    if nodes <= 1:
        return 0.0
    moved = 2 * (nodes - 1) / nodes * batch * per_sample
    return moved / nodes if held else moved


def activation_bytes(model: ModelCost, modes: Sequence[str], nodes: int, batch: float) -> float:
    """All bytes of activations and their gradients that each node sends per update."""
    return sum(transition_bytes(x, held, nodes, batch) for x, held in transitions(model, modes))


def activation_seconds(
    model: ModelCost, modes: Sequence[str], wire: Wire, nodes: int, batch: float
) -> float:
    """Time for them; nothing hides it, because the next layer waits.

    per change of hands   2 (a + (N-1) o) + bytes / B
    """
    if nodes <= 1:
        return 0.0
    changes = transitions(model, modes)
    rounds = 2 * len(changes) * (wire.latency + (nodes - 1) * wire.message)
    return rounds + activation_bytes(model, modes, nodes, batch) / wire.both


def batch_parameters(model: ModelCost, modes: Sequence[str]) -> float:
    """Bytes of weights that every node holds, and whose gradients are exchanged."""
    return sum(
        layer.parameter_bytes
        for layer, mode in zip(model.layers, modes, strict=True)
        if mode == "batch"
    )


def held_part(model: ModelCost, modes: Sequence[str], part: float) -> float:
    """Part of all weights that a node holds when it has `part` of every split layer."""
    total = model.parameter_bytes
    if total <= 0:
        return 1.0
    whole = batch_parameters(model, modes)
    return (whole + part * (total - whole)) / total


def choose_modes(model: ModelCost, wire: Wire, nodes: int, batch: float) -> Modes:
    """The cheapest mode of every layer, by time on the wire.

    Dynamic programming along the layers over two states, rows whole or split: a `batch`
    layer costs its part of an all-reduce, 2 (N-1)/N w / B; a `column` or `row` layer what
    `transitions` says. What hides under backward is not considered here; a caller compares
    the result with all layers `batch` by whole steps.
    """
    if nodes <= 1:
        return ("batch",) * len(model.layers)

    def moved(per_sample: float, held: bool) -> float:
        start = 2 * (wire.latency + (nodes - 1) * wire.message)
        return start + transition_bytes(per_sample, held, nodes, batch) / wire.both

    # state -> (seconds, modes, bytes per sample of the split activation)
    whole: tuple[float, Modes, float] = (0.0, (), 0.0)
    split: tuple[float, Modes, float] = (math.inf, (), 0.0)
    for layer in model.layers:
        gradients = allreduce_bytes(layer.parameter_bytes, nodes) / wire.both
        joined = split[0] + moved(split[2], True)
        to_whole = [
            (whole[0] + gradients, (*whole[1], "batch")),
            (joined + gradients, (*split[1], "batch")),
        ]
        to_split: list[tuple[float, Modes, float]] = []
        if layer.kind in TRANSPARENT and not layer.parameter_bytes:
            to_split.append((split[0], (*split[1], "batch"), split[2]))
        if layer.kind in SPLITTABLE and layer.input_bytes and layer.output_bytes:
            entry = moved(layer.input_bytes, False)
            for seconds, modes, _ in (whole, split):
                to_split.append((seconds + entry, (*modes, "column"), layer.output_bytes))
            out = split[0] + moved(layer.output_bytes, False)
            to_whole.append((out, (*split[1], "row")))
        best = min(to_whole, key=lambda option: option[0])
        whole = (*best, 0.0)
        split = min(to_split, key=lambda option: option[0], default=(math.inf, (), 0.0))
    end = split[0] + moved(split[2], True)
    return whole[1] if whole[0] <= end else split[1]
