"""BentoML and onnxruntime, with its adaptive batches.

bentoml serve benchmarks.peers.serving_bentoml:Classifier --port 8001
"""

from __future__ import annotations

from typing import Annotated

import bentoml
import numpy as np
from bentoml.validators import DType
from pydantic import BaseModel

from benchmarks.peers import serving

MOST, LATENCY = 64, 10_000
"""Samples of a batch, and milliseconds that a request may take before BentoML answers 503."""


class Photograph(BaseModel):
    b64: str


@bentoml.service(workers=serving.WORKERS, logging={"access": {"enabled": False}})
class Classifier:
    def __init__(self) -> None:
        self.session = serving.open_session()

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=LATENCY)
    def predict(self, instances: Annotated[np.ndarray, DType("float32")]) -> np.ndarray:
        return self.session.run(None, {"input": instances})[0]

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=LATENCY)
    def photographs(self, instances: list[Photograph]) -> list[list[float]]:
        inputs = np.stack([serving.read_picture(one.b64) for one in instances])
        return self.session.run(None, {"input": inputs})[0].tolist()
