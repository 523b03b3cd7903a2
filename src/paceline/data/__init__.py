"""Data sets: samples that can be fetched by number, from files or from the user's own code.

    request = DataRequest(name="mnist", root="data")
    dataset = open_dataset(request)
    inputs, targets = dataset.train.fetch(numbers, epoch=0, augment=True)

Importing this package imports no torch; opening a data set does.
"""

from __future__ import annotations

from paceline.data.base import DataRequest, Dataset, DataSpec, Download, Skipped, Source
from paceline.data.registry import (
    folders_below,
    from_datasets,
    is_here,
    names,
    open_dataset,
    spec,
)

__all__ = [
    "DataRequest",
    "DataSpec",
    "Dataset",
    "Download",
    "Skipped",
    "Source",
    "folders_below",
    "from_datasets",
    "is_here",
    "names",
    "open_dataset",
    "spec",
]
