"""Arrays that are kept: damaged ones are noticed and made again, whole ones are not read twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.data import arrays
from paceline.data.arrays import cached_array, check_kept

PIXELS = np.arange(4096, dtype=np.uint8).reshape(64, 64)


class Kept:
    """A cached array and how often it was made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, 0
        self.source = folder / "source"
        self.source.write_text("x")

    def get(self) -> np.ndarray:
        return np.array(cached_array(self.folder, [self.source], "t", self._make))

    def _make(self) -> np.ndarray:
        self.made += 1
        return PIXELS

    @property
    def path(self) -> Path:
        return next((self.folder / "arrays").glob("*.npy"))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    found = Kept(tmp_path)
    found.get()
    return found


@pytest.mark.parametrize("same_time", [True, False], ids=["same time", "later"])
def test_a_flipped_bit_is_noticed(kept: Kept, same_time: bool) -> None:
    before = kept.path.stat()
    data = bytearray(kept.path.read_bytes())
    data[-7] ^= 1  # a pixel: the header is as it was
    kept.path.write_bytes(data)
    if same_time:
        os.utime(kept.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert np.array_equal(kept.get(), PIXELS)
    assert kept.made == 2
    assert np.array_equal(kept.get(), PIXELS)
    assert kept.made == 2


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b"\xff"])
def test_an_array_without_its_note_is_made_again(kept: Kept, content: bytes) -> None:
    kept.path.with_suffix(".json").write_bytes(content)
    assert np.array_equal(kept.get(), PIXELS)
    assert kept.made == 2


def test_what_has_not_changed_for_long_is_not_read(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = time.time_ns() - 60 * 10**9
    os.utime(kept.path, ns=(old, old))
    check_kept(kept.path)  # copied, or touched: read once more
    assert json.loads(kept.path.with_suffix(".json").read_text())["changed"] == old
    monkeypatch.setattr(arrays, "sum_of", None)
    check_kept(kept.path)
    assert np.array_equal(kept.get(), PIXELS)
    assert kept.made == 1
