"""The data sets that come with Paceline: digits, mnist, cifar10, synthetic; names and requests."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data import DataRequest, names, open_dataset, spec
from paceline.data.splits import plain_split, stratified_split
from paceline.errors import DataError

REAL_DATA = os.environ.get("PACELINE_DATA")
needs_mnist = pytest.mark.skipif(
    not REAL_DATA or not (Path(REAL_DATA) / "mnist").is_dir(),
    reason="PACELINE_DATA does not point to a folder with mnist/",
)


def write_idx(path: Path, array: np.ndarray, *, compress: bool = True) -> None:
    header = struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if compress else data)


def make_mnist(root: Path, *, compress: bool = True) -> Path:
    folder = root / "mnist"
    generator = np.random.default_rng(0)
    suffix = ".gz" if compress else ""
    for prefix, count in (("train", 50), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images, compress=compress)
        labels = np.arange(count) % 10
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", labels, compress=compress)
    return folder


def request(tmp_path: Path, name: str, **values: object) -> DataRequest:
    values.setdefault("root", str(tmp_path))
    return DataRequest(name=name, cache=str(tmp_path / "cache"), **values)  # type: ignore[arg-type]


def test_importing_and_describing_needs_no_torch() -> None:
    program = (
        "import sys, paceline.data as data\n"
        "for name in data.names(): assert data.spec(name).summary\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_names_and_unknown_name() -> None:
    assert names() == ["digits", "mnist", "cifar10", "image_folder", "synthetic"]
    with pytest.raises(DataError, match="did you mean 'digits'"):
        spec("digit")
    with pytest.raises(DataError, match=r"unknown data set 'nmist': did you mean 'mnist'"):
        open_dataset(DataRequest(name="nmist"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"validation": 0.0}, "validation = 0.0"),
        ({"validation": 1.5}, "validation = 1.5"),
        ({"image_size": 0}, "image_size = 0"),
        ({"channels": 2}, "channels = 2"),
        ({"limit": 0}, "limit = 0"),
        ({"workers": -1}, "workers = -1"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_requests_are_checked(values: dict[str, float], text: str) -> None:
    with pytest.raises(DataError, match=text):
        DataRequest(name="digits", **values)  # type: ignore[arg-type]


def test_digits_are_real_and_the_split_is_fixed() -> None:
    dataset = open_dataset(DataRequest(name="digits"))
    other_seed = open_dataset(DataRequest(name="digits", seed=5))
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    inputs, targets = dataset.train.fetch(np.arange(1438), epoch=0, augment=True)
    assert inputs.shape == (1438, 1, 28, 28)
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert targets.dtype == torch.int64
    assert abs(float(inputs.mean())) < 0.01
    assert abs(float(inputs.std()) - 1) < 0.01
    assert sorted(set(targets.tolist())) == list(range(10))
    again, _ = other_seed.train.fetch(np.arange(1438), epoch=3, augment=False)
    assert torch.equal(inputs, again)
    assert dataset.fingerprint == other_seed.fingerprint


def test_digits_in_another_size_and_colour() -> None:
    dataset = open_dataset(DataRequest(name="digits", image_size=16, channels=3))
    inputs, _ = dataset.test.fetch(np.array([0, 5]), epoch=0, augment=False)
    assert inputs.shape == (2, 3, 16, 16) == (2, *dataset.sample_shape)
    assert torch.equal(inputs[:, 0], inputs[:, 2])


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(DataError, match="no option 'size'"):
        open_dataset(DataRequest(name="digits", options={"size": 3}))


def test_limit_takes_the_first_of_a_seeded_shuffle() -> None:
    full = open_dataset(DataRequest(name="digits"))
    few = open_dataset(DataRequest(name="digits", limit=40))
    same = open_dataset(DataRequest(name="digits", limit=40))
    other = open_dataset(DataRequest(name="digits", limit=40, seed=1))
    assert (len(few.train), len(few.test)) == (40, 40)
    everything = {
        sample.numpy().tobytes()
        for sample in full.train.fetch(np.arange(len(full.train)), epoch=0, augment=False)[0]
    }
    samples = [
        part.train.fetch(np.arange(40), epoch=0, augment=False)[0] for part in (few, same, other)
    ]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    assert all(sample.numpy().tobytes() in everything for sample in samples[0])
    assert any("limit = 40" in note for note in few.notes)


@pytest.mark.parametrize("compress", [True, False])
def test_mnist_pixels_and_labels(tmp_path: Path, compress: bool) -> None:
    folder = make_mnist(tmp_path, compress=compress)
    for _ in range(2):  # The second time from the memory-mapped copy.
        dataset = open_dataset(request(tmp_path, "mnist"))
        inputs, targets = dataset.train.fetch(np.array([3, 49, 3]), epoch=0, augment=True)
        raw = np.random.default_rng(0).integers(0, 256, (50, 28, 28))
        expected = (raw[[3, 49, 3]] / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(inputs.numpy()[:, 0], expected, atol=1e-5)
        assert targets.tolist() == [3, 9, 3]
        assert (len(dataset.train), len(dataset.test)) == (50, 20)
        assert dataset.train.bytes_read == 3 * 28 * 28
    kept = sorted(path.suffix for path in (tmp_path / "cache" / "arrays").iterdir())
    assert kept == [".json", ".json", ".npy", ".npy"]
    assert len(list(folder.iterdir())) == 4


def test_mnist_compressed_or_not_is_the_same_data(tmp_path: Path) -> None:
    make_mnist(tmp_path / "a", compress=True)
    make_mnist(tmp_path / "b", compress=False)
    prints = {
        open_dataset(request(tmp_path, "mnist", root=str(tmp_path / part))).fingerprint
        for part in ("a", "b")
    }
    assert len(prints) == 1


def test_mnist_scaled_once_equals_scaled_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mnist(tmp_path)
    once = open_dataset(request(tmp_path, "mnist", image_size=32, channels=3))
    monkeypatch.setattr("paceline.data.arrays.SCALED_COPY_LIMIT", 0)
    batched = open_dataset(
        DataRequest(
            name="mnist", root=str(tmp_path), cache=str(tmp_path / "c2"), image_size=32, channels=3
        )
    )
    numbers = np.array([7, 1])
    first, _ = once.train.fetch(numbers, epoch=0, augment=False)
    second, _ = batched.train.fetch(numbers, epoch=0, augment=False)
    assert first.shape == (2, 3, 32, 32)
    assert torch.equal(first, second)


def test_a_changed_mnist_file_is_read_again(tmp_path: Path) -> None:
    folder = make_mnist(tmp_path)
    open_dataset(request(tmp_path, "mnist"))
    write_idx(folder / "train-images-idx3-ubyte.gz", np.full((50, 28, 28), 255))
    inputs, _ = open_dataset(request(tmp_path, "mnist")).train.fetch(
        np.array([0]), epoch=0, augment=False
    )
    assert float(inputs.min()) == pytest.approx((1 - 0.1307) / 0.3081, abs=1e-4)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_cut, "damaged or cut short"),
        (_flip_byte, "damaged"),
        (lambda path: path.write_bytes(b""), "starts with nothing"),
        (lambda path: path.write_bytes(b"<html>not found</html>"), "no idx file"),
        (lambda path: write_idx(path, np.zeros((50,))), "no idx file"),
        (lambda path: write_idx(path, np.zeros((49, 28, 28))), "49 images but"),
        (
            lambda path: path.write_bytes(struct.pack(">IIII", 0x803, 50, 28, 28) + b"\0" * 99),
            "115 bytes where its header promises 39216",
        ),
        (lambda path: path.unlink(), r"is not in|is missing"),
    ],
)
def test_damaged_mnist_is_one_sentence(tmp_path: Path, damage: object, text: str) -> None:
    folder = make_mnist(tmp_path)
    damage(folder / "train-images-idx3-ubyte.gz")  # type: ignore[operator]
    with pytest.raises(DataError, match=text) as caught:
        open_dataset(request(tmp_path, "mnist"))
    assert "\n" not in str(caught.value)


def test_mnist_label_above_nine_and_missing_data(tmp_path: Path) -> None:
    folder = make_mnist(tmp_path)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.full(20, 11))
    with pytest.raises(DataError, match="label 11"):
        open_dataset(request(tmp_path, "mnist"))
    with pytest.raises(DataError, match="paceline data get mnist"):
        open_dataset(request(tmp_path, "mnist", root=str(tmp_path / "nowhere")))


@needs_mnist
def test_real_mnist(tmp_path: Path) -> None:
    dataset = open_dataset(request(tmp_path, "mnist", root=REAL_DATA))
    assert (len(dataset.train), len(dataset.test)) == (60000, 10000)
    assert dataset.train.targets is not None
    assert np.bincount(dataset.train.targets)[:3].tolist() == [5923, 6742, 5958]
    # All of them: even and odd numbers come from two groups of writers and differ in mean.
    inputs, _ = dataset.train.fetch(np.arange(60000), epoch=0, augment=False)
    assert abs(float(inputs.mean())) < 0.001
    assert abs(float(inputs.std()) - 1) < 0.001


def cifar_file(count: int, start: int) -> bytes:
    generator = np.random.default_rng(start)
    records = generator.integers(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(start, start + count) % 10
    return records.tobytes()


def cifar_files() -> dict[str, bytes]:
    files = {f"data_batch_{number}.bin": cifar_file(4, number) for number in range(1, 6)}
    return {**files, "test_batch.bin": cifar_file(6, 100)}


def write_archive(path: Path, files: dict[str, bytes], mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def place_cifar(root: Path, layout: str) -> None:
    files = cifar_files()
    if layout == "folder":
        folder = root / "cifar10" / "cifar-10-batches-bin"
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    else:
        kind = layout.rpartition(".")[2]
        write_archive(root / "cifar10" / f"cifar-10-binary.tar.{kind}", files, f"w:{kind}")


@pytest.mark.parametrize("layout", ["folder", "tar.gz", "tar.xz"])
def test_cifar10_from_every_form(tmp_path: Path, layout: str) -> None:
    place_cifar(tmp_path, layout)
    dataset = open_dataset(request(tmp_path, "cifar10"))
    assert (len(dataset.train), len(dataset.test)) == (20, 6)
    inputs, targets = dataset.train.fetch(np.array([0, 4]), epoch=0, augment=True)
    raw = np.frombuffer(cifar_file(4, 2), np.uint8).reshape(4, 3073)[0]
    assert targets.tolist() == [1, int(raw[0])]
    red = raw[1:1025].reshape(32, 32) / 255
    np.testing.assert_allclose(inputs[1, 0].numpy(), (red - 0.4914) / 0.2470, atol=1e-5)
    assert dataset.classes[0] == "airplane"
    grey = open_dataset(request(tmp_path, "cifar10", channels=1, image_size=28))
    assert grey.test.fetch(np.array([0]), epoch=0, augment=False)[0].shape == (1, 1, 28, 28)


def test_cifar10_damage_is_one_sentence(tmp_path: Path) -> None:
    place_cifar(tmp_path, "folder")
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    original = (folder / "data_batch_3.bin").read_bytes()
    (folder / "data_batch_3.bin").write_bytes(original[:-1])
    with pytest.raises(DataError, match="not a multiple of 3073"):
        open_dataset(request(tmp_path, "cifar10"))
    (folder / "data_batch_3.bin").write_bytes(b"\x63" + original[1:])
    with pytest.raises(DataError, match="label 99"):
        open_dataset(request(tmp_path, "cifar10"))
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"holds no data_batch_3\.bin"):
        open_dataset(request(tmp_path, "cifar10"))


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_cifar10_cut_archive(tmp_path: Path, kind: str) -> None:
    place_cifar(tmp_path, f"tar.{kind}")
    path = tmp_path / "cifar10" / f"cifar-10-binary.tar.{kind}"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="damaged or cut short"):
        open_dataset(request(tmp_path, "cifar10"))


def test_synthetic_depends_on_the_number_alone() -> None:
    options = {"shape": [2, 5, 7], "classes": 4, "samples": 100, "test_samples": 30}
    first = open_dataset(DataRequest(name="synthetic", options=options))
    second = open_dataset(DataRequest(name="synthetic", options=options))
    numbers = np.random.default_rng(0).permutation(100)
    inputs, targets = first.train.fetch(numbers, epoch=0, augment=True)
    assert inputs.shape == (100, 2, 5, 7)
    for place in (0, 17, 99):
        one, label = second.train.fetch(numbers[place : place + 1], epoch=4, augment=False)
        assert torch.equal(one[0], inputs[place])
        assert int(label) == int(targets[place])
    assert len({sample.numpy().tobytes() for sample in inputs}) == 100
    assert (len(first.test), first.classes) == (30, ("0", "1", "2", "3"))


def test_synthetic_can_be_learnt() -> None:
    dataset = open_dataset(DataRequest(name="synthetic", options={"samples": 500}))
    train, labels = dataset.train.fetch(np.arange(500), epoch=0, augment=False)
    test, answers = dataset.test.fetch(np.arange(len(dataset.test)), epoch=0, augment=False)
    means = torch.stack([train[labels == label].flatten(1).mean(0) for label in range(10)])
    guesses = torch.cdist(test.flatten(1), means).argmin(1)
    assert float((guesses == answers).float().mean()) > 0.9


@pytest.mark.parametrize(
    "options", [{"shape": [3, 0, 3]}, {"shape": "3x3"}, {"classes": 0}, {"samples": 1.5}]
)
def test_synthetic_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(options))):
        open_dataset(DataRequest(name="synthetic", options=options))


def test_a_share_of_nothing(tmp_path: Path) -> None:
    for name in ("digits", "synthetic"):
        inputs, targets = open_dataset(request(tmp_path, name)).train.fetch(
            np.array([], dtype=np.int64), epoch=0, augment=True
        )
        assert len(inputs) == len(targets) == 0


def test_splits_are_disjoint_complete_and_stratified() -> None:
    targets = np.repeat(np.arange(4), [50, 10, 2, 1])
    train, test = stratified_split(targets, 0.2, seed=3)
    assert sorted([*train, *test]) == list(range(63))
    assert np.bincount(targets[test], minlength=4).tolist() == [10, 2, 1, 0]
    again = stratified_split(targets, 0.2, seed=3)
    assert np.array_equal(test, again[1])
    assert not np.array_equal(test, stratified_split(targets, 0.2, seed=4)[1])
    train, test = plain_split(10, 0.25, seed=0)
    assert (len(train), len(test)) == (8, 2)
    assert sorted([*train, *test]) == list(range(10))
