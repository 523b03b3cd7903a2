"""Plain PyTorch: the script that a competent user writes, without Paceline's loop or data.

    python -m benchmarks.peers.plain digits|mnist|fire|resnet18 --epochs N --result FILE

One process, torch's own number of threads, a DataLoader, the test set after every epoch. The
networks are built from `paceline.models`, so that both train the same one.
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from benchmarks.peers.common import write_result
from paceline import models

Sets = tuple[Dataset[Any], Dataset[Any]]
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Photographs(Dataset[tuple[Tensor, Tensor]]):
    """Photographs in a folder per class, decoded when they are asked for."""

    def __init__(self, folder: Path, *, flip: bool) -> None:
        self.flip = flip
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(classes)
            for path in sorted((folder / name).glob("*.jpg"))
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        path, number = self.files[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((224, 224)), dtype=np.float32)
        scaled = torch.from_numpy(pixels.transpose(2, 0, 1) / 255)
        if self.flip and torch.rand(()) < 0.5:
            scaled = scaled.flip(2)
        return (scaled - MEAN) / DEVIATION, torch.tensor(number)


def read_idx(path: Path) -> Tensor:
    data = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    array = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return torch.from_numpy(array.copy())


def read_digits() -> Sets:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    inputs = nn.functional.interpolate(inputs, size=28, mode="bilinear")
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels)
    whole = TensorDataset((inputs - 0.3051) / 0.3245, torch.tensor(labels))
    return Subset(whole, train), Subset(whole, test)


def read_mnist(root: Path) -> Sets:
    def part(name: str) -> TensorDataset:
        images = read_idx(root / "mnist" / f"{name}-images-idx3-ubyte").unsqueeze(1)
        labels = read_idx(root / "mnist" / f"{name}-labels-idx1-ubyte").long()
        return TensorDataset((images / 255 - 0.1307) / 0.3081, labels)

    return part("train"), part("t10k")


def build(row: str, root: Path) -> tuple[nn.Module, torch.optim.Optimizer, Sets, int]:
    """Model, optimizer, data sets and batch size of a row."""
    if row == "digits":
        model = models.build("shallow_cnn", classes=10, channels=1)
        return model, torch.optim.Adam(model.parameters(), lr=0.001), read_digits(), 32
    if row == "mnist":
        model = models.build("mnist_cnn", classes=10, channels=1, options={"dropout": 0.3})
        return model, torch.optim.Adam(model.parameters(), lr=0.001), read_mnist(root), 128
    if row == "fire":
        model = models.build("alexnet", classes=3, channels=3)
        photographs = (
            Photographs(root / "fire" / "train", flip=True),
            Photographs(root / "fire" / "val", flip=False),
        )
        rate, batch = 0.001, 32
        sets: Sets = photographs
    else:
        model = models.build(
            "resnet18", classes=10, channels=1, image_size=28, options={"stem": "small"}
        )
        train, test = read_mnist(root)
        sets = Subset(train, range(8192)), Subset(test, range(8192))
        rate, batch = 0.01, 128
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), sets, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=("digits", "mnist", "fire", "resnet18"))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    root = Path(os.environ.get("PACELINE_DATA", "data"))
    model, optimizer, (train, test), batch = build(options.row, root)
    decoders = os.cpu_count() or 1 if options.row == "fire" else 0
    feed = DataLoader(
        train, batch, shuffle=True, num_workers=decoders, persistent_workers=decoders > 0
    )
    check = DataLoader(test, 256, num_workers=decoders, persistent_workers=decoders > 0)
    first = accuracy = 0.0
    for _ in range(options.epochs):
        model.train()
        for inputs, targets in feed:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            first = first or time.time()
        model.eval()
        with torch.inference_mode():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in check)
        accuracy = right / len(test)  # type: ignore[arg-type]
        print(f"test accuracy {accuracy:.2%}", flush=True)
    torch.save(model.state_dict(), options.result.with_suffix(".pt"))
    write_result(options.result, {"first_update": first, "test_accuracy": accuracy})


if __name__ == "__main__":
    main()
