"""Images kept as one array of bytes, turned into floats batch by batch.

The arithmetic is numpy's, not torch's: it runs in the thread that asks and wakes no
OpenMP threads that would take cores from the training beside it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.base import Source, fingerprint_of
from paceline.schema import write_json
from paceline.schema.checkpoint import sum_of
from paceline.schema.plain import ONE_LINE, checked, read_json_file
from paceline.schema.signature import Pictures

if TYPE_CHECKING:
    import torch

SETTLED = 2_000_000_000
"""Nanoseconds: two changes closer to each other than this may leave a file with the same time."""
# Up to this size a scaled copy of the whole array is made once; beyond it, batches are scaled.
SCALED_COPY_LIMIT = 1 << 30


class Normaliser:
    """Writes bytes as normalised floats into a place that is already there."""

    def __init__(self, pictures: Pictures) -> None:
        mean, deviation = np.asarray(pictures.mean), np.asarray(pictures.deviation)
        self._scale: Any = (1.0 / (255.0 * deviation)).astype(np.float32).reshape(-1, 1, 1)
        self._offset: Any = (-mean / deviation).astype(np.float32).reshape(-1, 1, 1)

    def write(self, pixels: np.ndarray, out: np.ndarray, *, flip: bool) -> None:
        """One picture, (channels, height, width), or several; `flip` mirrors one left and right."""
        out[...] = pixels[:, :, ::-1] if flip else pixels
        out *= self._scale
        out += self._offset


class ArraySource(Source):
    """Images of bytes, (count, channels, height, width), normalised on the way out.

    `size` scales, `channels` repeats grey or averages colour; both where they differ
    from what the array holds.
    """

    def __init__(
        self,
        pixels: np.ndarray,
        targets: np.ndarray,
        *,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        self.pixels = pixels
        self.targets = np.ascontiguousarray(targets, dtype=np.int64)
        count, own_channels, height, width = pixels.shape
        assert count == len(self.targets)
        channels = channels or own_channels
        self._size = size if size and (size, size) != (height, width) else None
        self._grey = channels < own_channels
        if self._grey:
            mean, deviation = (float(np.mean(mean)),), (float(np.mean(deviation)),)
        self.sample_shape = (channels, size or height, size or width)
        self._counter = threading.Lock()
        self.pictures = Pictures(
            size=self.sample_shape[1], channels=channels, mean=mean, deviation=deviation
        )
        self._normaliser = Normaliser(self.pictures)

    def __len__(self) -> int:
        return len(self.pixels)

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # `np.take` first copies all of an array that has gaps: CIFAR-10's labels lie between its
        # pixels, and a batch cost 50 ms.
        whole = self.pixels.flags.c_contiguous
        chosen = np.take(self.pixels, indices, axis=0) if whole else self.pixels[indices]
        with self._counter:
            self.bytes_read += chosen.nbytes
        if self._size:
            chosen = scale_images(chosen, self._size)
        out = np.empty((len(chosen), *self.sample_shape), dtype=np.float32)
        if self._grey:
            chosen = np.mean(chosen, axis=1, dtype=np.float32, keepdims=True)
        self._normaliser.write(chosen, out, flip=False)
        assert self.targets is not None
        return torch.from_numpy(out), torch.from_numpy(np.take(self.targets, indices))


def scale_images(pixels: np.ndarray, size: int) -> np.ndarray:
    """Images of bytes, (count, channels, height, width), scaled bilinearly to a square."""
    import torch
    from torch.nn import functional

    blocks = []
    for start in range(0, len(pixels), 4096):
        block = torch.from_numpy(np.array(pixels[start : start + 4096]))
        scaled = functional.interpolate(block, size=(size, size), mode="bilinear", antialias=True)
        blocks.append(scaled.contiguous().numpy())
    channels = pixels.shape[1]
    return np.concatenate(blocks) if blocks else np.empty((0, channels, size, size), np.uint8)


def scaled_once(pixels: np.ndarray, size: int | None) -> np.ndarray:
    """A scaled copy where it is small enough, else the array as it is."""
    count, channels, height, width = pixels.shape
    if size is None or (size, size) == (height, width):
        return pixels
    if count * channels * size * size > SCALED_COPY_LIMIT:
        return pixels
    return scale_images(pixels, size)


def cached_array(
    folder: Path, files: list[Path], tag: str, make: Callable[[], np.ndarray]
) -> np.ndarray:
    """The array that `make` gives, kept in a memory-mapped file that processes share.

    The key holds the files' names, sizes and times of change, so that a changed file is
    read again; a note beside the array has its SHA-256, so that a damaged one is made again.
    Without a place to write to, the array stays in memory.
    """
    stats = [path.stat() for path in files]
    identity = [
        f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in zip(files, stats, strict=True)
    ]
    target = folder / "arrays" / f"{tag}-{fingerprint_of(['1', *identity])}.npy"
    # What numpy raises for a damaged header can be nearly anything; the array is then made again.
    with contextlib.suppress(Exception):
        check_kept(target)
        kept = np.asarray(np.load(target, mmap_mode="r", allow_pickle=False))
        if kept.dtype == np.uint8:
            return kept
    array = make()
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            _write_note(target, sum_of(target))
        finally:
            temporary.unlink(missing_ok=True)
        return np.asarray(np.load(target, mmap_mode="r", allow_pickle=False))
    return array


def check_kept(path: Path) -> None:
    """Raise ValueError or OSError where a kept array is not what was written.

    A file that was last changed well before its content was last summed up is not read for this.
    """
    note = checked(read_json_file(_note_of(path)), {"changed": int, "seen": int, "sum": ONE_LINE})
    changed = path.stat().st_mtime_ns
    if changed == note["changed"] and note["seen"] - changed > SETTLED:
        return
    if sum_of(path) != note["sum"]:
        raise ValueError(f"{path} is not what was written")
    with contextlib.suppress(OSError):
        _write_note(path, note["sum"])


def _write_note(path: Path, content: str) -> None:
    note = {"changed": path.stat().st_mtime_ns, "seen": time.time_ns(), "sum": content}
    write_json(_note_of(path), note)


def _note_of(path: Path) -> Path:
    return path.with_suffix(".json")
