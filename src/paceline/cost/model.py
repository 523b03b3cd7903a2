"""A model as the formulas see it: per layer its part of the time, and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.schema.machines import MeasuredHost

SPLITTABLE = frozenset({"Linear"})
"""Layers whose weights can be split by feature over nodes."""
TRANSPARENT = frozenset(
    {"ReLU", "ReLU6", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "Hardswish"}
    | {"Dropout", "Identity", "ELU", "Softplus"}
)
"""Layers that work on each feature alone, so that a split one passes through."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer."""

    name: str = ""
    kind: str = ""
    forward: float = 0.0
    backward: float = 0.0
    """Parts of a sample's computing time; those of all layers add up to 1."""
    parameter_bytes: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    """Per sample."""


@dataclass(frozen=True)
class ModelCost:
    """All layers, in the order of forward."""

    layers: tuple[LayerCost, ...]
    optimizer_slots: int = 0
    """Numbers that the optimizer keeps per weight."""

    @property
    def parameter_bytes(self) -> float:
        """All weights."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """What forward keeps per sample."""
        return sum(layer.output_bytes for layer in self.layers)

    @property
    def backward_part(self) -> float:
        """Backward's part of the computing time."""
        return sum(layer.backward for layer in self.layers)


def model_cost(layers: Sequence[LayerCost]) -> ModelCost:
    """Layers with their times made parts of the whole.

    Without any time, backward is taken as two thirds (two multiplications where forward
    has one), all of it in the layers with weights, in proportion to those.
    """
    total = sum(layer.forward + layer.backward for layer in layers)
    weights = sum(layer.parameter_bytes for layer in layers)
    found = []
    for layer in layers:
        if total > 0:
            forward, backward = layer.forward / total, layer.backward / total
        else:
            part = layer.parameter_bytes / weights if weights else 1 / len(layers)
            forward, backward = part / 3, 2 * part / 3
        found.append(
            LayerCost(
                name=layer.name,
                kind=layer.kind,
                forward=forward,
                backward=backward,
                parameter_bytes=layer.parameter_bytes,
                input_bytes=layer.input_bytes,
                output_bytes=layer.output_bytes,
            )
        )
    return ModelCost(tuple(found))


def host_model(host: MeasuredHost, optimizer_slots: int = 0) -> ModelCost:
    """The model as a host's per-layer profile describes it."""
    found = model_cost(
        [
            LayerCost(
                name=layer.name,
                kind=layer.kind,
                forward=layer.forward.median,
                backward=layer.backward.median,
                parameter_bytes=layer.parameter_bytes,
                input_bytes=layer.input_bytes,
                output_bytes=layer.activation_bytes,
            )
            for layer in host.layers
        ]
    )
    return replace(found, optimizer_slots=optimizer_slots)
