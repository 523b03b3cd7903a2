"""A model as the formulas see it: per layer its part of the time, and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.schema.machines import MeasuredHost, WorkloadFacts

LOOKS_ACROSS = "BatchNorm"
"""How the kinds of layers begin whose forward pass needs sums over the whole batch."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    name: str = ""
    kind: str = ""
    forward: float = 0.0
    backward: float = 0.0
    """Parts of a sample's computing time; those of all layers add up to 1."""
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    """Per sample."""
    sum_bytes: float = 0.0
    """What nodes add up before the layer can go on, forward and once more backward: the sums and
    the squares of a BatchNorm's channels."""


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
                output_bytes=layer.output_bytes,
                sum_bytes=layer.sum_bytes,
            )
        )
    return ModelCost(tuple(found))


def host_model(host: MeasuredHost, facts: WorkloadFacts) -> ModelCost:
    """The model as a host's per-layer profile describes it."""
    if not host.layers:
        raise ConfigError(f"host {host.name!r} has no per-layer profile: measure it again")
    sums = not facts.local_batch_norm
    found = model_cost(
        [
            LayerCost(
                name=layer.name,
                kind=layer.kind,
                forward=layer.forward.median,
                backward=layer.backward.median,
                parameter_bytes=layer.parameter_bytes,
                output_bytes=layer.activation_bytes,
                # As many numbers as there are weights and biases, two of each channel.
                sum_bytes=(
                    layer.parameter_bytes if sums and layer.kind.startswith(LOOKS_ACROSS) else 0.0
                ),
            )
            for layer in host.layers
        ]
    )
    return replace(found, optimizer_slots=facts.optimizer_slots)
