"""Folders of photographs: pixels, bad files, splits, the cache, and who reads what."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data import DataRequest, Dataset, open_dataset
from paceline.data import images as image_module
from paceline.data.cache import CacheWarning, ImageCache
from paceline.data.images import ImageDamagedError, decode_image, quick_check
from paceline.errors import DataError

REAL_DATA = os.environ.get("PACELINE_DATA")
needs_fire = pytest.mark.skipif(
    not REAL_DATA or not (Path(REAL_DATA) / "fire").is_dir(),
    reason="PACELINE_DATA does not point to a folder with fire/",
)


def picture(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    """Smooth colours, so that JPEG keeps them."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return out.getvalue()


def make_folder(folder: Path, per_class: int = 6, *, parts: tuple[str, ...] = ("",)) -> Path:
    for part in parts:
        for number, name in enumerate(("cat", "dog")):
            place = folder / part / name
            place.mkdir(parents=True)
            for index in range(per_class):
                data = encoded(picture(100 * number + index))
                (place / f"{index:03}.jpg").write_bytes(data)
    return folder


def open_folder(folder: Path, **values: object) -> Dataset:
    values.setdefault("cache", str(folder.parent / "cache"))
    values.setdefault("image_size", 32)
    return open_dataset(DataRequest(name=str(folder), **values))  # type: ignore[arg-type]


def everything(dataset: Dataset, **values: object) -> torch.Tensor:
    values = {"epoch": 0, "augment": False, **values}
    numbers = np.arange(len(dataset.train))
    return dataset.train.fetch(numbers, **values)[0]  # type: ignore[arg-type]


# Pixels


def pillow_result(data: bytes, size: int) -> np.ndarray:
    """The plain way: decode fully, crop the centre, scale it."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    scaled = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(scaled).transpose(2, 0, 1)


@pytest.mark.parametrize(("width", "height"), [(48, 40), (40, 48), (33, 57), (32, 32), (20, 24)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP"])
def test_pixels_equal_pillows(kind: str, width: int, height: int) -> None:
    data = encoded(picture(1, width, height), kind)
    got = decode_image(data, 32, 3)
    assert got.shape == (3, 32, 32)
    assert got.dtype == np.uint8
    gap = np.abs(got.astype(int) - pillow_result(data, 32))
    # Both scale in two rounded passes with weights of their own precision.
    assert gap.max() <= 2
    assert gap.mean() < 0.1


@pytest.mark.parametrize(
    ("width", "height"), [(48, 40), (63, 300), (64, 64), (65, 130), (255, 512), (256, 300)]
)
def test_without_simplejpeg_the_pixels_are_the_same(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(picture(2, width, height))
    fast = [decode_image(data, 32, channels) for channels in (1, 3)]
    monkeypatch.setattr(image_module, "simplejpeg", None)
    slow = [decode_image(data, 32, channels) for channels in (1, 3)]
    assert np.array_equal(fast[0], slow[0])
    assert np.array_equal(fast[1], slow[1])


def test_large_jpeg_is_halved_while_decoding_and_stays_close() -> None:
    data = encoded(picture(3, 400, 300))
    got = decode_image(data, 32, 3).astype(int)
    assert np.abs(got - pillow_result(data, 32)).mean() < 3


@pytest.mark.parametrize("mode", ["L", "CMYK", "1", "P", "RGBA", "LA", "I;16"])
def test_other_colour_modes_become_rgb(mode: str) -> None:
    if mode == "I;16":
        ramp = np.tile(np.linspace(0, 65535, 40).astype(np.uint16), (40, 1))
        data = encoded(Image.fromarray(ramp), "PNG")
        expected = np.tile(np.linspace(0, 255, 40), (3, 40, 1))
    else:
        image = picture(4, 40, 40).convert(mode)
        data = encoded(image, "JPEG" if mode in ("L", "CMYK") else "PNG")
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    got = decode_image(data, 40, 3).astype(float)
    assert np.abs(got - expected).mean() < 3


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_is_honoured(orientation: int) -> None:
    image = picture(5, 40, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    got = decode_image(encoded(image, exif=exif), 40, 3).astype(int)
    expected = np.rot90(np.asarray(image), turned).transpose(2, 0, 1)
    assert np.abs(got - expected).mean() < 3


def test_normalised_like_the_study(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", parts=("train", "val"))
    dataset = open_folder(folder)
    pixels = decode_image((folder / "train" / "cat" / "002.jpg").read_bytes(), 32, 3)
    inputs, targets = dataset.train.fetch(np.array([2]), epoch=0, augment=False)
    np.testing.assert_allclose(denormalised(inputs[0]), pixels / 255, atol=1e-6)
    assert targets.tolist() == [0]


def denormalised(sample: torch.Tensor) -> np.ndarray:
    mean = np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1)
    deviation = np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1)
    return np.asarray(sample) * deviation + mean


def test_grey_channels(tmp_path: Path) -> None:
    dataset = open_folder(make_folder(tmp_path / "pets"), channels=1)
    assert everything(dataset).shape == (len(dataset.train), 1, 32, 32)


# Flips


def test_flips_depend_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 20)
    dataset = open_folder(folder, workers=1)
    plain = everything(dataset)
    augmented = everything(dataset, epoch=1, augment=True)
    flipped = [bool(torch.equal(augmented[n], plain[n].flip(-1))) for n in range(len(plain))]
    same = [bool(torch.equal(augmented[n], plain[n])) for n in range(len(plain))]
    assert all(one != other for one, other in zip(flipped, same, strict=True))
    assert 5 < sum(flipped) < len(plain) - 5
    other = open_folder(folder, workers=4, options={"cache": False})
    for part in np.array_split(np.random.default_rng(0).permutation(len(plain)), 5):
        other.train.fetch(part, epoch=0, augment=True)
        inputs, _ = other.train.fetch(part, epoch=1, augment=True)
        assert torch.equal(inputs, augmented[part])
    assert not torch.equal(everything(dataset, epoch=2, augment=True), augmented)
    seeded = open_folder(folder.rename(folder.parent / "p2"), seed=0, options={"flip": False})
    assert torch.equal(everything(seeded, epoch=1, augment=True), plain)
    other.close()


# Splits


def test_given_split(tmp_path: Path) -> None:
    for name in ("val", "valid", "validation", "test"):
        folder = make_folder(tmp_path / f"pets-{name}", 3, parts=("train", name))
        dataset = open_folder(folder)
        assert (len(dataset.train), len(dataset.test)) == (6, 6)
        assert dataset.classes == ("cat", "dog")
        assert dataset.notes == ()


def test_made_split_is_seeded_stratified_and_stated(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 10)
    dataset = open_folder(folder, validation=0.3)
    assert (len(dataset.train), len(dataset.test)) == (14, 6)
    assert dataset.test.targets is not None
    assert np.bincount(dataset.test.targets).tolist() == [3, 3]
    assert "6 of 20 images are held back" in dataset.notes[0]
    assert torch.equal(everything(dataset), everything(open_folder(folder, validation=0.3)))
    other = open_folder(folder, validation=0.3, seed=1)
    assert not torch.equal(everything(dataset), everything(other))


def test_found_by_name_below_the_root_and_train_without_test(tmp_path: Path) -> None:
    make_folder(tmp_path / "pets", 5, parts=("train",))
    cache = str(tmp_path / "cache")
    dataset = open_dataset(DataRequest(name="pets", root=str(tmp_path), cache=cache))
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("pets", 8, 2)
    assert dataset.sample_shape == (3, 224, 224)
    whole = DataRequest(name="image_folder", root=str(tmp_path / "pets"), cache=cache)
    assert open_dataset(whole).fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match="needs a folder"):
        open_dataset(DataRequest(name="image_folder"))


def test_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert open_folder(folder).fingerprint == open_folder(copy).fingerprint
    (copy / "cat" / "000.jpg").write_bytes(encoded(picture(9, 64, 64)))
    assert open_folder(folder).fingerprint != open_folder(copy).fingerprint


# Bad files


def test_bad_files_are_left_out_and_stated(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    good = encoded(picture(1, 200, 200))
    bad = {
        "empty.jpg": (b"", "empty file"),
        "text.jpg": (b"this is a letter, not a photograph", "not an image"),
        "cut.jpg": (good[: len(good) // 2], "damaged"),
        "cut.png": (encoded(picture(1), "PNG")[:-600], "damaged"),
        "tiny.png": (encoded(picture(1, 7, 40), "PNG"), "7x40 pixels"),
    }
    for name, (data, _) in bad.items():
        (folder / "cat" / name).write_bytes(data)
    (folder / "dog" / "notes.txt").write_text("not an image")
    (folder / "dog" / ".hidden.jpg").write_bytes(b"")
    (folder / "dog" / "lost.jpg").symlink_to(tmp_path / "nowhere.jpg")
    for _ in range(2):  # The second time from what is remembered.
        dataset = open_folder(folder)
        reasons = {one.path: one.reason for one in dataset.skipped}
        assert set(reasons) == {*(f"cat/{name}" for name in bad), "dog/lost.jpg"}
        for name, (_, reason) in bad.items():
            assert reason in reasons[f"cat/{name}"]
        assert len(dataset.train) + len(dataset.test) == 12
        assert any("1 files that are not images" in note for note in dataset.notes)
        assert "cat/cut.jpg (damaged" in dataset.left_out
        assert "and 5 more" in dataset.left_out
        assert bool(torch.isfinite(everything(dataset)).all())
        assert dataset.train.skipped_while_reading == ()


def test_trailing_bytes_and_missing_end_marker_with_all_pixels_are_fine(tmp_path: Path) -> None:
    good = encoded(picture(1))
    path = tmp_path / "a.jpg"
    path.write_bytes(good + b"\0" * 5000)
    assert quick_check(path) is None
    path.write_bytes(good)
    assert quick_check(path) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: shutil.rmtree(folder), r"unknown data set"),
        (lambda folder: [shutil.rmtree(path) for path in folder.iterdir()], "no class folders"),
        (lambda folder: shutil.rmtree(folder / "dog"), "only the class 'cat'"),
        (lambda folder: [p.unlink() for p in (folder / "dog").iterdir()], "dog holds no image"),
        (
            lambda folder: [p.write_bytes(b"x") for p in (folder / "dog").iterdir()],
            "no image of class 'dog' can be used: dog/000.jpg: not an image",
        ),
        (lambda folder: [p.unlink() for p in folder.glob("*/00[1-9].jpg")], "one image per class"),
    ],
)
def test_folders_without_something_to_learn(tmp_path: Path, change: object, text: str) -> None:
    folder = make_folder(tmp_path / "pets")
    change(folder)  # type: ignore[operator]
    with pytest.raises(DataError, match=text) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)


def test_test_part_that_does_not_fit(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 2, parts=("train", "val"))
    (folder / "val" / "cow").mkdir()
    with pytest.raises(DataError, match="class 'cow'"):
        open_folder(folder)
    shutil.rmtree(folder / "val")
    (folder / "val" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="val holds no image"):
        open_folder(folder)


def damage_inside(path: Path) -> None:
    """Break a PNG's pixels, not its header or end: only decoding shows it."""
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT") + 8
    data[start : start + 40] = bytes(40)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("workers", [1, 3])
def test_damage_seen_only_while_decoding_never_ends_an_epoch(tmp_path: Path, workers: int) -> None:
    folder = make_folder(tmp_path / "pets", 4, parts=("train", "val"))
    for index in (1, 2):
        path = folder / "train" / "cat" / f"{index:03}.png"
        path.with_suffix(".jpg").unlink()
        path.write_bytes(encoded(picture(index), "PNG"))
        damage_inside(path)
        assert quick_check(path) is None
    dataset = open_folder(folder, workers=workers)
    assert dataset.skipped == ()
    for epoch in range(2):
        inputs = everything(dataset, epoch=epoch)
        assert torch.equal(inputs[1], inputs[3])
        assert torch.equal(inputs[2], inputs[3])
        assert not torch.equal(inputs[0], inputs[3])
    skipped = dataset.train.skipped_while_reading
    assert [one.path for one in skipped] == ["train/cat/001.png", "train/cat/002.png"]
    assert "train/cat/003.jpg took its place" in skipped[0].reason
    for path in (folder / "train" / "dog").iterdir():
        path.write_bytes(path.read_bytes()[:10])
    fresh = DataRequest(
        name=str(folder), image_size=16, cache=str(tmp_path / "cache"), workers=workers
    )
    with pytest.raises(DataError, match="no image of class 'dog'"):
        open_dataset(fresh)
    dataset.close()


def test_a_disk_that_goes_away_is_an_error_not_a_loop(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    dataset = open_folder(folder, workers=1)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="is the disk still there"):
        everything(dataset)


def test_decode_image_names_the_damage() -> None:
    for data in (b"", b"x", encoded(picture(1))[:300], encoded(picture(1), "PNG")[:80]):
        with pytest.raises(ImageDamagedError):
            decode_image(data, 32, 3)


# The cache


def test_second_epoch_and_second_run_decode_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "pets")
    dataset = open_folder(folder)
    first = everything(dataset)
    read = dataset.train.bytes_read
    assert read == sum(path.stat().st_size for path in train_files(dataset, folder))

    def fail(*arguments: object) -> None:
        raise AssertionError("an image was decoded again")

    monkeypatch.setattr("paceline.data.image_folder.decode_image", fail)
    assert torch.equal(everything(dataset, epoch=1), first)
    assert dataset.train.bytes_read == read
    again = open_folder(folder)
    assert torch.equal(everything(again), first)
    assert again.train.bytes_read == 0
    dataset.close()


def train_files(dataset: Dataset, folder: Path) -> list[Path]:
    source = dataset.train
    listing = source._parts.listing  # type: ignore[attr-defined]
    return [folder / listing.files[number].path for number in source._files]  # type: ignore[attr-defined]


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 3, parts=("train", "val"))
    first = everything(open_folder(folder))
    (folder / "train" / "cat" / "000.jpg").write_bytes(encoded(picture(77)))
    second = everything(open_folder(folder))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1:], second[1:])


def test_a_torn_row_is_decoded_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 3, parts=("train", "val"))
    first = everything(open_folder(folder))
    (rows,) = (tmp_path / "cache" / "images").glob("*/images.bin")
    with rows.open("r+b") as file:
        file.write(b"\0" * 1000)
    again = open_folder(folder)
    assert torch.equal(everything(again), first)
    assert again.train.bytes_read == (folder / "train" / "cat" / "000.jpg").stat().st_size


def test_no_place_for_a_cache_is_one_warning(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets")
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(CacheWarning, match="not kept"):
        dataset = open_folder(folder, cache=str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Said once is enough.
        everything(dataset)
        plain = everything(dataset, epoch=1)
    assert any("not kept" in note for note in dataset.notes)
    assert torch.equal(plain, everything(open_folder(folder)))
    dataset.close()


def test_a_disk_that_fills_up_stops_the_cache_only(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, 10, (3, 32, 32))
    pixels = np.full((3, 32, 32), 7, dtype=np.uint8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    cache.write(0, pixels)
    # The kernel refuses to write beyond this, as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
    try:
        with pytest.warns(CacheWarning, match="decodes them again"):
            cache.write(8, pixels)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.write(9, pixels)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert np.array_equal(cache.read(0), pixels)  # type: ignore[arg-type]
    assert cache.read(8) is None
    assert cache.read(9) is None
    assert cache.filled == 1


def test_too_little_room_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.cache.HEADROOM", 1 << 60)
    with pytest.warns(CacheWarning, match="MB are free"):
        cache = ImageCache(tmp_path, 10, (3, 32, 32))
    cache.write(0, np.zeros((3, 32, 32), dtype=np.uint8))
    assert cache.filled == 0


def test_many_threads_fetch_the_same(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 12)
    expected = everything(open_folder(folder, options={"cache": False}), epoch=1, augment=True)
    dataset = open_folder(folder, workers=2)
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(everything(dataset, epoch=1, augment=True)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(torch.equal(one, expected) for one in results)
    before = threading.active_count()
    dataset.close()
    assert threading.active_count() < before


WORKER = """
import json, sys, zlib
import numpy as np
from paceline.data import DataRequest, open_dataset

folder, cache, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dataset = open_dataset(DataRequest(name=folder, cache=cache, image_size=32, workers=2))
part = np.random.default_rng(0).permutation(len(dataset.train))[rank::world]
read, sums = [], []
for epoch in range(2):
    inputs, _ = dataset.train.fetch(part, epoch=0, augment=True)
    read.append(dataset.train.bytes_read)
    sums.append(zlib.crc32(inputs.numpy().data))
dataset.close()
print(json.dumps({"part": part.tolist(), "read": read, "sums": sums}))
"""


def run_workers(folder: Path, cache: Path, places: list[tuple[int, int]]) -> list[dict[str, list]]:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(cache), str(rank), str(world)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, world in places
    ]
    results = []
    for worker in workers:
        output, _ = worker.communicate(timeout=600)
        assert worker.returncode == 0
        results.append(json.loads(output))
    return results


@pytest.mark.slow
def test_four_workers_read_only_their_own_part(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 11, parts=("train", "val"))
    results = run_workers(folder, tmp_path / "cache", [(rank, 4) for rank in range(4)])
    sizes = [path.stat().st_size for path in sorted((folder / "train").glob("*/*.jpg"))]
    for result in results:
        own = sum(sizes[number] for number in result["part"])
        assert result["read"] == [own, own]  # Nothing more in the second epoch.
        assert result["sums"][0] == result["sums"][1]
    assert sorted(number for result in results for number in result["part"]) == list(range(22))
    assert sum(result["read"][0] for result in results) == sum(sizes)
    # What the four decoded is there for the next run, whatever its number of workers.
    (alone,) = run_workers(folder, tmp_path / "cache", [(0, 1)])
    assert alone["read"] == [0, 0]


@pytest.mark.slow
def test_processes_that_fill_the_same_rows_agree(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", 11)
    results = run_workers(folder, tmp_path / "cache", [(0, 1), (0, 1)])
    assert len({sum_ for result in results for sum_ in result["sums"]}) == 1


@needs_fire
def test_real_photographs(tmp_path: Path) -> None:
    request = DataRequest(name="fire", root=REAL_DATA, cache=str(tmp_path / "cache"))
    dataset = open_dataset(request)
    assert (len(dataset.train), len(dataset.test)) == (1443, 362)
    assert dataset.classes == ("fire", "no_fire", "start_fire")
    assert dataset.skipped == ()
    numbers = np.arange(0, 1443, 30)
    inputs, targets = dataset.train.fetch(numbers, epoch=0, augment=True)
    assert inputs.shape == (49, 3, 224, 224)
    assert sorted(set(targets.tolist())) == [0, 1, 2]
    read = dataset.train.bytes_read
    again, _ = dataset.train.fetch(numbers, epoch=0, augment=True)
    assert torch.equal(inputs, again)
    assert dataset.train.bytes_read == read
    dataset.close()
