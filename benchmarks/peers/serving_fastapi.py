"""Plain FastAPI and onnxruntime, each request by itself, in as many workers of uvicorn as asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers import serving

app = FastAPI()
session = serving.open_session()


class Body(BaseModel):
    instances: list[Any]


@app.post("/predict")
def predict(body: Body) -> dict[str, Any]:
    inputs = np.stack([serving.read_sample(one) for one in body.instances])
    return {"predictions": session.run(None, {"input": inputs})[0].tolist()}


@app.get("/health")
def health() -> str:
    return "ok"


if __name__ == "__main__":
    uvicorn.run(
        "benchmarks.peers.serving_fastapi:app",
        port=serving.PORT,
        workers=serving.WORKERS,
        log_level="warning",
        access_log=False,
    )
