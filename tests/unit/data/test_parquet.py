"""`parquet:PATH`: the rows and nothing but the rows, by whoever reads them, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from paceline.data import DataRequest, open_dataset
from paceline.data.parquet import GroupOrder, Table
from paceline.errors import DataError

ROWS, WIDTH, GROUP = 60, 6, 7


def features() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def labels() -> np.ndarray:
    return np.arange(ROWS) % 3


def write(folder: Path, **columns: Any) -> Path:
    """As Spark does: a folder with several files, and a file that says it is complete."""
    found = columns or {"features": list(features()), "label": labels()}
    folder.mkdir(exist_ok=True)
    table = pa.table(found)
    half = table.num_rows // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(part, folder / f"part-0000{number}.snappy.parquet", row_group_size=GROUP)
    (folder / "_SUCCESS").touch()
    (folder / ".part-00000.snappy.parquet.crc").write_bytes(b"crc")
    return folder


def opened(folder: Path, **options: Any) -> Any:
    return open_dataset(DataRequest(name=f"parquet:{folder}", options=options))


def test_rows_come_as_they_were_written(tmp_path: Path) -> None:
    table = Table(sorted(write(tmp_path / "d").glob("*.parquet")), DataRequest(name="parquet:d"))
    rows = np.random.default_rng(0).permutation(ROWS)
    inputs, targets = table.fetch(rows, epoch=0, augment=False)
    assert np.array_equal(inputs.numpy(), features()[rows])
    assert np.array_equal(targets.numpy(), labels()[rows])
    assert table.classes == ("0", "1", "2")


def test_a_worker_reads_the_row_groups_of_its_samples(tmp_path: Path) -> None:
    table = Table(sorted(write(tmp_path / "d").glob("*.parquet")), DataRequest(name="parquet:d"))
    groups = len(table.first_rows) - 1
    assert groups == 10
    after_labels, already = table.bytes_read, table.groups_read  # the first tells the shape
    table.fetch(np.arange(GROUP, 2 * GROUP), epoch=0, augment=False)
    table.fetch(np.arange(GROUP, 2 * GROUP), epoch=1, augment=False)
    assert table.groups_read == already + 1
    assert table.bytes_read > after_labels


def test_no_more_is_kept_than_was_allowed(tmp_path: Path) -> None:
    files = sorted(write(tmp_path / "d").glob("*.parquet"))
    table = Table(files, DataRequest(name="parquet:d", options={"memory_mb": 0}))
    for _ in range(2):
        inputs, _ = table.fetch(np.arange(ROWS), epoch=0, augment=False)
    assert np.array_equal(inputs.numpy(), features())
    assert table.groups_read > 2 * 9


def test_each_row_is_in_one_part(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "d"))
    seen = []
    for part in (dataset.train, dataset.test):
        inputs, _ = part.fetch(np.arange(len(part)), epoch=0, augment=False)
        seen += inputs[:, 0].tolist()
    assert sorted(seen) == features()[:, 0].tolist()
    assert len(dataset.test) == 12


def test_row_groups_in_an_order_of_each_epoch(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "d"), order="groups")
    train = dataset.train
    assert isinstance(train, GroupOrder)
    assert train.ordered
    epochs = []
    for epoch in (0, 1, 0):
        inputs, _ = train.fetch(np.arange(len(train)), epoch=epoch, augment=False)
        epochs.append(inputs[:, 0].tolist())
        rows = (inputs[:, 0].numpy() / WIDTH).astype(int)
        groups = np.where(rows < 30, rows // GROUP, 5 + (rows - 30) // GROUP)
        assert np.count_nonzero(np.diff(groups)) == len(set(groups)) - 1  # each in one piece
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_columns_of_numbers_and_a_number_to_predict(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "d",
        **{f"x{n}": features()[:, n] for n in range(WIDTH)},
        price=np.linspace(0.0, 1.0, ROWS),
    )
    dataset = opened(folder, label="price", features=["x1", "x0"])
    assert dataset.classes == ()
    assert dataset.sample_shape == (2,)
    inputs, targets = dataset.train.fetch(np.arange(3), epoch=0, augment=False)
    assert inputs[0, 0] == inputs[0, 1] + 1
    assert targets.dtype.is_floating_point


def test_pixels_pictures_and_named_classes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 1, 8, 8), dtype=np.uint8)
    names = [("cat", "dog")[n % 2] for n in range(ROWS)]
    raw = write(tmp_path / "raw", image=[each.tobytes() for each in pixels], label=names)
    dataset = opened(raw, shape=[1, 8, 8])
    assert dataset.classes == ("cat", "dog")
    encoded = []
    for each in pixels:
        file = io.BytesIO()
        Image.fromarray(each[0]).save(file, format="PNG")
        encoded.append(file.getvalue())
    folder = write(tmp_path / "png", image=encoded, label=names)
    request = DataRequest(name=f"parquet:{folder}", image_size=8, channels=1)
    pictures = open_dataset(request)
    one, _ = dataset.train.fetch(np.arange(9), epoch=0, augment=False)
    other, _ = pictures.train.fetch(np.arange(9), epoch=0, augment=False)
    assert np.array_equal(one.numpy(), other.numpy())
    assert pictures.sample_shape == dataset.sample_shape == (1, 8, 8)


def test_test_data_of_its_own(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "d"), test=str(write(tmp_path / "t")))
    assert (len(dataset.train), len(dataset.test)) == (ROWS, ROWS)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({}, {"label": "klass"}, "has no column 'klass' for the label; it has features, label"),
        ({}, {"features": "x"}, "has no column 'x'; it has features, label"),
        ({}, {"shape": [2, 2]}, "have 6 numbers in a row, but shape = [2, 2] needs 4"),
        ({}, {"order": "rows!"}, "must be one of: rows, groups"),
        ({}, {"labels": "x"}, "has no option 'labels'"),
        ({"x": ["a"] * 9, "label": [0] * 9}, {}, "column 'x' is of type string"),
        ({"x": [b"a"] * 9, "label": [0] * 9}, {}, "column 'x' holds bytes: set data.image_size"),
        ({"x": [None, 1.0] * 5, "label": [0] * 10}, {}, "column 'x' has nothing in some rows"),
        ({"x": [1.0] * 8, "label": [-1] * 8}, {}, "whole numbers from -1 to -1"),
        ({"x": [[1.0], [1.0, 2.0]] * 4, "label": [0] * 8}, {}, "lengths"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        opened(write(tmp_path / "d", **columns), **options)
    assert words in str(caught.value)


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no"):
        opened(tmp_path / "none")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        opened(tmp_path / "x.parquet")
    (tmp_path / "year=1").mkdir()
    write(tmp_path / "year=1")
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(DataError, match="without partitionBy"):
        opened(tmp_path)


def test_without_pyarrow_it_says_how_to_get_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "d")
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from paceline.cli import main\n"
        f"sys.exit(main(['train', '--set', 'workload.data=parquet:{folder}']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "needs pyarrow, which is not installed here: pip install 'paceline[parquet]'" in (
        done.stderr
    )


@pytest.mark.parametrize("order", ["rows", "groups"])
def test_nodes_train_as_one_process(run_cli: Any, tmp_path: Path, order: str) -> None:
    """The weights of two nodes over Gloo are those of one process."""
    rng = np.random.default_rng(0)
    count = 120
    images = rng.random((count, 784), dtype=np.float32)
    folder = write(tmp_path / "d", image=list(images), label=rng.integers(0, 10, count))
    settings = {
        "workload.model": "shallow_cnn",
        "workload.data": f"parquet:{folder}",
        "workload.batch_size": 16,
        "data.options": f'{{ shape = [1, 28, 28], order = "{order}" }}',
        "train.epochs": 2,
        "local.strategy": "sequential",
    }
    losses = []
    for name, more in (("one", []), ("two", ["--hosts", "localhost:2", "--engine", "ssh"])):
        words = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
        done = run_cli("train", "--run", str(tmp_path / name), *words, *more, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["test_loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
