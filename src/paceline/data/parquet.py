"""`parquet:PATH`: what a Spark job (or anybody) wrote, read by row groups. Needs pyarrow.

A sample is a row; rows are numbered by the names of the files, then as they stand in them. A
process reads the label column once, and of the features the row groups in which its samples lie,
when it first needs them: all workers together read each group at least once, and which samples a
batch has does not depend on how many they are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.base import DataRequest, Dataset, DataSpec, Source, fingerprint_of
from paceline.data.parquet_columns import Features, features_of, read_labels
from paceline.data.splits import ORDER_STREAM, Subset, limited, plain_split, stratified_split
from paceline.errors import DataError, shown
from paceline.references import PARQUET
from paceline.text import user_path

if TYPE_CHECKING:
    import torch

ORDERS = ("rows", "groups")
OPTIONS = ("label", "features", "shape", "test", "order", "memory_mb")
MEMORY_MB = 1024
"""What of the row groups a process keeps, where `memory_mb` does not say it."""

SPEC = DataSpec(
    name="parquet",
    summary="rows of Parquet files, as a Spark job writes them: data = 'parquet:PATH'",
    image_size=None,
    channels=None,
    classes=None,
    obtain="write it, as with Spark's df.write.parquet(PATH)",
)


def open_parquet(request: DataRequest) -> Dataset:
    request.check_options(*OPTIONS)
    options = request.options
    order = options.get("order", "rows")
    if order not in ORDERS:
        raise DataError(f"data.options.order = {shown(order)} must be one of: {', '.join(ORDERS)}")
    train_files = find_files(request, request.name.removeprefix(PARQUET))
    table = Table(train_files, request)
    classes = table.classes
    notes: tuple[str, ...] = ()
    if options.get("test"):
        tested = Table(find_files(request, str(options["test"])), request, classes=classes)
        tested.check_like(table)
        parts: list[Source] = [limited(table, request.limit, request.seed),
                               limited(tested, request.limit, request.seed)]  # fmt: skip
    else:
        if len(table) < 2:
            raise DataError(f"{request.name} has {len(table)} rows; training needs two and more")
        if classes and table.targets is not None:
            held = stratified_split(table.targets, request.validation, request.seed)
        else:
            held = plain_split(len(table), request.validation, request.seed)
        notes = (f"{request.validation:g} of the rows are held back for testing",)
        parts = [limited(Subset(table, rows), request.limit, request.seed) for rows in held]
    train = parts[0] if order == "rows" else GroupOrder(parts[0], table, request.seed)
    identity: list[str | bytes] = [PARQUET, *table.identity, order]
    return Dataset(
        name=request.name,
        train=train,
        test=parts[1],
        classes=classes,
        sample_shape=table.sample_shape,
        fingerprint=fingerprint_of(identity),
        notes=notes,
        pictures=table.features.pictures,
    )


def find_files(request: DataRequest, name: str) -> list[Path]:
    """One file, or those of a folder in the order of their names; those that Spark hides are not.

    A name that is no path from here is looked for below data.root.
    """
    places = [user_path(name)] + [root / name for root in request.search_folders]
    place = next((place for place in places if place.exists()), None)
    if not name or place is None:
        raise DataError(
            f"data {shown(request.name)}: there is no {shown(name)} here"
            f"{f' or in {request.root}' if request.root else ''}: write parquet:PATH, of a file or"
            " of a folder with .parquet files"
        )
    files = [place]
    if place.is_dir():
        files = sorted(
            path
            for path in place.rglob("*.parquet")
            if not any(part[:1] in "._" for part in path.relative_to(place).parts)
        )
    if not files:
        raise DataError(f"{place} holds no .parquet file")
    if partitioned := [path for path in files if "=" in str(path.relative_to(place).parent)]:
        raise DataError(
            f"{partitioned[0]} lies in a folder that stands for a column's value, which is not read"
            " from there: write the data without partitionBy"
        )
    return files


def parquet_module() -> Any:
    """pyarrow.parquet, or an error that says how to get it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "data 'parquet:...' needs pyarrow, which is not installed here: pip install"
            " 'paceline[parquet]'"
        ) from None
    return pyarrow.parquet


class Table(Source):
    """The rows of several files."""

    def __init__(
        self, files: list[Path], request: DataRequest, classes: tuple[str, ...] | None = None
    ) -> None:
        self.files = files
        self._request = request
        self._parquet = parquet_module()
        self._groups: list[tuple[int, int]] = []
        """File and number in it of every row group."""
        counts: list[int] = []
        self.identity: list[str | bytes] = []
        schema = None
        for number, path in enumerate(files):
            with self._opened(path) as file:
                schema = schema or file.schema_arrow
                if not file.schema_arrow.equals(schema):
                    raise DataError(f"{path} has other columns than {files[0]}")
                for group in range(file.num_row_groups):
                    self._groups.append((number, group))
                    counts.append(file.metadata.row_group(group).num_rows)
                self.identity += [path.name, str(file.metadata.num_rows)]
        self.first_rows = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """Number of the first row of every row group, and of the row after the last."""
        if not len(self):
            raise DataError(f"{request.name} holds no row")
        label = str(request.options.get("label", "label"))
        self.features: Features = features_of(schema, label, request)
        column = [self._read(place, [label]) for place in range(len(self._groups))]
        self.targets, self.classes = read_labels(column, label, request.name, classes)
        self.identity += [self.features.key, self.targets.tobytes()]
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._kept_bytes = 0
        self._most = int(request.options.get("memory_mb", MEMORY_MB)) << 20
        self.groups_read = 0
        # What does not fit is seen before training begins, at least in the first rows.
        first = self.group(int(self.group_of(np.zeros(1))[0]))
        self.sample_shape = self.features.shape or tuple(first.shape[1:])

    def _opened(self, path: Path) -> Any:
        try:
            return self._parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's own errors are of several kinds
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{path} cannot be read as Parquet: {reason}") from None

    def _read(self, place: int, columns: list[str]) -> Any:
        number, group = self._groups[place]
        path = self.files[number]
        with self._opened(path) as file:
            about = file.metadata.row_group(group)
            try:
                found = file.read_row_group(group, columns=columns, use_threads=False)
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                raise DataError(f"row group {group} of {path} cannot be read: {reason}") from None
        for each in range(about.num_columns):
            chunk = about.column(each)
            if chunk.path_in_schema.partition(".")[0] in columns:
                self.bytes_read += chunk.total_compressed_size
        for name in columns:
            if found.column(name).null_count:
                raise DataError(
                    f"column {name!r} has nothing in some rows of row group {group} of {path}:"
                    " fill them, or leave these rows out when you write it"
                )
        return found

    def check_like(self, other: Table) -> None:
        """Refuse test data of another shape."""
        if self.sample_shape != other.sample_shape:
            raise DataError(
                f"the test rows have the shape {self.sample_shape}, those for training"
                f" {other.sample_shape}: write both with the same columns"
            )

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def group(self, place: int) -> np.ndarray:
        """The features of a row group, as they are kept."""
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place]
            where = str(self.files[self._groups[place][0]])
            found = self.features.of(self._read(place, self.features.names), where)
            self.groups_read += 1
            self._kept[place] = found
            self._kept_bytes += self.features.size_of(found)
            while self._kept_bytes > self._most and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= self.features.size_of(dropped)
            return found

    def group_of(self, rows: np.ndarray) -> np.ndarray:
        """The row group that each row lies in."""
        return np.searchsorted(self.first_rows, rows, side="right") - 1

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        groups = self.group_of(rows)
        out = np.empty((len(rows), *self.sample_shape), dtype=np.float32)
        for place in np.unique(groups):
            mine = np.flatnonzero(groups == place)
            chosen = self.group(int(place))[rows[mine] - self.first_rows[place]]
            out[mine] = self.features.samples(chosen)
        assert self.targets is not None
        return torch.from_numpy(out), torch.from_numpy(self.targets[rows])


class GroupOrder(Source):
    """Row groups in an order drawn for each epoch, and their rows shuffled among themselves.

    So a batch lies in few row groups, and a worker needs few of them at a time; but rows that were
    written together stay near each other.
    """

    ordered = True

    def __init__(self, source: Source, table: Table, seed: int) -> None:
        self._source, self._table, self._seed = source, table, seed
        self.sample_shape, self.sample_dtype = source.sample_shape, source.sample_dtype
        rows = np.arange(len(source))
        inner: Source | None = source
        while isinstance(inner, Subset):
            rows, inner = inner.numbers[rows], inner.source
        self._groups = table.group_of(rows)
        self._drawn: tuple[int, np.ndarray] = (-1, rows)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def labels(self) -> np.ndarray | None:
        return self._source.labels

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self._source.bytes_read

    def order(self, epoch: int) -> np.ndarray:
        """The number, in the source, of every place of an epoch."""
        drawn = self._drawn
        if drawn[0] != epoch:
            generator = np.random.default_rng([self._seed, ORDER_STREAM, epoch])
            of_group = generator.permutation(len(self._table.first_rows) - 1)
            among = generator.random(len(self))
            drawn = self._drawn = (epoch, np.lexsort((among, of_group[self._groups])))
        return drawn[1]

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.fetch(self.order(epoch)[indices], epoch=epoch, augment=augment)

    def close(self) -> None:
        self._source.close()
