"""The user's own map-style datasets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Subset as TorchSubset

from paceline.data import DataRequest, from_datasets, open_dataset
from paceline.errors import ConfigError, DataError


class Noisy:
    """Draws from all three global generators, as augmentations do."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([float(index), *noise]), index % 3


class Items:
    """A dataset that is a list."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_items_do_not_depend_on_who_fetches_them() -> None:
    numbers = np.array([7, 2, 5])
    first = from_datasets(Noisy(), Noisy(), seed=1)
    whole, targets = first.train.fetch(numbers, epoch=2, augment=True)
    second = from_datasets(Noisy(), Noisy(), seed=1)
    torch.manual_seed(99)
    for place in (2, 0, 1):
        one, _ = second.train.fetch(numbers[place : place + 1], epoch=2, augment=True)
        assert torch.equal(one[0], whole[place])
    assert targets.tolist() == [1, 2, 2]
    assert not torch.equal(whole, first.train.fetch(numbers, epoch=3, augment=True)[0])
    other = from_datasets(Noisy(), Noisy(), seed=2)
    assert not torch.equal(whole, other.train.fetch(numbers, epoch=2, augment=True)[0])
    tests = [first.test.fetch(numbers, epoch=epoch, augment=False)[0] for epoch in (0, 5)]
    assert torch.equal(*tests)
    assert first.train.concurrent is False


def test_global_generators_are_put_back() -> None:
    dataset = from_datasets(Noisy(), Noisy())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    dataset.train.fetch(np.arange(4), epoch=0, augment=True)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


def test_tensor_dataset_takes_the_fast_path() -> None:
    inputs = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    pair = TensorDataset(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))
    dataset = from_datasets(pair, pair)
    got, targets = dataset.train.fetch(np.array([5, 0]), epoch=0, augment=True)
    assert dataset.train.concurrent
    assert got.tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    assert targets.tolist() == [2, 0]
    assert dataset.classes == ("0", "1", "2")
    assert len(dataset.train.fetch(np.array([], dtype=np.int64), epoch=0, augment=True)[0]) == 0


VALUES: dict[str, Any] = {
    "float32": torch.rand(2, 3),
    "float64": torch.rand(3, dtype=torch.float64),
    "float16": torch.rand(3).half(),
    "bytes": torch.tensor([0, 128, 255], dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "complex": torch.complex(torch.rand(2), torch.rand(2)),
    "tokens": torch.tensor([4, 5]),
    "int32": torch.tensor([4, 5], dtype=torch.int32),
    "array of doubles": np.linspace(0, 1, 5),
    "array of bytes": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "a view backwards": np.arange(3.0)[::-1].copy()[::-1],
    "a number of numpy": np.float32(0.25),
    "number": 7,
    "fraction": 0.1,
    "flag": True,
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", VALUES)
def test_items_are_what_a_data_loader_makes_of_them(name: str) -> None:
    value = VALUES[name]
    forward = (
        value.copy() if isinstance(value, np.ndarray) else value
    )  # DataLoader wants strides >0
    expected = next(iter(DataLoader(Items((forward, forward), (forward, forward)), batch_size=2)))
    data = Items((value, value), (value, value))
    both = [data]
    if isinstance(value, torch.Tensor):
        both.append(TensorDataset(torch.stack([value] * 2), torch.stack([value] * 2)))
    for one in both:
        dataset = from_datasets(one, one)
        found = dataset.train.fetch(np.array([0, 1]), epoch=0, augment=False)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "F", "I"])
def test_pictures_become_what_to_tensor_makes_of_them(mode: str) -> None:
    picture = Image.new("RGB", (4, 2), (255, 255, 255)).convert(mode)
    data = Items((picture, 0), (picture, 1))
    inputs, _ = from_datasets(data, data).train.fetch(np.array([0, 1]), epoch=0, augment=False)
    assert inputs.shape == (2, 3 if mode == "RGB" else 1, 2, 4)
    assert inputs.dtype == (torch.int32 if mode == "I" else torch.float32)
    assert float(inputs.max()) == (255.0 if mode in "FI" else 1.0)


class Listed(Items):
    """Lists its labels as torchvision's datasets do."""

    def __init__(self, labels: Any, *items: Any) -> None:
        super().__init__(*items)
        self.targets = labels


def test_listed_labels_count_only_where_items_have_them() -> None:
    items = [(torch.zeros(1), n % 3) for n in range(9)]
    honest = Listed([n % 3 for n in range(9)], *items)
    dataset = from_datasets(honest, honest)
    assert dataset.classes == ("0", "1", "2")
    assert dataset.train.targets is None, "what is trained on comes from the items"
    assert dataset.train.labels is not None
    assert dataset.train.labels.tolist() == [n % 3 for n in range(9)]

    other = Listed([5] * 9, *items)
    assert from_datasets(other, other).classes == ()
    floats = Listed([0] * 9, *[(torch.zeros(1), 0.0)] * 9)
    assert from_datasets(floats, floats).classes == ()

    honest.target_transform = str  # type: ignore[attr-defined]
    assert from_datasets(honest, honest).classes == ()
    honest.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    assert from_datasets(honest, honest).classes == ()
    honest.target_transform = None  # type: ignore[attr-defined]
    part = TorchSubset(honest, [0, 4])  # type: ignore[arg-type]
    assert from_datasets(part, part).classes == ("a", "b", "c")


def test_large_numbers_are_no_classes() -> None:
    pair = TensorDataset(torch.zeros(3, 1), torch.tensor([1_700_000_000, 5, 6]))
    assert from_datasets(pair, pair).classes == ()


def test_a_share_of_nothing() -> None:
    data = Items((torch.zeros(2), 0.5), (torch.zeros(2), 1.5))
    dataset = from_datasets(data, data)
    assert dataset.classes == ()
    assert any("classes is not known" in note for note in dataset.notes)
    inputs, targets = dataset.train.fetch(np.array([], dtype=np.int64), epoch=0, augment=True)
    assert (inputs.shape, targets.shape) == ((0, 2), (0,))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Items(torch.zeros(3)), "item 0 is Tensor, not a pair"),
        (Items((1, 2, 3)), "item 0 is 3 values, not a pair"),
        (Items(("text", 0)), "input is a str"),
        (Items(((torch.zeros(1), torch.zeros(1)), 0)), "tuple of several inputs"),
        (Items(({"a": torch.zeros(1)}, 0)), "dict of several inputs"),
        (Items((torch.zeros(1), (1, 2))), "target \\(1, 2\\) is neither"),
        (Items((torch.zeros(1), "cat")), "target 'cat'"),
        (Items(), "is empty"),
        (iter([1, 2]), "__getitem__"),
        ({"a": 1}, "item 0 raised KeyError"),
    ],
)
def test_what_is_no_dataset_is_one_sentence(data: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        from_datasets(data, data)


def test_unequal_shapes_name_the_item() -> None:
    data = Items((torch.zeros(3), 0), (torch.zeros(4), 1))
    with pytest.raises(DataError, match=r"item 1 has shape \(4,\), item 0 \(3,\)"):
        from_datasets(data, data).train.fetch(np.array([0, 1]), epoch=0, augment=False)
    with pytest.raises(DataError, match=r"\(3,\), test samples \(4,\)"):
        from_datasets(Items((torch.zeros(3), 0)), Items((torch.zeros(4), 1)))


PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Subset as TorchSubset

def one(count=20):
    return TensorDataset(torch.arange(count).float()[:, None], torch.arange(count) % 2)

def pair():
    return one(10), one(4)

def three():
    return 1, 2, 3

def broken():
    raise RuntimeError("no luck")

def leaving():
    raise SystemExit(3)
"""


def test_reference_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    made = open_dataset(DataRequest(name=f"{file}:one", options={"count": 30}, validation=0.2))
    assert (len(made.train), len(made.test)) == (24, 6)
    assert any("6 of 30 samples" in note for note in made.notes)
    values = [
        part.fetch(np.arange(len(part)), epoch=0, augment=True)[0]
        for part in (made.train, made.test)
    ]
    assert sorted(torch.cat(values).flatten().tolist()) == list(range(30))
    assert made.train.targets is not None
    assert np.bincount(made.train.targets).tolist() == [12, 12]
    given = open_dataset(DataRequest(name=f"{file}:pair", limit=3))
    assert (len(given.train), len(given.test)) == (3, 3)
    with pytest.raises(DataError, match="returned 3 values"):
        open_dataset(DataRequest(name=f"{file}:three"))
    with pytest.raises(DataError, match="SystemExit: 3"):
        open_dataset(DataRequest(name=f"{file}:leaving"))
    with pytest.raises(DataError, match="RuntimeError: no luck"):
        open_dataset(DataRequest(name=f"{file}:broken"))
    with pytest.raises(ConfigError, match="nothing"):
        open_dataset(DataRequest(name=f"{file}:nothing"))
