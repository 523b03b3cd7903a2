"""The user's own data: any map-style dataset, from a reference or from Python.

Inputs and targets reach the model and the loss as torch's DataLoader would collate them: tensors
and arrays keep their dtype and their values, numbers become int64 and float64. Pictures of Pillow,
which a DataLoader refuses, become tensors from 0 to 1 as torchvision's ToTensor makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from paceline.data.base import DataRequest, Dataset, Source, fingerprint_of
from paceline.data.items import CollatedSource, MapSource, TensorSource, length_of
from paceline.data.ordered import Ordered, OrderedSource, as_stream
from paceline.data.splits import Subset, limited, plain_split, stratified_split
from paceline.errors import DataError

MOST_CLASSES = 2**16
"""Whole numbers above this, and above the number of samples, are no labels of classes."""


def as_source(
    dataset: Any, *, seed: int, what: str = "data set", request: DataRequest | None = None
) -> Source:
    """A source over a map-style dataset; a TensorDataset is indexed directly."""
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, Ordered):
        inner = as_source(dataset.dataset, seed=seed, what=what, request=request)
        return OrderedSource(inner, dataset, seed=seed, what=what)
    nested = request is not None and request.nested
    collate = request.collate_fn if request is not None else None
    if isinstance(dataset, IterableDataset):
        limit = request.limit if request is not None else None
        source = as_stream(dataset, limit, collate=collate, nested=nested, seed=seed, what=what)
        source.processes = request.processes if request is not None else 0
        return source
    tensors = dataset.tensors if type(dataset) is TensorDataset else ()
    if collate is None and (len(tensors) == 2 or (tensors and nested)):
        length_of(dataset, what)
        return TensorSource(*tensors)
    source = (
        CollatedSource(dataset, collate, seed=seed, what=what)
        if nested
        else MapSource(dataset, seed=seed, what=what)
    )
    source.processes = request.processes if request is not None else 0
    return source


def _classes(train: Source, test: Source, dataset: Any) -> tuple[str, ...]:
    while isinstance(dataset, TorchSubset | Ordered):
        dataset = dataset.dataset
    named = getattr(dataset, "classes", None)
    transformed = getattr(dataset, "target_transform", None) is not None
    if isinstance(named, list | tuple) and named and not transformed:
        return tuple(str(name) for name in named)
    listed = [
        part.listed if isinstance(part, OrderedSource) else part.labels for part in (train, test)
    ]
    known = [labels for labels in listed if labels is not None]
    if listed[0] is None:
        return ()
    count = max(int(part.max()) for part in known) + 1
    return tuple(map(str, range(count))) if count <= max(MOST_CLASSES, len(train)) else ()


def from_datasets(
    train: Any,
    test: Any,
    *,
    seed: int = 0,
    name: str = "own data",
    request: DataRequest | None = None,
) -> Dataset:
    """A data set from two map-style datasets.

    >>> import torch
    >>> pair = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> from_datasets(pair, pair).sample_shape
    (2,)
    """
    parts = [
        as_source(one, seed=seed, what=f"{name} ({part})", request=request)
        for one, part in ((train, "train"), (test, "test"))
    ]
    nested = request is not None and request.nested
    if not nested and parts[0].sample_shape != parts[1].sample_shape:
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
    is_dataset = is_dataset or isinstance(value, IterableDataset)
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
        both = from_datasets(made[0], made[1], seed=request.seed, name=name, request=request)
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
    if isinstance(made, Ordered | IterableDataset):
        what = "a stream"
        if isinstance(made, Ordered):
            what = "given with an order of its own (a sampler, or drop_last)"
        raise DataError(
            f"data {name!r} is {what}, of which no part can be held back for testing: give a pair"
            " (train, test)"
        )
    whole = as_source(made, seed=request.seed, what=f"data {name!r}", request=request)
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
