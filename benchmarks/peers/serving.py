"""What the servers that Paceline is measured against share: the model, and reading of a request.

Every server is asked with the same bytes, `{"instances": [SAMPLE]}`: a sample is nested lists of
numbers, or `{"b64": "..."}`, a photograph in base64 that has the model's size already.

    MODEL=model.onnx WORKERS=2 THREADS=1 PORT=8001 python -m benchmarks.peers.serving_NAME

No torch and no Paceline: each server runs in an environment of its own.
"""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
import onnxruntime

MODEL = os.environ.get("MODEL", "")
PORT = int(os.environ.get("PORT", "8001"))
WORKERS = int(os.environ.get("WORKERS", "1"))
THREADS = int(os.environ.get("THREADS", "0"))
"""Of each worker; 0: onnxruntime's own choice."""
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def open_session() -> onnxruntime.InferenceSession:
    """One per process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


def read_sample(sample: Any) -> np.ndarray:
    """One input of the model from one sample of a request."""
    if isinstance(sample, dict):
        return read_picture(sample["b64"])
    return np.asarray(sample, np.float32)


def read_picture(text: str) -> np.ndarray:
    """A photograph, normalised as in training."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        pixels = np.asarray(image.convert("RGB"), np.float32)
    return ((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)
