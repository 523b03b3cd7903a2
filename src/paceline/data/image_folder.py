"""`image_folder`: photographs in class folders, with the folder's split or a made one.

Bad files. When the folder is opened, the header and the end of every file are checked
(once per machine, remembered): empty, cut short, tiny or foreign files are left out
before samples are counted, and stated. Damage inside a file shows only when it is
decoded, in the middle of an epoch: then the next sample of the same class takes its
place, the same one on every worker, and `skipped_while_reading` tells. It is not
remembered for the next run, so that a resumed run counts the same samples.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.arrays import Normaliser
from paceline.data.base import DataRequest, Dataset, DataSpec, Skipped, Source, fingerprint_of
from paceline.data.cache import ImageCache
from paceline.data.images import DECODER_VERSION, ImageDamagedError, decode_image, photographs
from paceline.data.listing import Listing, find_bad_files, list_folder, usable
from paceline.data.splits import FLIP_STREAM, limited, stratified_split
from paceline.errors import DataError

if TYPE_CHECKING:
    import torch

SPEC = DataSpec(
    name="image_folder",
    summary="your photographs: a folder with one folder per class, or train/ and val/ with those",
    image_size=224,
    channels=3,
    classes=None,
    obtain="give the folder as data = 'path/to/folder', or its name below PACELINE_DATA",
)

# How many samples of the same class are tried in place of a damaged one.
REPLACEMENTS = 16


class DecodePool:
    """Threads that decode, started when the first image has to be decoded."""

    def __init__(self, workers: int) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, tasks: list[Callable[[], None]]) -> None:
        """Run all tasks and return when all are done."""
        if self.workers == 1 or len(tasks) == 1:
            for task in tasks:
                task()
            return
        for future in [self._threads().submit(task) for task in tasks]:
            future.result()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            # A forked child has the object but not the threads.
            if self._pool is None or self._process != os.getpid():
                self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="paceline-decode")
                self._process = os.getpid()
                weakref.finalize(self, self._pool.shutdown, wait=False)
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None and self._process == os.getpid():
                self._pool.shutdown(wait=True)
            self._pool = None


@dataclass(frozen=True, kw_only=True)
class FolderParts:
    """What the training and the test source of one folder share."""

    listing: Listing
    cache: ImageCache | None
    pool: DecodePool
    size: int
    channels: int
    seed: int
    flip: bool


class ImageFolderSource(Source):
    """Photographs, decoded at most once and kept in the cache; see the module for bad files."""

    def __init__(self, parts: FolderParts, files: np.ndarray) -> None:
        self._parts = parts
        self._files = files
        self.sample_shape = (parts.channels, parts.size, parts.size)
        listed = parts.listing.files
        self.targets = np.array([listed[number].label for number in files], dtype=np.int64)
        self._normaliser = Normaliser(photographs(parts.size, parts.channels))
        self._lock = threading.Lock()
        self._flips: dict[int, np.ndarray] = {}
        self._skipped: dict[str, Skipped] = {}

    def __len__(self) -> int:
        return len(self._files)

    @property
    def skipped_while_reading(self) -> tuple[Skipped, ...]:
        with self._lock:
            return tuple(self._skipped[path] for path in sorted(self._skipped))

    def close(self) -> None:
        self._parts.pool.close()

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        out = np.empty((len(indices), *self.sample_shape), dtype=np.float32)
        flips = self._flips_of(epoch)[indices] if augment and self._parts.flip else None
        to_decode: list[Callable[[], None]] = []
        for place, index in enumerate(np.asarray(indices).tolist()):
            flip = flips is not None and bool(flips[place])
            cached = self._cached(index)
            if cached is not None:
                self._normaliser.write(cached, out[place], flip=flip)
            else:
                to_decode.append(partial(self._decode_into, index, out[place], flip))
        if to_decode:
            self._parts.pool.run(to_decode)
        assert self.targets is not None
        return torch.from_numpy(out), torch.from_numpy(np.take(self.targets, indices))

    def _flips_of(self, epoch: int) -> np.ndarray:
        """Which samples are mirrored in this epoch: one draw for all, whoever asks."""
        with self._lock:
            if epoch not in self._flips:
                generator = np.random.default_rng([self._parts.seed, FLIP_STREAM, epoch])
                while len(self._flips) > 1:
                    del self._flips[next(iter(self._flips))]
                self._flips[epoch] = generator.random(len(self), dtype=np.float32) < 0.5
            return self._flips[epoch]

    def _cached(self, index: int) -> np.ndarray | None:
        cache = self._parts.cache
        return None if cache is None else cache.read(int(self._files[index]))

    def _decode_into(self, index: int, out: np.ndarray, flip: bool) -> None:
        self._normaliser.write(self._pixels(index), out, flip=flip)

    def _pixels(self, index: int) -> np.ndarray:
        """The sample's picture, or that of the next sample of its class that has one."""
        try:
            return self._decoded(index)
        except ImageDamagedError as error:
            reason = str(error)
        assert self.targets is not None
        mates = np.flatnonzero(self.targets == self.targets[index])
        after = np.roll(mates, -int(np.searchsorted(mates, index)) - 1)
        path = self._parts.listing.files[self._files[index]].path
        for mate in after[: min(REPLACEMENTS, len(mates) - 1)].tolist():
            try:
                pixels = self._decoded(mate)
            except ImageDamagedError:
                continue
            instead = self._parts.listing.files[self._files[mate]].path
            skipped = Skipped(path=path, reason=f"{reason}; {instead} took its place")
            with self._lock:
                self._skipped[path] = skipped
            return pixels
        raise DataError(
            f"{self._parts.listing.folder / path} cannot be decoded ({reason}), nor can the"
            f" {min(REPLACEMENTS, len(mates) - 1)} images after it; is the disk still there?"
        )

    def _decoded(self, index: int) -> np.ndarray:
        cached = self._cached(index)
        if cached is not None:
            return cached
        row = int(self._files[index])
        parts = self._parts
        try:
            data = (parts.listing.folder / parts.listing.files[row].path).read_bytes()
        except OSError as error:
            raise ImageDamagedError(error.strerror or str(error)) from error
        with self._lock:
            self.bytes_read += len(data)
        pixels = decode_image(data, parts.size, parts.channels)
        if parts.cache is not None:
            parts.cache.write(row, pixels)
        return pixels


def open_image_folder(request: DataRequest, folder: Path) -> Dataset:
    """Open a folder of class folders; options: flip (true), cache (true)."""
    request.check_options("flip", "cache")
    listing = list_folder(folder)
    pool = DecodePool(request.workers)
    key = listing.cache_key
    skipped = find_bad_files(listing, request.cache_folder, key, pool.workers)
    good = usable(listing, skipped)
    size = request.image_size or SPEC.image_size or 224
    channels = request.channels or SPEC.channels or 3
    cache = _open_cache(request, key, len(listing.files), (channels, size, size))
    parts = FolderParts(
        listing=listing,
        cache=cache,
        pool=pool,
        size=size,
        channels=channels,
        seed=request.seed,
        flip=_switch(request.options, "flip"),
    )
    notes = []
    if listing.split:
        side = np.array([listing.files[number].part for number in good])
        train, test = good[side == 0], good[side == 1]
    else:
        labels = np.array([listing.files[number].label for number in good])
        chosen, held_back = stratified_split(labels, request.validation, request.seed)
        train, test = good[chosen], good[held_back]
        if not len(test):
            raise DataError(f"{folder} holds one image per class; a test part needs more")
        notes.append(
            f"{len(test)} of {len(good)} images are held back for testing"
            f" (validation = {request.validation}, seed = {request.seed})"
        )
    if listing.other_files:
        notes.append(f"{listing.other_files} files that are not images were passed over")
    if cache is not None and cache.problem:
        notes.append(f"decoded images are not kept in {cache.folder}: {cache.problem}")
    return Dataset(
        name=folder.name,
        train=limited(ImageFolderSource(parts, train), request.limit, request.seed),
        test=limited(ImageFolderSource(parts, test), request.limit, request.seed),
        classes=listing.classes,
        sample_shape=(channels, size, size),
        fingerprint=listing.fingerprint,
        skipped=skipped,
        notes=tuple(notes),
        pictures=photographs(size, channels),
    )


def _open_cache(
    request: DataRequest, key: str, rows: int, shape: tuple[int, ...]
) -> ImageCache | None:
    if not _switch(request.options, "cache"):
        return None
    name = fingerprint_of([DECODER_VERSION, key, str(shape)])
    return ImageCache(request.cache_folder / "images" / name, rows, shape)


def _switch(options: Any, key: str) -> bool:
    value = options.get(key, True)
    if not isinstance(value, bool):
        raise DataError(f"{key} = {value!r} of a folder of images must be true or false")
    return value
