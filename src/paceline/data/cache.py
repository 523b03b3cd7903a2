"""Decoded images in a memory-mapped file that all processes of a machine share.

Two files per set of images: `images.bin` holds one row of bytes per image, `sums.bin`
one checksum per row, 0 for a row that is not filled yet. Processes fill rows as they
need them; two that write the same row write the same bytes. A checksum is written after
its row and compared on first use, so that a row torn by a crash is decoded again.

Rows are written with pwrite, not through the mapping: on a full disk that raises an
error, where a store into a mapping would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
import weakref
import zlib
from pathlib import Path

import numpy as np

# Left free on the disk, for checkpoints and for everyone else.
HEADROOM = 256 << 20


class CacheWarning(UserWarning):
    """The cache of decoded images cannot be used; training goes on without it."""


class ImageCache:
    """Rows of bytes that are there or not; without room on the disk, rows never are."""

    def __init__(self, folder: Path, rows: int, shape: tuple[int, ...]) -> None:
        self.folder = folder
        self.problem: str | None = None
        """Why nothing is written, where nothing is."""
        self._rows, self._shape = rows, shape
        self._row_bytes = int(np.prod(shape))
        self._images: np.ndarray | None = None
        self._sums: np.ndarray | None = None
        self._checked = np.zeros(rows, dtype=bool)
        self._descriptors: list[int] = []
        try:
            self._open()
        except OSError as error:
            self._give_up(error.strerror or str(error))
        weakref.finalize(self, _close_all, self._descriptors)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = (self.folder / "images.bin", self.folder / "sums.bin")
        sizes = (self._rows * self._row_bytes, self._rows * 4)
        for path, size in zip(paths, sizes, strict=True):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptors.append(descriptor)
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
        self._images = np.memmap(
            paths[0], dtype=np.uint8, mode="r", shape=(self._rows, *self._shape)
        )
        self._sums = np.memmap(paths[1], dtype="<u4", mode="r", shape=(self._rows,))
        missing = int(np.count_nonzero(self._sums == 0)) * self._row_bytes
        free = shutil.disk_usage(self.folder).free
        if missing and free < missing + HEADROOM:
            self._stop_writing(f"{missing >> 20} MB are needed and {free >> 20} MB are free")

    def read(self, row: int) -> np.ndarray | None:
        """The image of this row, read-only, or None when it has to be decoded."""
        if self._images is None or self._sums is None:
            return None
        expected = int(self._sums[row])
        if not expected:
            return None
        pixels: np.ndarray = self._images[row]
        if not self._checked[row]:
            if _checksum(pixels) != expected:
                return None
            self._checked[row] = True
        return pixels

    def write(self, row: int, pixels: np.ndarray) -> None:
        """Keep this image; a disk without room ends the writing, not the training."""
        if self.problem is not None:
            return
        data = pixels.tobytes()
        try:
            _write_all(self._descriptors[0], data, row * self._row_bytes)
            _write_all(self._descriptors[1], _checksum(pixels).to_bytes(4, "little"), row * 4)
        except OSError as error:
            self._stop_writing(error.strerror or str(error))

    @property
    def filled(self) -> int:
        """How many rows are there."""
        return 0 if self._sums is None else int(np.count_nonzero(self._sums))

    def _give_up(self, problem: str) -> None:
        self._images = self._sums = None
        self._stop_writing(problem)

    def _stop_writing(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            warnings.warn(
                f"decoded images are not kept in {self.folder} ({problem}):"
                " every epoch decodes them again",
                CacheWarning,
                stacklevel=2,
            )


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written


def _checksum(pixels: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(pixels).data) or 1


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
