"""`digits`: 1,797 real handwritten digits that scikit-learn carries; nothing to download."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np

from paceline.data.arrays import ArraySource, scaled_once
from paceline.data.base import DataRequest, Dataset, DataSpec, fingerprint_of
from paceline.data.splits import Subset, limited, stratified_split
from paceline.errors import DataError

SPEC = DataSpec(
    name="digits",
    summary="1,797 handwritten digits, 8x8 grey, scaled to 28x28; comes with scikit-learn",
    image_size=28,
    channels=1,
    classes=10,
    obtain="nothing to do: it comes with the scikit-learn package",
)

MEAN, DEVIATION = 0.3051, 0.3245
# The split is part of the data set, so that accuracies can be compared: not the user's seed.
SPLIT_SEED, SPLIT_FRACTION = 0, 0.2


def digits_file() -> Path:
    """The table of pixels inside the installed package, found without importing it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "data set 'digits' needs the package scikit-learn: pip install scikit-learn"
        )
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"{path} is missing; install scikit-learn again")
    return path


def open_digits(request: DataRequest) -> Dataset:
    """Open the digits: the same 80% for training and 20% for testing everywhere."""
    request.check_options()
    path = digits_file()
    try:
        content = gzip.decompress(path.read_bytes())
        table = np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.float32)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); install scikit-learn again") from error
    if table.ndim != 2 or table.shape[1] != 65:
        raise DataError(f"{path} is damaged (shape {table.shape}); install scikit-learn again")
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    targets = table[:, 64].astype(np.int64)
    size = request.image_size or SPEC.image_size
    whole = ArraySource(
        scaled_once(pixels, size),
        targets,
        mean=(MEAN,),
        deviation=(DEVIATION,),
        size=size,
        channels=request.channels,
    )
    train, test = stratified_split(targets, SPLIT_FRACTION, SPLIT_SEED)
    return Dataset(
        name=SPEC.name,
        train=limited(Subset(whole, train), request.limit, request.seed),
        test=limited(Subset(whole, test), request.limit, request.seed),
        classes=tuple(str(digit) for digit in range(10)),
        sample_shape=whole.sample_shape,
        fingerprint=fingerprint_of(["digits", content]),
        pictures=whole.pictures,
    )
