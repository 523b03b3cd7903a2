"""What every data set offers, and what one asks for. Imports no torch."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError
from paceline.schema.signature import Pictures, Signature
from paceline.text import user_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

    from paceline.data.samples import Samples


class Source(abc.ABC):
    """Samples that can be fetched by number, from any thread."""

    sample_shape: tuple[int, ...]
    """Shape of one input as `fetch` gives it; (channels, height, width) for images."""

    sample_dtype: str = "float32"
    """Type of the inputs, as torch and numpy both name it."""

    concurrent: bool = True
    """True: may be fetched in a background thread."""

    ordered: bool = False
    """True: numbers are places in an order of the user's own, which is not shuffled again."""

    processes: int = 0
    """Processes that fetch batches ahead, all workers together; 0: none but the training's own."""

    may_be_copied: bool = False
    """True: where reading is slow, other processes may read from copies (see `readers`)."""

    readers: int = 0
    """How many do, as reading has shown, where `processes` does not say it."""

    targets: np.ndarray | None = None
    """Every target in sample order, as `fetch` gives it, where known without reading samples."""

    bytes_read: int = 0
    """Bytes of data files that `fetch` has read so far; the cache of decoded images costs none."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (n, *sample_shape) and targets (n,) of the samples with these numbers.

        The result depends on the arguments and the seed the source was opened with, on nothing
        else: not on who asks, in which order, or how often.
        """

    def samples(
        self, indices: np.ndarray, *, epoch: int, augment: bool, sizes: Sequence[int] = ()
    ) -> Samples:
        """What a step gets of these samples; `sizes`: the parts in which it is computed."""
        from paceline.data.samples import Stacked

        return Stacked(*self.fetch(indices, epoch=epoch, augment=augment))

    @property
    def labels(self) -> np.ndarray | None:
        """Every sample's class where known, to count and to divide by; never trained on."""
        return self.targets

    @property
    def skipped_while_reading(self) -> tuple[Skipped, ...]:
        """Samples found damaged only when they were decoded, and what was done."""
        return ()

    def close(self) -> None:  # noqa: B027  most sources hold nothing
        """Give back threads and files; a closed source opens them again when it is asked."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A file that takes no part, and why."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """What data to open, and in which form."""

    name: str
    """A name of `names()`, a folder of class folders, or 'package.module:callable'."""
    root: str | None = None
    """Folder that holds the data sets."""
    image_size: int | None = None
    """Height and width to scale to; none: the data set's own."""
    channels: int | None = None
    """1 for grey, 3 for colour; none: the data set's own."""
    limit: int | None = None
    """Use only this many samples per split: the first of a seeded shuffle."""
    validation: float = 0.2
    """Fraction held back for testing where the data comes without a split."""
    seed: int = 0
    """Seed of made splits, of `limit` and of augmentation."""
    cache: str | None = None
    """Folder for decoded data; none: ~/.cache/paceline."""
    workers: int = 0
    """Threads that decode images; 0: as many as cores are visible to this process."""
    processes: int = 0
    """Processes that fetch samples of the user's own dataset; 0: the training's own."""
    nested: bool = False
    """Samples may be anything that a step takes, not only pairs (input, target)."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; none: as torch's DataLoader does."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this one data set, such as `shape` of `synthetic` or `flip` of a folder."""

    def __post_init__(self) -> None:
        if not 0.0 < self.validation < 1.0:
            raise DataError(
                f"validation = {self.validation} is not a fraction between 0 and 1; try 0.2"
            )
        if self.image_size is not None and self.image_size < 1:
            raise DataError(f"image_size = {self.image_size} is not a number of pixels; try 224")
        if self.channels not in (None, 1, 3):
            raise DataError(f"channels = {self.channels} is neither 1 (grey) nor 3 (colour)")
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit = {self.limit} leaves no sample; use 1 or more")
        if self.workers < 0:
            raise DataError(f"workers = {self.workers} is not a number of threads; try 0")
        if self.seed < 0:
            raise DataError(f"seed = {self.seed} is negative; use 0 or more")

    @property
    def cache_folder(self) -> Path:
        """Where decoded data is kept."""
        return Path(self.cache) if self.cache else Path.home() / ".cache" / "paceline"

    @property
    def search_folders(self) -> list[Path]:
        """Folders that may hold the data set, the user's own first."""
        downloaded = self.cache_folder / "data"
        return ([user_path(self.root)] if self.root else []) + [downloaded]

    def check_options(self, *valid: str) -> None:
        """Refuse options that this data set does not know."""
        for key in self.options:
            if key not in valid:
                known = ", ".join(sorted(valid)) if valid else "none"
                raise DataError(f"data set {self.name!r} has no option {key!r}; it has: {known}")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A training and a test part, and what is known about them."""

    name: str
    train: Source
    test: Source
    classes: tuple[str, ...]
    """Names of the classes; empty where the user's own data does not tell."""
    sample_shape: tuple[int, ...]
    fingerprint: str
    """The same on every machine that holds the same data."""
    skipped: tuple[Skipped, ...] = ()
    """Files left out before the samples were counted."""
    notes: tuple[str, ...] = ()
    """What a user should know: made splits, limits, a cache that could not be used."""
    pictures: Pictures | None = None
    """How a picture becomes a sample; None where that is the user's own code."""

    @property
    def left_out(self) -> str:
        """What a training says of files that take no part; empty where all do."""
        if not self.skipped:
            return ""
        first, more = self.skipped[0], len(self.skipped) - 1
        rest = f" and {more} more" if more else ""
        return (
            f"note: files of {self.name} take no part: {first.path} ({first.reason}){rest};"
            f" `paceline data FOLDER` lists them"
        )

    @property
    def signature(self) -> Signature:
        """What a model that is trained on it takes."""
        return Signature(
            shape=tuple(self.sample_shape),
            dtype=self.train.sample_dtype,
            classes=tuple(self.classes),
            pictures=self.pictures,
            data=self.name,
        )

    def close(self) -> None:
        self.train.close()
        self.test.close()


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file of a data set that can be downloaded."""

    file: str
    md5: str
    size: int
    mirrors: tuple[str, ...]
    """Complete addresses, tried in this order."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What can be said of a data set without opening it."""

    name: str
    summary: str
    image_size: int | None
    channels: int | None
    classes: int | None
    obtain: str
    """How to get it, in one sentence."""
    downloads: tuple[Download, ...] = ()


def fingerprint_of(parts: Iterable[str | bytes]) -> str:
    """A short, stable hash over parts; the order counts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
