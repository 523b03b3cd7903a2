"""One trained run and one folder of models for all tests of `serve`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline.data import DataRequest, open_dataset
from paceline.serve.export import export
from paceline.serve.trained import open_trained

SETTINGS = {
    "local.strategy": "sequential",
    "numerics.precision": "fp32",
    "data.limit": 256,
    "optimizer.learning_rate": 0.002,
}


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network that tells most digits apart."""
    where = tmp_path_factory.mktemp("serve") / "run"
    paceline.train(
        paceline.Workload(model="mnist_cnn", data="digits", batch_size=32),
        epochs=2,
        settings=SETTINGS,
        run=where,
        silent=True,
    )
    return where


@pytest.fixture(scope="session")
def digit_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test digits as pictures, in a folder per class."""
    folder = tmp_path_factory.mktemp("digits")
    source = open_dataset(DataRequest(name="digits", limit=40)).test
    inputs, targets = source.fetch(np.arange(len(source)), epoch=0, augment=False)
    for number, (image, target) in enumerate(zip(inputs, targets, strict=True)):
        place = folder / str(int(target))
        place.mkdir(exist_ok=True)
        pixels = np.rint((image[0].numpy() * 0.3245 + 0.3051) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="session")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models/digits/1`, as .safetensors: the format that is made, and loaded, in no time."""
    to = tmp_path_factory.mktemp("exported") / "models" / "digits"
    return export(open_trained(trained_run), "safetensors", to)[0]
