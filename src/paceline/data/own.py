"""The user's own data: any map-style dataset, from a reference or from Python.

A map-style dataset has a length and gives an (input, target) pair for a number. Its
augmentations draw from the global random generators of torch, numpy and Python: these
are seeded before each item from (seed, epoch, number) and put back afterwards, so that a
sample looks the same whichever worker fetches it, and after a resume.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from paceline.data.base import DataRequest, Dataset, Source, fingerprint_of
from paceline.data.splits import ITEM_STREAM, Subset, limited, plain_split, stratified_split
from paceline.errors import DataError

REMEDY = "give a dataset with __len__ and __getitem__ that returns (input, target)"


class MapSource(Source):
    """Items of a map-style dataset, one by one; in the asking thread, as RNGs are global."""

    concurrent = False

    def __init__(self, dataset: Any, *, seed: int, what: str = "data set") -> None:
        self._dataset, self._seed, self._what = dataset, seed, what
        self._lock = threading.Lock()
        self._length = _length(dataset, what)
        first, _ = self._items(np.array([0]), epoch=0)
        self.sample_shape = tuple(first.shape[1:])
        self.targets = _known_targets(dataset, self._length)

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
        except Exception as error:
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
        if not targets.is_floating_point() and targets.ndim == 1:
            self.targets = targets.numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        return (
            _as_input(self._inputs.index_select(0, numbers)),
            _as_target(self._targets.index_select(0, numbers)),
        )


def _as_input(tensor: torch.Tensor) -> torch.Tensor:
    """Floats as float32, bytes as floats from 0 to 1, other integers as they are."""
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.float32).div_(255)
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _as_target(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _input_tensor(value: Any, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return _as_input(value)
    if hasattr(value, "getbands"):  # A picture of Pillow: channels first, from 0 to 1.
        pixels = np.array(value)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        return _as_input(torch.from_numpy(np.ascontiguousarray(pixels)))
    try:
        return _as_input(torch.as_tensor(np.asarray(value)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: input is a {type(value).__name__}, not a tensor") from error


def _target_tensor(value: Any, where: str) -> torch.Tensor:
    try:
        return _as_target(torch.as_tensor(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: target {value!r} is neither number nor tensor") from error


def _length(dataset: Any, what: str) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{what} is a {type(dataset).__name__}; {REMEDY}")
    length = len(dataset)
    if length < 1:
        raise DataError(f"{what} is empty; training needs at least one sample")
    return length


def _known_targets(dataset: Any, length: int) -> np.ndarray | None:
    """Labels that the dataset lists itself, as torchvision's do in `targets`."""
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
    named = getattr(dataset, "classes", None)
    if isinstance(named, list | tuple) and named:
        return tuple(str(name) for name in named)
    known = [part.targets for part in (train, test) if part.targets is not None]
    if not known or train.targets is None:
        return ()
    return tuple(str(label) for label in range(max(int(part.max()) for part in known) + 1))


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
        notes += ("the number of classes is not known from the data; the model must say it",)
    identity = [name, str(len(train)), str(len(test)), str(train.sample_shape)]
    known = [part.targets.tobytes() for part in (train, test) if part.targets is not None]
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
    """Call the user's function; it returns one map-style dataset or a (train, test) pair.

    The request's options are its keyword arguments.
    """
    from paceline.references import resolve

    function = resolve(request.name, "data")
    try:
        made = function(**request.options)
    except Exception as error:
        raise DataError(
            f"data {request.name!r} raised {type(error).__name__}: {error}; correct the function"
            " or its options"
        ) from error
    if isinstance(made, Dataset):
        return made
    if isinstance(made, tuple):
        if len(made) != 2:
            raise DataError(
                f"data {request.name!r} returned {len(made)} values; return one dataset or a"
                " (train, test) pair"
            )
        both = from_datasets(made[0], made[1], seed=request.seed, name=request.name)
        return _described(
            request.name,
            limited(both.train, request.limit, request.seed),
            limited(both.test, request.limit, request.seed),
            made[0],
            (),
        )
    whole = as_source(made, seed=request.seed, what=f"data {request.name!r}")
    if len(whole) < 2:
        raise DataError(f"data {request.name!r} has one sample; a test part needs a second")
    if whole.targets is None:
        split = plain_split(len(whole), request.validation, request.seed)
    else:
        split = stratified_split(whole.targets, request.validation, request.seed)
    note = (
        f"{len(split[1])} of {len(whole)} samples are held back for testing"
        f" (validation = {request.validation}, seed = {request.seed})"
    )
    train, test = (limited(Subset(whole, part), request.limit, request.seed) for part in split)
    if not len(test):
        raise DataError(f"data {request.name!r} has one sample per class; a test part needs more")
    return _described(request.name, train, test, made, (note,))
