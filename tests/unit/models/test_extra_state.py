"""What modules save besides tensors goes into a file and comes back the same."""

from __future__ import annotations

import json
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline import models
from paceline.errors import ModelError, UnsupportedError
from paceline.models.extra_state import check_extra_state, has_extra_state, load_model, separate


class Keeper(nn.Linear):
    """Keeps anything."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Colour(IntEnum):
    RED = 1


VALUES = [
    None,
    True,
    3,
    -0.5,
    float("inf"),
    "tensor",
    [1, [2.5, "x"]],
    (1, (None,)),
    {"tensor": "a text", 3: (1, 2), (1, 2): []},
    OrderedDict(b=1, a=2),
    {1, 2},
    {},
    {"|": "|"},
]


def saved(model: nn.Module, path: Path) -> Path:
    tensors, text = separate(model.state_dict())
    save_file(tensors, path, metadata=text)
    return path


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_comes_back_the_same(value: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Keeper(value))
    path = saved(model, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(2, 2), Keeper("other"))
    other.load_state_dict(load_model(path))
    assert repr(other[1].kept) == repr(value)
    assert torch.equal(other[0].weight, model[0].weight)
    assert load_file(path).keys() == {n for n, _ in model.named_parameters()}


def test_tensors_inside_and_alone(tmp_path: Path) -> None:
    for value in ({"seen": [torch.arange(3), 1]}, torch.ones(2)):
        found = load_model(saved(Keeper(value), tmp_path / "model.safetensors"))
        assert found.keys() == {"weight", "bias", "_extra_state"}
        assert repr(found["_extra_state"]) == repr(value)


def test_what_has_no_plain_form_is_refused() -> None:
    for value in (object(), [{"a": Colour.RED}], b"bytes", Keeper):
        with pytest.raises(UnsupportedError, match=r"'_extra_state' \(get_extra_state\)"):
            check_extra_state(Keeper(value))
    check_extra_state(nn.Linear(1, 1))
    assert not has_extra_state(torch.jit.script(nn.Linear(1, 1)))


@pytest.mark.parametrize("text", ["[", "[1]", '{"a": {"call": 1}}', '{"a": {"tensor": "gone"}}'])
def test_a_damaged_text_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"extra_state": text})
    with pytest.raises(ValueError, match="is not what Paceline writes"):
        load_model(path)


def test_weights_of_a_run_bring_it_too(tmp_path: Path) -> None:
    path = saved(Keeper({"epoch": 3}), tmp_path / "model.safetensors")
    model = Keeper()
    assert models.load_weights(model, path, replace_head=False) == []
    assert model.kept == {"epoch": 3}
    with pytest.raises(ModelError, match="unexpected _extra_state"):
        models.load_weights(nn.Linear(2, 2), path, replace_head=False)
    assert json.loads(separate({"_extra_state": 1})[1]["extra_state"]) == {"_extra_state": 1}  # type: ignore[index]
