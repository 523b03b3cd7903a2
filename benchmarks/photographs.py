"""A folder of photographs as most people read one: a plain `Dataset` with Pillow, no cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SIZE = 224
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """What torchvision's ImageFolder, Resize, CenterCrop, ToTensor and Normalize give."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
        ]
        self.targets = [number for _, number in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, target = self.files[index]
        with Image.open(path) as picture:
            plain = picture.convert("RGB")
        scale = SIZE / min(plain.size)
        plain = plain.resize([max(SIZE, round(side * scale)) for side in plain.size])
        left, top = ((side - SIZE) // 2 for side in plain.size)
        square = np.array(plain.crop((left, top, left + SIZE, top + SIZE)))
        pixels = torch.from_numpy(square).permute(2, 0, 1).float().div_(255)
        return (pixels - MEAN) / DEVIATION, target


def fire() -> tuple[Photographs, Photographs]:
    """The folders that examples/fire.toml names."""
    root = Path(os.environ["PACELINE_DATA"]) / "fire"
    return Photographs(root / "train"), Photographs(root / "val")
