"""LitServe and onnxruntime, with batches across requests."""

from __future__ import annotations

import os
from typing import Any

import litserve
import numpy as np

from benchmarks.peers import serving


class Classifier(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.session = serving.open_session()

    def decode_request(self, request) -> np.ndarray:  # type: ignore[no-untyped-def]
        (sample,) = request["instances"]
        return serving.read_sample(sample)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return np.asarray(self.session.run(None, {"input": inputs})[0])

    def unbatch(self, outputs: np.ndarray) -> list[np.ndarray]:
        return list(outputs)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return {"predictions": [output.tolist()]}


if __name__ == "__main__":
    api = Classifier(
        max_batch_size=int(os.environ.get("BATCH", "8")),
        batch_timeout=float(os.environ.get("BATCH_SECONDS", "0.01")),
    )
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=serving.WORKERS, fast_queue=True
    )
    server.run(host="127.0.0.1", port=serving.PORT, log_level="warning", generate_client_file=False)
