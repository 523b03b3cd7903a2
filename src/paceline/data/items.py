"""Sources over the user's own datasets: pairs, tensors, and items of any structure.

A map-style dataset has a length and gives a sample for a number. Its augmentations draw from the
global random generators of torch, numpy and Python: these are seeded before each item from (seed,
epoch, number) and put back afterwards, so that a sample looks the same whichever worker fetches it,
and after a resume.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.data.base import Source
from paceline.data.samples import Samples, Stacked
from paceline.data.splits import ITEM_STREAM
from paceline.errors import DataError, PacelineError, UnsupportedError

REMEDY = "give a dataset with __len__ and __getitem__ that returns (input, target)"
CHECKED = 5
"""Samples, spread over a dataset, whose targets must be as it lists them to be believed."""


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Global random numbers go on afterwards as if nothing had been drawn."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(word: int) -> None:
    """Of torch, numpy and Python."""
    random.seed(word)
    np.random.seed(word)
    torch.default_generator.manual_seed(word)


class MapSource(Source):
    """Items of a map-style dataset, one by one; in the asking thread, as RNGs are global."""

    concurrent = False
    may_be_copied = True

    def __init__(self, dataset: Any, *, seed: int, what: str = "data set") -> None:
        self._dataset, self._seed, self._what = dataset, seed, what
        self._lock = threading.Lock()
        self._length = length_of(dataset, what)
        self._labels: np.ndarray | None = None
        self._look()

    def _look(self) -> None:
        first, _ = self._items(np.array([0]), epoch=0)
        self.sample_shape = tuple(first.shape[1:])
        self.sample_dtype = str(first.dtype).removeprefix("torch.")
        self._labels = self._believed_labels()

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock, which belongs to a process."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def labels(self) -> np.ndarray | None:
        return self._labels

    def _believed_labels(self) -> np.ndarray | None:
        """Labels that the dataset lists itself, where its items have them too."""
        listed = _listed_labels(self._dataset, self._length)
        if listed is None:
            return None
        numbers = np.unique(np.linspace(0, self._length - 1, CHECKED).astype(np.int64))
        _, targets = self._items(numbers, epoch=0)
        if targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
            return None
        return listed if np.array_equal(targets.numpy(), listed[numbers]) else None

    def __len__(self) -> int:
        return self._length

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not len(indices):  # A worker whose share of this batch is nothing.
            first_input, first_target = self._items(np.array([0]), epoch=0)
            return first_input[:0], first_target[:0]
        # Without augmentation every epoch sees the same samples, so that tests can be compared.
        return self._items(indices, epoch=epoch + 1 if augment else 0)

    def _items(self, indices: np.ndarray, *, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [
            self._pair(item, index)
            for item, index in zip(self._drawn(indices, epoch), indices, strict=True)
        ]
        return self._stacked([pair[0] for pair in pairs], indices), self._stacked(
            [pair[1] for pair in pairs], indices
        )

    def _drawn(self, indices: np.ndarray, epoch: int) -> list[Any]:
        """The items, each with random numbers of its own."""
        with self._lock, random_kept():
            return [self._item(index, epoch) for index in np.asarray(indices).tolist()]

    def _item(self, index: int, epoch: int) -> Any:
        sequence = np.random.SeedSequence([self._seed, ITEM_STREAM, epoch, index])
        seed_all(int(sequence.generate_state(1)[0]))
        try:
            return self._dataset[index]
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{self._what}: item {index} raised {type(error).__name__}: {error}; correct the"
                " dataset"
            ) from error

    def _pair(self, item: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            shown = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
            raise DataError(
                f"{self._what}: item {index} is {shown}, not a pair; {REMEDY}, or train with a step"
                " of your own, which takes anything"
            )
        where = f"{self._what}: item {index}"
        return _input_tensor(item[0], where), _target_tensor(item[1], where)

    def _stacked(self, tensors: list[torch.Tensor], indices: np.ndarray) -> torch.Tensor:
        try:
            return torch.stack(tensors)
        except RuntimeError as error:
            odd = next(n for n, one in enumerate(tensors) if one.shape != tensors[0].shape)
            raise DataError(
                f"{self._what}: item {indices[odd]} has shape {tuple(tensors[odd].shape)}, item"
                f" {indices[0]} {tuple(tensors[0].shape)}; make all items the same shape"
            ) from error


class CollatedSource(MapSource):
    """Items of any structure, of which a function makes batches: what a step takes."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, *, seed: int, what: str
    ) -> None:
        self._collate = collate or default_collate
        self.sample_shape = ()
        super().__init__(dataset, seed=seed, what=what)

    def _look(self) -> None:
        """Try the function on one sample: what is wrong with it is said before training."""
        found = self.samples(np.array([0]), epoch=0, augment=False)
        with contextlib.suppress(UnsupportedError):
            first = found.inputs
            self.sample_shape = tuple(first.shape[1:])
            self.sample_dtype = str(first.dtype).removeprefix("torch.")

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.samples(indices, epoch=epoch, augment=augment)
        return found.inputs, found.targets

    def samples(
        self, indices: np.ndarray, *, epoch: int, augment: bool, sizes: Sequence[int] = ()
    ) -> Samples:
        # Without augmentation every epoch sees the same samples, so that tests can be compared.
        epoch = epoch + 1 if augment else 0
        if len(sizes) < 2:
            values = self._made(indices, epoch) if len(indices) else None
            return Samples(values, len(indices))
        ends = list(itertools.accumulate(sizes, initial=0))
        parts = [
            Samples(self._made(indices[start:end], epoch) if end > start else None, end - start)
            for start, end in itertools.pairwise(ends)
        ]
        return Samples(None, len(indices), tuple(parts))

    def _made(self, indices: np.ndarray, epoch: int) -> Any:
        items = self._drawn(indices, epoch)
        try:
            return self._collate(items)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(
                f"{self._what}: no batch can be made of items {indices[0]}, ... ({reason}): give a"
                " workload.collate_fn that makes one, as a DataLoader's"
            ) from error


class TensorSource(Source):
    """Inputs and targets that are already tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        inputs, targets = self._tensors[0], self._tensors[-1]
        self.sample_shape = tuple(inputs.shape[1:])
        self.sample_dtype = str(inputs.dtype).removeprefix("torch.")
        pairs = len(tensors) == 2 and targets.ndim == 1
        if pairs and not (targets.is_floating_point() or targets.is_complex()):
            self.targets = targets.numpy()

    def __len__(self) -> int:
        return len(self._tensors[0])

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.samples(indices, epoch=epoch, augment=augment)
        return found.inputs, found.targets

    def samples(
        self, indices: np.ndarray, *, epoch: int, augment: bool, sizes: Sequence[int] = ()
    ) -> Samples:
        numbers = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        return Stacked(*(tensor.index_select(0, numbers) for tensor in self._tensors))


def _tensor(value: Any) -> torch.Tensor:
    """A tensor as a DataLoader makes it of the same value; TypeError where it makes none."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        # Writable and with strides above zero, which a view (a flip, say) need not be.
        return torch.as_tensor(np.require(value, requirements=["C", "W"]))
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int | complex):
        return torch.tensor(value)
    raise TypeError(type(value).__name__)


def _picture(value: Any) -> torch.Tensor:
    """Channels first; bytes and bits from 0 to 1, other pixels as they are."""
    pixels = np.array(value)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    tensor = torch.from_numpy(np.ascontiguousarray(pixels))
    if tensor.dtype is torch.uint8:
        return tensor.to(torch.float32).div_(255)
    return tensor.to(torch.float32) if tensor.dtype is torch.bool else tensor


def _input_tensor(value: Any, where: str) -> torch.Tensor:
    if hasattr(value, "getbands"):  # a picture of Pillow
        return _picture(value)
    try:
        return _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        several = (
            " of several inputs, and the model takes one: train with a step of your own, which"
            " takes anything, or put them into one tensor"
            if isinstance(value, tuple | list | dict)
            else ", not a tensor: make it one in __getitem__"
        )
        raise DataError(f"{where}: input is a {type(value).__name__}{several}") from error


def _target_tensor(value: Any, where: str) -> torch.Tensor:
    try:
        return _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = repr(value) if len(repr(value)) < 60 else f"of type {type(value).__name__}"
        raise DataError(
            f"{where}: target {shown} is neither number nor tensor: make it one in __getitem__"
        ) from error


def length_of(dataset: Any, what: str) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{what} is a {type(dataset).__name__}; {REMEDY}")
    length = len(dataset)
    if length < 1:
        raise DataError(f"{what} is empty; training needs at least one sample")
    return length


def _listed_labels(dataset: Any, length: int) -> np.ndarray | None:
    """What the dataset lists in `targets` or `labels`, as torchvision's do."""
    if getattr(dataset, "target_transform", None) is not None:
        return None  # its items have other targets
    for name in ("targets", "labels"):
        listed = getattr(dataset, name, None)
        if listed is None:
            continue
        try:
            array = np.asarray(listed)
        except (TypeError, ValueError, RuntimeError):
            continue
        if array.shape == (length,) and np.issubdtype(array.dtype, np.integer):
            return array.astype(np.int64)
    return None
