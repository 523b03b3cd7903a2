"""Slow data sets of the user's own are read by other processes, with the same samples."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data import readers
from paceline.data.base import DataRequest
from paceline.data.feed import Feed
from paceline.data.own import as_source
from paceline.data.sampler import GlobalSampler

SAMPLES, BATCH = 60, 4


class Items:
    """Says who read it, and draws as augmentations do."""

    def __init__(self, seconds: float, **others: Any) -> None:
        self.seconds, self.table = seconds, torch.arange(SAMPLES, dtype=torch.float32)
        vars(self).update(others)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {
            "number": self.table[number] + torch.rand(()),
            "process": torch.tensor(os.getpid()),
        }


class Reopening(Items):
    """A file that is not copied but opened again, as careful data sets do."""

    def __init__(self, path: Path) -> None:
        super().__init__(0.01, path=path)
        self.file = path.open("rb")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, file=state["path"].open("rb"))

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.file.seek(number)
        time.sleep(self.seconds)
        (found,) = self.file.read(1)
        return {"number": torch.tensor(float(found)), "process": torch.tensor(os.getpid())}


@pytest.fixture(autouse=True)
def _short_epochs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "STARTING", 0.1)


def feed_of(dataset: Any) -> Feed:
    return Feed(
        source=as_source(dataset, seed=3, request=DataRequest(name="own", nested=True)),
        sampler=GlobalSampler(samples=SAMPLES, batch_size=BATCH, seed=0),
        shares=[1.0],
        worker=0,
    )


def read(feed: Feed, epoch: int = 0) -> tuple[list[float], set[int]]:
    """The numbers, and the processes that read them."""
    batches = [batch.samples.values for batch in feed.epoch(epoch)]
    numbers = [number for batch in batches for number in batch["number"].tolist()]
    return numbers, {process for batch in batches for process in batch["process"].tolist()}


def test_a_slow_data_set_is_read_by_other_processes_with_the_same_samples() -> None:
    slow = feed_of(Items(0.01))
    fast = feed_of(Items(0.0))
    fast.source.may_be_copied = False
    found, who = read(slow)
    expected, alone = read(fast)
    assert found == expected
    assert alone == {os.getpid()}
    assert len(who) > 1
    again, from_the_start = read(slow, epoch=1)
    assert again == read(fast, epoch=1)[0] != found
    assert os.getpid() not in from_the_start


def test_a_file_is_opened_again_by_each_reader(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(SAMPLES)))
    dataset = Reopening(tmp_path / "bytes")
    feed = feed_of(dataset)
    found, who = read(feed)
    dataset.file.close()
    assert len(who) > 1
    assert found == [float(n) for n in feed.sampler.order(0)]


@pytest.mark.parametrize(
    "held",
    [io.BytesIO(), threading.Lock(), lambda lock=None: None],
    ids=["buffer", "lock", "function"],
)
def test_what_cannot_be_copied_is_read_here(held: Any, tmp_path: Path) -> None:
    copied = not isinstance(held, type(threading.Lock()))
    _, who = read(feed_of(Items(0.01, held=held)))
    assert (len(who) > 1) is copied


def test_neither_is_a_function_that_holds_an_open_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        _, who = read(feed_of(Items(0.01, held=lambda: file)))
    assert who == {os.getpid()}


FILE: Any = None


class Global(Items):
    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(int(self.place(number)))

    @staticmethod
    def place(number: int) -> int:
        return (lambda: number if FILE is None else FILE.tell() * 0 + number)()


def test_nor_one_that_reaches_an_open_file_by_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, who = read(feed_of(Global(0.01)))
    assert len(who) > 1
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setitem(globals(), "FILE", file)
        _, who = read(feed_of(Global(0.01)))
    assert who == {os.getpid()}


def test_errors_of_readers_name_the_item() -> None:
    class Broken(Items):
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            if number == 37:
                raise ValueError("no such picture")
            return super().__getitem__(number)

    with pytest.raises(Exception, match="item 37 raised ValueError: no such picture"):
        read(feed_of(Broken(0.01)))


def test_short_epochs_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "STARTING", 60.0)
    _, who = read(feed_of(Items(0.01)))
    assert who == {os.getpid()}
