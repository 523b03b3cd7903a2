"""`mnist`: the four idx files, compressed or not, each checked before it is used."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from paceline.data.arrays import ArraySource, cached_array, scaled_once
from paceline.data.base import DataRequest, Dataset, DataSpec, Download, Source, fingerprint_of
from paceline.data.splits import limited
from paceline.errors import DataError

MEAN, DEVIATION = 0.1307, 0.3081
IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801

FILES = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", 28881),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", 1648877),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", 4542),
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

SPEC = DataSpec(
    name="mnist",
    summary="70,000 handwritten digits, 28x28 grey: 60,000 for training, 10,000 for testing",
    image_size=28,
    channels=1,
    classes=10,
    obtain="paceline data get mnist",
    downloads=tuple(
        Download(
            file=f"{name}.gz",
            md5=md5,
            size=size,
            mirrors=tuple(f"{mirror}{name}.gz" for mirror in MIRRORS),
        )
        for name, (md5, size) in FILES.items()
    ),
)


def mnist_folder(request: DataRequest) -> Path:
    """The folder that holds the four files, or an error that says where they belong."""
    looked = [
        folder
        for root in request.search_folders
        for folder in (root / "mnist", root / "MNIST" / "raw", root)
    ]
    for folder in looked:
        if (folder / f"{next(iter(FILES))}.gz").is_file() or (folder / next(iter(FILES))).is_file():
            return folder
    raise DataError(
        f"data set 'mnist' is not in {looked[0]}; download it with `paceline data get mnist`,"
        " or point PACELINE_DATA or --data to the folder that holds mnist/"
    )


def idx_file(folder: Path, name: str) -> Path:
    """The plain file or its compressed form."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder / name} (or {name}.gz) is missing; `paceline data get mnist` downloads it again"
    )


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The array of an idx file; magic number, sizes and length are checked."""
    again = "remove it and download it again with `paceline data get mnist`"
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error}); {again}") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check its permissions"
        ) from error
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if len(data) < header or struct.unpack(">I", data[:4])[0] != magic:
        found = data[:4].hex() or "nothing"
        raise DataError(f"{path} starts with {found}, not {magic:08x}: no idx file; {again}")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + int(np.prod([int(length) for length in shape], dtype=object))
    if len(data) != expected:
        raise DataError(
            f"{path} holds {len(data)} bytes where its header promises {expected}; {again}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def read_labels(path: Path) -> np.ndarray:
    """Labels 0 to 9."""
    labels = read_idx(path, LABELS_MAGIC)
    if len(labels) and labels.max() > 9:
        raise DataError(f"{path} holds the label {labels.max()}; the digits are 0 to 9")
    return labels


def open_mnist(request: DataRequest) -> Dataset:
    """Open MNIST; the pixels live in a memory-mapped file that processes of a machine share."""
    request.check_options()
    folder = mnist_folder(request)
    size = request.image_size or SPEC.image_size
    parts: list[Source] = []
    pictures = None
    identity: list[str | bytes] = ["mnist"]
    for prefix in ("train", "t10k"):
        image_path = idx_file(folder, f"{prefix}-images-idx3-ubyte")
        label_path = idx_file(folder, f"{prefix}-labels-idx1-ubyte")

        def make(path: Path = image_path) -> np.ndarray:
            images = read_idx(path, IMAGES_MAGIC)
            return scaled_once(images[:, None], size)

        pixels = cached_array(request.cache_folder, [image_path], f"mnist-{prefix}-{size}", make)
        labels = read_labels(label_path)
        if len(labels) != len(pixels):
            raise DataError(
                f"{image_path.name} holds {len(pixels)} images but {label_path.name}"
                f" {len(labels)} labels; download both again with `paceline data get mnist`"
            )
        if not len(labels):
            raise DataError(f"{image_path} holds no image; `paceline data get mnist`")
        source = ArraySource(
            pixels,
            labels,
            mean=(MEAN,),
            deviation=(DEVIATION,),
            size=size,
            channels=request.channels,
        )
        pictures = source.pictures
        parts.append(limited(source, request.limit, request.seed))
        # The labels stand for the contents, so that .gz and plain files count as the same data.
        identity += [prefix, str(len(labels)), labels.tobytes()]
    return Dataset(
        name=SPEC.name,
        train=parts[0],
        test=parts[1],
        classes=tuple(str(digit) for digit in range(10)),
        sample_shape=parts[0].sample_shape,
        fingerprint=fingerprint_of(identity),
        pictures=pictures,
    )
