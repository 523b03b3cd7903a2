"""How long each operation of a model takes, forward and backward, and how much it keeps."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.local.cut_graph import ModelGraph, Value
from paceline.local.cutting import choose_cuts
from paceline.local.faithful import untouched

_ROUNDS = 3
_SECONDS = 5.0
# Weight, gradient, and two entries of an optimizer like Adam.
_COPIES_OF_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Room:
    """What limits a stage beside its time."""

    bytes_per_second: float = math.inf
    memory_limit: float = math.inf
    micro_batches: int = 1
    """Micro-batches whose activations a stage may hold at once."""


def balanced_cuts(
    graph: ModelGraph,
    sample: torch.Tensor,
    stages: int,
    room: Room,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[int]:
    """The positions at which the measured model is cut best.

    Only cuts that one tensor crosses are considered while there are enough of them.
    """
    positions = graph.positions(single=True)
    if len(positions) < stages - 1:
        positions = graph.positions(single=False)
    times = operation_times(graph, sample, context)
    bounds = [0, *positions, len(graph.order)]
    segments = list(itertools.pairwise(bounds))
    crossing = [
        float(sum(_value(graph, node).wire_bytes for node in graph.crossing(first)))
        for first, _ in segments
    ]
    chosen = choose_cuts(
        [sum(times[first:end]) for first, end in segments],
        crossing,
        [_memory(graph, first, end, room.micro_batches) for first, end in segments],
        stages,
        room.bytes_per_second,
        room.memory_limit,
    )
    return [bounds[index] for index in chosen]


def _value(graph: ModelGraph, node: fx.Node) -> Value:
    value = graph.values[node.name]
    assert value is not None
    return value


def _memory(graph: ModelGraph, first: int, end: int, micro_batches: int) -> float:
    weights: dict[int, int] = {}
    activations = 0
    for node in graph.order[first:end]:
        for tensor in graph.tensors_of(node):
            weights[id(tensor)] = tensor.nbytes
        value = graph.values[node.name]
        activations += value.nbytes if value is not None else 0
    return float(_COPIES_OF_WEIGHT * sum(weights.values()) + micro_batches * activations)


def operation_times(
    graph: ModelGraph,
    sample: torch.Tensor,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[float]:
    """Seconds of each operation, forward and backward: the median of rounds after a warm-up."""
    rounds: list[list[float]] = []
    start = time.perf_counter()
    try:
        with untouched(graph.module), context():
            for number in range(_ROUNDS + 1):
                timer = _Timer(graph.module)
                timer.run(sample.clone())
                if number > 0:
                    rounds.append([timer.seconds[node.name] for node in graph.order])
                if number > 0 and time.perf_counter() - start > _SECONDS:
                    break
    finally:
        for parameter in graph.module.parameters():
            parameter.grad = None
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


class _Timer(fx.Interpreter):
    """Runs each operation on its own, cut off from the others, backward right after forward."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # A clone, not the leaf itself: operations in place may write into it.
        args, kwargs = fx.node.map_aggregate((args, kwargs), _writable)
        start = time.perf_counter()
        result = getattr(self, n.op)(n.target, args, kwargs)
        self.seconds[n.name] = time.perf_counter() - start
        outputs: list[torch.Tensor] = []
        fx.node.map_aggregate(result, lambda v: outputs.append(v) if _trained(v) else None)  # type: ignore[arg-type]
        gradients = [torch.ones_like(output) for output in outputs]
        start = time.perf_counter()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        self.seconds[n.name] += time.perf_counter() - start
        return fx.node.map_aggregate(result, _cut_off)


def _trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None


def _cut_off(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _writable(value: Any) -> Any:
    if _is_activation(value):
        return _cut_off(value).clone()
    return value


def _is_activation(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and value.is_floating_point()
        and value.requires_grad
    )
