"""`cifar10`: the official binary files, in a folder or still in their archive.

The Python version of CIFAR-10 is a pickle, which could run foreign code: it is not read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paceline.data.arrays import ArraySource, cached_array
from paceline.data.base import DataRequest, Dataset, DataSpec, Download, Source, fingerprint_of
from paceline.data.splits import limited
from paceline.errors import DataError

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
RECORD = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-binary.tar.xz")

SPEC = DataSpec(
    name="cifar10",
    summary="60,000 photographs in 10 classes, 32x32 colour: 50,000 for training, 10,000 to test",
    image_size=32,
    channels=3,
    classes=10,
    obtain="paceline data get cifar10",
    downloads=(
        Download(
            file="cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            size=170052171,
            mirrors=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
    ),
)

AGAIN = "remove it and download it again with `paceline data get cifar10`"


def cifar10_place(request: DataRequest) -> Path:
    """The folder of the .bin files, or the archive."""
    for root in request.search_folders:
        for folder in (root / "cifar10", root):
            for place in (folder / "cifar-10-batches-bin", folder):
                if any((place / name).is_file() for name in TRAIN_FILES + TEST_FILES):
                    return place
            for archive in ARCHIVES:
                if (folder / archive).is_file():
                    return folder / archive
    root = request.search_folders[0] / "cifar10"
    raise DataError(
        f"data set 'cifar10' is not in {root}; download it with `paceline data get cifar10`,"
        " or point PACELINE_DATA or --data to the folder that holds cifar10/"
    )


def parse_records(data: bytes, where: str) -> np.ndarray:
    """Records of one label and 3,072 pixels each, checked."""
    if not data or len(data) % RECORD:
        raise DataError(
            f"{where} holds {len(data)} bytes, not a multiple of {RECORD}: cut short; {AGAIN}"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() > 9:
        raise DataError(f"{where} holds the label {records[:, 0].max()}, above 9; {AGAIN}")
    return records


def read_archive(path: Path) -> np.ndarray:
    """All records of the archive, training first; nothing is unpacked onto the disk."""
    found: dict[str, np.ndarray] = {}
    try:
        with tarfile.open(path, mode="r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in TRAIN_FILES + TEST_FILES:
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = parse_records(file.read(), f"{path}: {name}")
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise DataError(f"{path} is damaged or cut short ({reason}); {AGAIN}") from error
    return _joined(lambda name: found.get(name), path)


def read_folder(folder: Path) -> np.ndarray:
    """All records of the folder, training first."""

    def read(name: str) -> np.ndarray | None:
        path = folder / name
        return parse_records(path.read_bytes(), str(path)) if path.is_file() else None

    return _joined(read, folder)


def _joined(read: Callable[[str], np.ndarray | None], place: Path) -> np.ndarray:
    blocks = []
    for name in TRAIN_FILES + TEST_FILES:
        block = read(name)
        if block is None:
            raise DataError(f"{place} holds no {name}; {AGAIN}")
        blocks.append(block)
    # The first record tells how many belong to the test part, so that one array holds all.
    header = np.zeros((1, RECORD), dtype=np.uint8)
    header[0, :8] = np.frombuffer(len(blocks[-1]).to_bytes(8, "little"), dtype=np.uint8)
    return np.concatenate([header, *blocks])


def open_cifar10(request: DataRequest) -> Dataset:
    """Open CIFAR-10; the pixels live in a memory-mapped file that processes share."""
    request.check_options()
    place = cifar10_place(request)
    if place.is_dir():
        files = [place / name for name in TRAIN_FILES + TEST_FILES if (place / name).is_file()]
        records = cached_array(request.cache_folder, files, "cifar10", lambda: read_folder(place))
    else:
        records = cached_array(
            request.cache_folder, [place], "cifar10", lambda: read_archive(place)
        )
    test_count = int.from_bytes(records[0, :8].tobytes(), "little")
    records = records[1:]
    labels = np.array(records[:, 0])
    boundary = len(records) - test_count
    parts: list[Source] = []
    pictures = None
    for part in (slice(0, boundary), slice(boundary, None)):
        source = ArraySource(
            records[part, 1:].reshape(-1, 3, 32, 32),
            labels[part],
            mean=MEAN,
            deviation=DEVIATION,
            size=request.image_size or SPEC.image_size,
            channels=request.channels,
        )
        pictures = source.pictures
        parts.append(limited(source, request.limit, request.seed))
    return Dataset(
        name=SPEC.name,
        train=parts[0],
        test=parts[1],
        classes=CLASSES,
        sample_shape=parts[0].sample_shape,
        fingerprint=fingerprint_of(["cifar10", str(boundary), labels.tobytes()]),
        pictures=pictures,
    )
