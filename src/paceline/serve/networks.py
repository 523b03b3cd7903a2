"""Models of Paceline's own with weights from a .safetensors: no code comes from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline import models
from paceline.errors import ModelError, shortened
from paceline.schema.signature import Signature
from paceline.schema.version import Architecture


def build_network(
    network: Architecture, signature: Signature, file: Path, device: str = "cpu"
) -> Callable[[np.ndarray], np.ndarray]:
    """What computes a batch: the named model with the weights of `file`, in evaluation mode."""
    if network.name not in models.names():
        raise ModelError(
            f"{network.name!r} is no model of Paceline's own, and a server runs no code of models:"
            " export it with --format onnx"
        )
    shape = signature.shape
    model = models.build(
        network.name,
        classes=network.classes,
        channels=shape[0] if shape else 1,
        options=dict(network.options),
        image_size=shape[-1] if len(shape) == 3 else None,
    )
    try:
        model.load_state_dict(load_file(file))
    except (RuntimeError, OSError, SafetensorError) as error:
        raise ModelError(
            f"the weights of {file} do not fit {network.name}: {shortened(str(error))}"
        ) from None
    model.to(device).eval()

    def run(inputs: np.ndarray) -> np.ndarray:
        # A view of a request's bytes cannot be written to, which torch warns of.
        inputs = np.require(inputs, requirements=["C", "W"])
        with torch.inference_mode():
            return np.asarray(model(torch.from_numpy(inputs).to(device)).cpu())

    return run
