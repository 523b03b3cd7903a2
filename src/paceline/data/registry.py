"""Names of data sets, and how each is opened. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.base import DataRequest, Dataset, DataSpec
from paceline.errors import DataError, unknown_name
from paceline.references import PARQUET
from paceline.schema.registry import Registry, imported
from paceline.text import user_path

if TYPE_CHECKING:
    from torch.utils.data import Dataset as MapDataset

DATA_SETS: Registry[str] = Registry("data set", "paceline.data", {
    "digits": "paceline.data.digits:open_digits",
    "mnist": "paceline.data.mnist:open_mnist",
    "cifar10": "paceline.data.cifar10:open_cifar10",
    "image_folder": "paceline.data.image_folder:open_image_folder",
    "synthetic": "paceline.data.synthetic:open_synthetic",
}, str)  # fmt: skip
"""By name the function that opens it, whose module has a `SPEC`; imported when it is used."""


def names() -> list[str]:
    """Names of the data sets that come with Paceline.

    >>> "mnist" in names()
    True
    """
    return list(DATA_SETS)


def spec(name: str) -> DataSpec:
    """What is known of a data set without opening it."""
    if name not in DATA_SETS:
        raise DataError(unknown_name("data set", name, names()))
    found = importlib.import_module(DATA_SETS[name].partition(":")[0]).SPEC
    assert isinstance(found, DataSpec)
    return found


def open_dataset(request: DataRequest) -> Dataset:
    """Open the data set that the request names.

    >>> dataset = open_dataset(DataRequest(name="digits"))
    >>> len(dataset.train), len(dataset.test), dataset.sample_shape
    (1438, 359, (1, 28, 28))
    """
    dataset = _open(request)
    if request.limit is None:
        return dataset
    note = (
        f"limited to {len(dataset.train)} training and {len(dataset.test)} test samples"
        f" (limit = {request.limit}, seed = {request.seed})"
    )
    return replace(dataset, notes=(*dataset.notes, note))


def _open(request: DataRequest) -> Dataset:
    from paceline.references import is_reference

    name = request.name
    if name == "image_folder":
        if not request.root:
            raise DataError(
                "data set 'image_folder' needs a folder: write data = 'path/to/folder', or point"
                " PACELINE_DATA or --data to it"
            )
        return _open_folder(request, user_path(request.root))
    if name.startswith(PARQUET):
        parquet: Callable[[DataRequest], Dataset] = _load("paceline.data.parquet:open_parquet")
        return parquet(request)
    if name in DATA_SETS:
        opener: Callable[[DataRequest], Dataset] = _load(DATA_SETS[name])
        return opener(request)
    if is_reference(name):
        own: Callable[[DataRequest], Dataset] = _load("paceline.data.own:open_reference")
        return own(request)
    folder = find_folder(request)
    if folder is None:
        looked = f" There is no such folder here or in {request.root}." if request.root else ""
        choices = [*names(), *folders_below(request.root)]
        raise DataError(
            unknown_name("data set", name, choices)
            + f", a folder of class folders, parquet:PATH, or 'package.module:callable'.{looked}"
        )
    return _open_folder(request, folder)


def is_here(request: DataRequest) -> bool:
    """Whether the files of a data set are in place; they are not opened."""
    finders = {
        "digits": "paceline.data.digits:digits_file",
        "mnist": "paceline.data.mnist:mnist_folder",
        "cifar10": "paceline.data.cifar10:cifar10_place",
    }
    if request.name == "image_folder":
        return bool(folders_below(request.root))
    if request.name.startswith(PARQUET):
        return find_folder(request) is not None
    if request.name not in finders:
        return request.name in DATA_SETS or find_folder(request) is not None
    try:
        finder = _load(finders[request.name])
        finder() if request.name == "digits" else finder(request)
    except DataError:
        return False
    return True


def find_folder(request: DataRequest) -> Path | None:
    """The folder that the request names: by its path, or by its name below the root."""
    name = request.name.removeprefix(PARQUET)
    places = [user_path(name)]
    places += [root / name for root in request.search_folders]
    may_be_file = name != request.name
    return next((p for p in places if p.is_dir() or (may_be_file and p.is_file())), None)


def folders_below(root: str | None) -> list[str]:
    """Folders below the root that may be opened by name as image folders."""
    place = user_path(root) if root else None
    if place is None or not place.is_dir():
        return []
    return sorted(
        entry.name
        for entry in place.iterdir()
        if entry.is_dir()
        and entry.name not in DATA_SETS
        and any(child.is_dir() for child in entry.iterdir())
    )


def _open_folder(request: DataRequest, folder: Path) -> Dataset:
    opener: Callable[[DataRequest, Path], Dataset] = _load(DATA_SETS["image_folder"])
    return opener(request, folder)


def _load(place: str) -> Any:
    return imported(place, "the data set")


def from_datasets(
    train: MapDataset[Any], test: MapDataset[Any], *, seed: int = 0, name: str = "own data"
) -> Dataset:
    """A data set from two map-style datasets of the user's own."""
    from paceline.data import own

    return own.from_datasets(train, test, seed=seed, name=name)
