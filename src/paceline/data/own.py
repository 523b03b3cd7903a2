"""The user's own data: any map-style dataset, from a reference or from Python.

A map-style dataset has a length and gives an (input, target) pair for a number. Its
augmentations draw from the global random generators of torch, numpy and Python: these
are seeded before each item from (seed, epoch, number) and put back afterwards, so that a
sample looks the same whichever worker fetches it, and after a resume.

Inputs and targets reach the model and the loss as torch's DataLoader would collate them: tensors
and arrays keep their dtype and their values, numbers become int64 and float64. Pictures of Pillow,
which a DataLoader refuses, become tensors from 0 to 1 as torchvision's ToTensor makes them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset

from paceline.data.base import DataRequest, Dataset, Source, fingerprint_of
from paceline.data.splits import ITEM_STREAM, Subset, limited, plain_split, stratified_split
from paceline.errors import DataError

REMEDY = "give a dataset with __len__ and __getitem__ that returns (input, target)"
CHECKED = 5
"""Samples, spread over a dataset, whose targets must be as it lists them to be believed."""
MOST_CLASSES = 2**16
"""Whole numbers above this, and above the number of samples, are no labels of classes."""


class MapSource(Source):
    """Items of a map-style dataset, one by one; in the asking thread, as RNGs are global."""

    concurrent = False

    def __init__(self, dataset: Any, *, seed: int, what: str = "data set") -> None:
        self._dataset, self._seed, self._what = dataset, seed, what
        self._lock = threading.Lock()
        self._length = _length(dataset, what)
        first, _ = self._items(np.array([0]), epoch=0)
        self.sample_shape = tuple(first.shape[1:])
        self.sample_dtype = str(first.dtype).removeprefix("torch.")
        self._labels = self._believed_labels()

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
        with self._lock:
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            try:
                pairs = [self._item(index, epoch) for index in np.asarray(indices).tolist()]
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
        return self._stacked([pair[0] for pair in pairs], indices), self._stacked(
            [pair[1] for pair in pairs], indices
        )

    def _item(self, index: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        sequence = np.random.SeedSequence([self._seed, ITEM_STREAM, epoch, index])
        word = int(sequence.generate_state(1)[0])
        random.seed(word)
        np.random.seed(word)
        torch.default_generator.manual_seed(word)
        try:
            item = self._dataset[index]
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{self._what}: item {index} raised {type(error).__name__}: {error}; correct the"
                " dataset"
            ) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            shown = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
            raise DataError(f"{self._what}: item {index} is {shown}, not a pair; {REMEDY}")
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


class TensorSource(Source):
    """Inputs and targets that are already two tensors."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs.detach(), targets.detach()
        self.sample_shape = tuple(inputs.shape[1:])
        self.sample_dtype = str(inputs.dtype).removeprefix("torch.")
        if targets.ndim == 1 and not (targets.is_floating_point() or targets.is_complex()):
            self.targets = self._targets.numpy()

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        return self._inputs.index_select(0, numbers), self._targets.index_select(0, numbers)


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
            " of several inputs, and the model takes one: put them into one tensor, which the model"
            " takes apart"
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


def _length(dataset: Any, what: str) -> int:
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


def as_source(dataset: Any, *, seed: int, what: str = "data set") -> Source:
    """A source over a map-style dataset; a TensorDataset of two is indexed directly."""
    if isinstance(dataset, Source):
        return dataset
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        _length(dataset, what)
        inputs, targets = dataset.tensors
        return TensorSource(inputs, targets)
    return MapSource(dataset, seed=seed, what=what)


def _classes(train: Source, test: Source, dataset: Any) -> tuple[str, ...]:
    while isinstance(dataset, TorchSubset):
        dataset = dataset.dataset
    named = getattr(dataset, "classes", None)
    transformed = getattr(dataset, "target_transform", None) is not None
    if isinstance(named, list | tuple) and named and not transformed:
        return tuple(str(name) for name in named)
    known = [part.labels for part in (train, test) if part.labels is not None]
    if not known or train.labels is None:
        return ()
    count = max(int(part.max()) for part in known) + 1
    return tuple(map(str, range(count))) if count <= max(MOST_CLASSES, len(train)) else ()


def from_datasets(train: Any, test: Any, *, seed: int = 0, name: str = "own data") -> Dataset:
    """A data set from two map-style datasets.

    >>> pair = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> from_datasets(pair, pair).sample_shape
    (2,)
    """
    parts = [
        as_source(one, seed=seed, what=f"{name} ({part})")
        for one, part in ((train, "train"), (test, "test"))
    ]
    if parts[0].sample_shape != parts[1].sample_shape:
        raise DataError(
            f"{name}: training samples have shape {parts[0].sample_shape}, test samples"
            f" {parts[1].sample_shape}; make them the same"
        )
    return _described(name, parts[0], parts[1], train, ())


def _described(
    name: str, train: Source, test: Source, dataset: Any, notes: tuple[str, ...]
) -> Dataset:
    classes = _classes(train, test, dataset)
    if not classes:
        notes += ("the number of classes is not known from the data; a model may need to be told",)
    identity = [name, str(len(train)), str(len(test)), str(train.sample_shape)]
    known = [part.labels.tobytes() for part in (train, test) if part.labels is not None]
    return Dataset(
        name=name,
        train=train,
        test=test,
        classes=classes,
        sample_shape=train.sample_shape,
        fingerprint=fingerprint_of([*identity, *known]),
        notes=notes,
    )


def open_reference(request: DataRequest) -> Dataset:
    """Call the function that the request names; see `open_own`."""
    from paceline.references import resolve_factory

    return open_own(resolve_factory(request.name, "data"), request, request.name)


def open_own(value: Any, request: DataRequest, name: str) -> Dataset:
    """A data set of the user's own: a map-style dataset, a pair (train, test) of them, or a
    function that gives the one or the other.

    The request's options are the function's keyword arguments.
    """
    is_dataset = isinstance(value, Dataset) or not callable(value)
    is_dataset = is_dataset or (not isinstance(value, type) and hasattr(value, "__getitem__"))
    if is_dataset:
        request.check_options()
        made = value
    else:
        made = _call(value, request, name)
    if isinstance(made, Dataset):
        return made
    if isinstance(made, tuple):
        if len(made) != 2:
            raise DataError(
                f"data {name!r} {'is' if is_dataset else 'returned'} {len(made)} values; give one"
                " dataset or a (train, test) pair"
            )
        both = from_datasets(made[0], made[1], seed=request.seed, name=name)
        return _described(
            name,
            limited(both.train, request.limit, request.seed),
            limited(both.test, request.limit, request.seed),
            made[0],
            (),
        )
    return _split(made, request, name)


def _call(function: Callable[..., Any], request: DataRequest, name: str) -> Any:
    try:
        return function(**request.options)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data {name!r} raised {type(error).__name__}: {error}; correct the function"
            " or its options"
        ) from error


def _split(made: Any, request: DataRequest, name: str) -> Dataset:
    """One dataset, a part of which is held back for testing."""
    whole = as_source(made, seed=request.seed, what=f"data {name!r}")
    if len(whole) < 2:
        raise DataError(f"data {name!r} has one sample; a test part needs a second")
    if whole.labels is None:
        split = plain_split(len(whole), request.validation, request.seed)
    else:
        split = stratified_split(whole.labels, request.validation, request.seed)
    note = (
        f"{len(split[1])} of {len(whole)} samples are held back for testing"
        f" (validation = {request.validation}, seed = {request.seed})"
    )
    train, test = (limited(Subset(whole, part), request.limit, request.seed) for part in split)
    if not len(test):
        raise DataError(f"data {name!r} has one sample per class; a test part needs more")
    return _described(name, train, test, made, (note,))
