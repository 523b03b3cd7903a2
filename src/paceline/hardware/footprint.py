"""What a model takes in memory, counted and seen on one sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.cost.memory import Footprint
from paceline.schema import Config

if TYPE_CHECKING:
    from paceline.training.parts import Parts


def measure_footprint(parts: Parts, config: Config, batch_size: int) -> Footprint:
    """What the model takes: parameters counted, activations seen on one sample."""
    from paceline.models import summarise

    model = parts.build_model()
    shape = parts.dataset.sample_shape
    parameters = sum(p.numel() for p in model.parameters())
    try:
        layers = summarise(model, shape).layers
        activations = sum(_elements(layer.output_shape) for layer in layers)
    except Exception:
        activations = 0  # a model whose layers cannot be watched: its trial will tell
    slots = {"sgd": 1 if config.optimizer.momentum else 0}.get(config.optimizer.name, 2)
    sample = _elements(shape)
    return Footprint(
        parameter_mb=parameters * 4 / 1e6,
        activation_mb=(activations + sample) * 4 / 1e6,
        optimizer_slots=slots,
        batch_mb=sample * batch_size * 4 / 1e6,
    )


def _elements(shape: Any) -> int:
    return math.prod(map(int, shape or ()))
