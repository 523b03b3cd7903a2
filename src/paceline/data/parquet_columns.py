"""Columns of a Parquet table: which are features, what becomes of them, and what labels mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.data.arrays import Normaliser
from paceline.data.base import DataRequest
from paceline.data.images import ImageDamagedError, decode_image, photographs
from paceline.errors import DataError, shown
from paceline.schema.signature import Pictures

MOST_CLASSES = 100_000
"""A whole number above this is a number to predict, not a class; and then it must be a float."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """How columns become samples."""

    names: list[str]
    kind: str
    """"numbers": columns of one number each; "list": one column of lists; "bytes": one column of
    pixels as bytes; "pictures": one column of encoded pictures."""
    shape: tuple[int, ...]
    """Of a sample; empty: as the first row's list is long."""
    pictures: Pictures | None = None

    @property
    def key(self) -> str:
        """What a fingerprint must know of it."""
        return f"{self.kind} {','.join(self.names)} {self.shape}"

    def of(self, table: Any, where: str) -> np.ndarray:
        """What is kept of a row group."""
        if self.kind == "numbers":
            columns = [table.column(name).to_numpy() for name in self.names]
            found = np.stack(columns, axis=1).astype(np.float32)
            return self._shaped(found, where)
        column = table.column(self.names[0])
        if self.kind == "list":
            return self._shaped(_lists(column, self.names[0], where), where)
        values = column.to_pylist()
        if self.kind == "pictures":
            found = np.empty(len(values), dtype=object)
            found[:] = values
            return found
        length = int(np.prod(self.shape))
        for value in values:
            if len(value) != length:
                raise DataError(
                    f"column {self.names[0]!r} of {where} has {len(value)} bytes in a row, where"
                    f" shape = {list(self.shape)} needs {length}: leave shape out if they are"
                    " pictures as JPEG or PNG"
                )
        return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(-1, *self.shape)

    def _shaped(self, found: np.ndarray, where: str) -> np.ndarray:
        if not self.shape:
            return found
        if int(np.prod(self.shape)) != found.shape[1]:
            raise DataError(
                f"the features of {where} have {found.shape[1]} numbers in a row, but shape ="
                f" {list(self.shape)} needs {int(np.prod(self.shape))}: correct data.options.shape"
            )
        return found.reshape(-1, *self.shape)

    def samples(self, chosen: np.ndarray) -> np.ndarray:
        """What training gets of rows that are kept."""
        if self.kind == "pictures":
            chosen = np.stack([self._decoded(data) for data in chosen])
        if self.pictures is None:
            return chosen
        out = np.empty(chosen.shape, dtype=np.float32)
        Normaliser(self.pictures).write(chosen, out, flip=False)
        return out

    def _decoded(self, data: bytes) -> np.ndarray:
        assert self.pictures is not None
        try:
            return decode_image(data, self.pictures.size, self.pictures.channels)
        except ImageDamagedError as error:
            raise DataError(
                f"column {self.names[0]!r} has a picture that cannot be decoded ({error}): leave"
                " such rows out, or give data.options.shape if it holds plain pixels"
            ) from None

    def size_of(self, kept: np.ndarray) -> int:
        """Bytes of memory."""
        return sum(map(len, kept)) if self.kind == "pictures" else kept.nbytes


def features_of(schema: Any, label: str, request: DataRequest) -> Features:
    """Which columns are features, by the options or because nothing else can be meant."""
    import pyarrow.types as types

    known = list(schema.names)
    if label not in known:
        raise DataError(
            f"{request.name} has no column {shown(label)} for the label; it has"
            f" {', '.join(known)}: name one with data.options.label"
        )
    given = request.options.get("features")
    names = [given] if isinstance(given, str) else list(given or (n for n in known if n != label))
    for name in names:
        if name not in known:
            raise DataError(
                f"{request.name} has no column {shown(name)}; it has {', '.join(known)}: correct"
                " data.options.features"
            )
    if not names:
        raise DataError(f"{request.name} has no column beside {label!r}: there are no features")
    shape = tuple(int(length) for length in request.options.get("shape", ()))
    column_types = {name: schema.field(name).type for name in names}
    if all(_is_number(kind) for kind in column_types.values()):
        return Features(names=names, kind="numbers", shape=shape or (len(names),))
    name, kind = next(iter(column_types.items()))
    if len(names) > 1:
        odd = next(name for name, kind in column_types.items() if not _is_number(kind))
        raise DataError(
            f"{request.name}: column {odd!r} is of type {column_types[odd]}, and only columns of"
            " numbers are put together: name one column with data.options.features"
        )
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _binary(name, shape, request)
    if _is_list(kind) and _is_number(kind.value_type):
        return Features(names=names, kind="list", shape=shape)
    raise DataError(
        f"{request.name}: column {name!r} is of type {kind}, which is none of: a number, a list of"
        " numbers, bytes; Spark's vector_to_array turns a vector into a list"
    )


def _binary(name: str, shape: tuple[int, ...], request: DataRequest) -> Features:
    if shape:
        if len(shape) != 3:
            raise DataError(
                f"data.options.shape = {list(shape)} must be [channels, height, width] for bytes"
            )
        pictures = photographs(shape[1], shape[0])
        return Features(names=[name], kind="bytes", shape=shape, pictures=pictures)
    if request.image_size is None:
        raise DataError(
            f"{request.name}: column {name!r} holds bytes: set data.image_size for pictures as JPEG"
            " or PNG, or data.options.shape = [channels, height, width] for plain pixels"
        )
    size, channels = request.image_size, request.channels or 3
    pictures = photographs(size, channels)
    return Features(names=[name], kind="pictures", shape=(channels, size, size), pictures=pictures)


def _is_number(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _lists(column: Any, name: str, where: str) -> np.ndarray:
    """Lists of numbers, all of one length."""
    whole = column.combine_chunks()
    flat = whole.flatten()
    if flat.null_count or len(whole) == 0 or len(flat) % len(whole):
        raise DataError(f"column {name!r} of {where} has lists of several lengths, or with gaps")
    import pyarrow.compute as compute

    lengths = compute.list_value_length(whole).unique()
    if len(lengths) != 1:
        raise DataError(
            f"column {name!r} of {where} has lists of {len(lengths)} lengths: all rows must have as"
            " many numbers"
        )
    numbers: np.ndarray = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers.reshape(len(whole), -1)


def read_labels(
    tables: list[Any], name: str, data: str, classes: tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets in the order of rows, and the classes' names; none where numbers are predicted."""
    values = np.concatenate([table.column(name).to_numpy() for table in tables])
    if values.dtype.kind == "f":
        return values.astype(np.float32), ()
    if values.dtype.kind in "iub":
        whole = values.astype(np.int64)
        if whole.min() < 0 or whole.max() >= MOST_CLASSES:
            raise DataError(
                f"column {name!r} of {data} has whole numbers from {whole.min()} to {whole.max()},"
                f" but classes are 0 to {MOST_CLASSES - 1}: write it as floats if it is to be"
                " predicted as a number"
            )
        count = max(int(whole.max()) + 1, len(classes or ()))
        return whole, tuple(str(number) for number in range(count))
    texts = [value if isinstance(value, str) else None for value in values.tolist()]
    if None in texts:
        raise DataError(
            f"column {name!r} of {data} holds neither numbers nor text: no label can be made of it"
        )
    found = classes or tuple(sorted(set(map(str, texts))))
    numbers = {each: number for number, each in enumerate(found)}
    if unknown := next((text for text in texts if text not in numbers), None):
        raise DataError(
            f"column {name!r} of {data} has the class {shown(unknown)} only in the test"
        )
    return np.array([numbers[str(text)] for text in texts], dtype=np.int64), found
