"""From files and bytes to inputs of a model, by the preprocessing that it was trained with."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from paceline.data.arrays import Normaliser
from paceline.data.images import DECODE_ERRORS, SUFFIXES, ImageDamagedError, decode_image
from paceline.errors import DataError, shortened
from paceline.schema.signature import Pictures, Signature
from paceline.text import is_number

TABLES = (".csv", ".tsv")


class Preparer:
    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self._normaliser = Normaliser(signature.pictures) if signature.pictures else None

    def picture(self, data: bytes, most_pixels: int | None = None) -> np.ndarray:
        """One input from the bytes of a picture; DataError where it is none, or too large.

        `most_pixels` is looked for in the header, before anything is decoded.
        """
        pictures = self._pictures("a picture")
        try:
            if most_pixels is not None:
                refuse_large(data, most_pixels)
            pixels = decode_image(data, pictures.size, pictures.channels)
        except ImageDamagedError as error:
            reason = str(error)
            if isinstance(error.__cause__, UnidentifiedImageError):  # its text has an address in it
                reason = "its format is none that is known"
            raise DataError(f"the picture cannot be read: {shortened(reason)}") from None
        return np.asarray(self.pixels(pixels[None])[0])

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Inputs from pixels of 0 to 255 that have the model's size already."""
        self._pictures("pixels")
        assert self._normaliser is not None
        found = with_batch(pixels, self.signature, "pixels")
        out = np.empty(found.shape, dtype=np.float32)
        for place, one in enumerate(found):
            self._normaliser.write(one, out[place], flip=False)
        return out

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """Inputs from numbers that are what the model takes."""
        found = with_batch(values, self.signature)
        return np.ascontiguousarray(typed(found, self.signature.dtype))

    def given(self, values: np.ndarray, as_pixels: bool | None = None) -> np.ndarray:
        """Inputs from numbers of a user: pixels (bytes always are), or what the model takes.

        Where nobody says which, whole numbers from 0 to 255 that no normalised pixel can be are
        refused: the model would answer them, surely and wrongly.
        """
        pictures = self.signature.pictures
        if as_pixels or (
            as_pixels is None and values.dtype == np.uint8 and self.signature.dtype != "uint8"
        ):
            if values.size and not (values.min() >= 0 and values.max() <= 255):
                raise DataError(
                    f"numbers from {values.min():g} to {values.max():g} are no pixels, which are 0"
                    " to 255: leave --pixels out where they are normalised already"
                )
            return self.pixels(values)
        if as_pixels is None and pictures is not None and values.size:
            largest = max(
                (1 - mean) / deviation
                for mean, deviation in zip(pictures.mean, pictures.deviation, strict=True)
            )
            most = values.max()
            whole = values.min() >= 0 and most <= 255 and np.array_equal(values, np.rint(values))
            if whole and most > largest:
                raise DataError(
                    f"whole numbers up to {most:g} look like pixels of 0 to 255, where the model"
                    f" takes normalised ones, up to {largest:.3g}: give --pixels (from Python:"
                    " uint8), or --no-pixels to take them as they are"
                )
        return self.numbers(values)

    def _pictures(self, what: str) -> Pictures:
        if self.signature.pictures is None:
            raise DataError(
                f"{what} cannot be made an input of this model: it was trained on"
                f" {self.signature.data or 'data of its own'}, whose preprocessing is code of its"
                f" own; give a .npy of {self.signature.dtype} and shape"
                f" (n, {', '.join(map(str, self.signature.shape))}) as the model takes it"
            )
        return self.signature.pictures


def typed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as another type; floats are rounded to it, others must stay what they are.

    >>> typed(np.array([1.0, 2.0]), "int64")
    array([1, 2])
    """
    if values.dtype.kind not in "biuf":
        raise DataError("the samples are no numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.astype(dtype, copy=False)
    if found.dtype.kind != "f" and not np.array_equal(found, values):
        raise DataError(f"not all numbers are {dtype}, which the model takes: they would change")
    return found


def with_batch(
    values: np.ndarray, signature: Signature, what: str = "numbers", *, single: bool = True
) -> np.ndarray:
    """(n, *shape), flat or not, grey with or without its channel; with `single`, also one sample.

    >>> with_batch(np.zeros((2, 784)), Signature(shape=(1, 28, 28))).shape
    (2, 1, 28, 28)
    """
    shape = signature.shape
    flat = (math.prod(shape),)
    bare = shape[1:] if shape[:1] == (1,) else flat
    if values.ndim and values.shape[1:] == shape:
        return values
    if values.ndim and values.shape[1:] in (flat, bare):
        return values.reshape(-1, *shape)
    if single and values.shape in (shape, flat, bare):
        return values.reshape(1, *shape)
    raise DataError(
        f"{what} of shape {list(values.shape)} do not fit the model, which takes"
        f" {list(shape)} per sample"
    )


def refuse_large(data: bytes, most_pixels: int) -> None:
    """Refuse a picture whose header says that it is larger, before memory is taken for it."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    except DECODE_ERRORS as error:
        raise ImageDamagedError(" ".join(str(error).split()) or type(error).__name__) from error
    if width * height > most_pixels:
        raise DataError(
            f"the picture has {width} x {height} pixels, more than the {most_pixels:,} that are"
            " taken: scale it down"
        )


def read_inputs(
    preparer: Preparer, paths: Sequence[Path], *, as_pixels: bool | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """A name and an input for every sample of the files and folders.

    `as_pixels`: numbers of .npy and .csv are pixels of 0 to 255, or are not; None: bytes are, and
    others that look like it are refused.
    """
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if not found:
                raise DataError(f"{path} holds no picture: give .npy and .csv files by name")
            for one in found:
                yield str(one), _picture(preparer, one)
        elif path.suffix.lower() == ".npy":
            yield from _numbered(path, preparer, _read_npy(path), as_pixels)
        elif path.suffix.lower() in TABLES:
            yield from _numbered(path, preparer, _read_csv(path), as_pixels)
        else:
            yield str(path), _picture(preparer, path)


def _picture(preparer: Preparer, path: Path) -> np.ndarray:
    try:
        return preparer.picture(_read(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _numbered(
    path: Path, preparer: Preparer, values: np.ndarray, as_pixels: bool | None
) -> Iterator[tuple[str, np.ndarray]]:
    try:
        made = preparer.given(values, as_pixels)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if not len(made):
        raise DataError(f"{path} holds no sample: its shape is {list(values.shape)}")
    for number, one in enumerate(made):
        yield f"{path}[{number}]", one


def _read_npy(path: Path) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, SyntaxError) as error:
        raise DataError(f"{path} is no .npy of numbers: {shortened(str(error))}") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
        raise DataError(f"{path} holds no numbers: save them with numpy.save")
    return found


def _read_csv(path: Path) -> np.ndarray:
    """One sample per line; a first line of names is passed over."""
    text = _read(path).decode("utf-8-sig", errors="replace")
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    rows: list[list[float]] = []
    for line, words in enumerate(csv.reader(io.StringIO(text), delimiter=separator), 1):
        if not any(word.strip() for word in words):
            continue
        try:
            rows.append([float(word) for word in words])
        except ValueError as error:
            if line == 1 and not any(map(is_number, words)):
                continue
            raise DataError(
                f"{path}, line {line}: {shortened(str(error))}; give one number per column, with"
                f" {'tabs' if separator != ',' else 'commas'} between them"
            ) from None
        if len(rows[-1]) != len(rows[0]):
            raise DataError(
                f"{path}, line {line} has {len(rows[-1])} numbers, the first has {len(rows[0])}"
            )
    if not rows:
        raise DataError(f"{path} holds no numbers: give one sample per line")
    return np.array(rows, dtype=np.float64)
