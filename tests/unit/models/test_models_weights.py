"""Weights from files, replacing the head, freezing the body."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline import models
from paceline.errors import ModelError


def resnet(classes: int = 10, channels: int = 1) -> nn.Module:
    return models.build("resnet18", classes=classes, channels=channels, options={"stem": "small"})


def small(classes: int = 10, channels: int = 1) -> nn.Module:
    return models.build("shallow_cnn", classes=classes, channels=channels)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    module = small()
    path = tmp_path / "small.safetensors"
    save_file(module.state_dict(), path)
    return module, path


def assert_same_state(left: nn.Module, right: nn.Module, without: tuple[str, ...] = ()) -> None:
    theirs = right.state_dict()
    for key, value in left.state_dict().items():
        if key not in without:
            assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("form", ["safetensors", "torch", "wrapped", "ddp", "unnamed safetensors"])
def test_round_trip(form: str, tmp_path: Path) -> None:
    original, fresh = resnet(), resnet()
    with torch.no_grad():
        original(torch.randn(2, 1, 8, 8))
    state = original.state_dict()
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.bin")
    if "safetensors" in form:
        save_file(state, path)
    elif form == "torch":
        torch.save(state, path)
    elif form == "wrapped":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        torch.save({f"module.{key}": value for key, value in state.items()}, path)
    assert models.load_weights(fresh, path, replace_head=False) == []
    assert_same_state(original, fresh)


def test_head_of_other_classes_is_replaced(saved: tuple[nn.Module, Path]) -> None:
    original, path = saved
    fresh = small(classes=3)
    head = copy.deepcopy(fresh.state_dict())
    left_out = models.load_weights(fresh, path, replace_head=True)
    assert left_out == ["classifier.2.weight", "classifier.2.bias"]
    assert_same_state(original, fresh, without=tuple(left_out))
    for key in left_out:
        assert torch.equal(fresh.state_dict()[key], head[key])


def test_head_of_the_same_classes_is_kept(saved: tuple[nn.Module, Path]) -> None:
    original, path = saved
    fresh = small()
    assert models.load_weights(fresh, path, replace_head=True) == []
    assert_same_state(original, fresh)


def test_file_without_a_head(tmp_path: Path) -> None:
    original = small()
    body = {key: value for key, value in original.state_dict().items() if "classifier.2" not in key}
    save_file(body, tmp_path / "body.safetensors")
    fresh = small(classes=5)
    left_out = models.load_weights(fresh, tmp_path / "body.safetensors", replace_head=True)
    assert left_out == ["classifier.2.weight", "classifier.2.bias"]


def test_file_from_before_batch_norm_counted_batches(tmp_path: Path) -> None:
    original = resnet()
    state = {k: v for k, v in original.state_dict().items() if "num_batches" not in k}
    save_file(state, tmp_path / "old.safetensors")
    left_out = models.load_weights(resnet(), tmp_path / "old.safetensors", replace_head=False)
    assert all(name.endswith("num_batches_tracked") for name in left_out)


def test_weights_that_do_not_fit_change_nothing(saved: tuple[nn.Module, Path]) -> None:
    _, path = saved
    for module, replace_head, words in (
        (small(classes=3), False, "classifier.2.weight is 10x500 in the file and 3x500"),
        (small(channels=3), True, "features.0.weight is 20x1x5x5 in the file and 20x3x5x5"),
        (resnet(), True, "missing conv1.weight, bn1.weight, bn1.bias and"),
        (resnet(), False, "unexpected classifier.0.bias, classifier.0.weight"),
    ):
        before = copy.deepcopy(module)
        with pytest.raises(ModelError, match="does not fit the model") as caught:
            models.load_weights(module, path, replace_head=replace_head)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert_same_state(before, module)


def test_files_that_cannot_be_read(tmp_path: Path, saved: tuple[nn.Module, Path]) -> None:
    module, path = saved
    whole = path.read_bytes()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    torch.save([1, 2], tmp_path / "list.pt")
    contents = {
        "cut.safetensors": whole[: len(whole) // 2],
        "empty.pt": b"",
        "text.pt": b"these are not weights",
        "cut.pt": buffer.getvalue()[: len(buffer.getvalue()) // 2],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "list.pt", "absent.pt"):
        with pytest.raises(ModelError, match=name) as caught:
            models.load_weights(module, tmp_path / name, replace_head=False)
        assert "\n" not in str(caught.value)


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_code_in_a_weights_file_is_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"weight": Trap(marker)}, tmp_path / "trap.pt")
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps({"weight": Trap(marker)}))
    for name in ("trap.pt", "trap.pkl"):
        with pytest.raises(ModelError, match="never executed"):
            models.load_weights(small(), tmp_path / name, replace_head=False)
    assert not marker.exists()


def test_head_names() -> None:
    assert models.head_name(small()) == "classifier.2"
    assert models.head_name(resnet()) == "fc"
    assert models.head_name(nn.Linear(2, 2)) == ""
    with pytest.raises(ModelError, match="has no torch"):
        models.head_name(nn.Sequential(nn.Conv2d(1, 1, 1)))


@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
def test_frozen_body_does_not_move(how: str) -> None:
    module = resnet(classes=3)
    models.freeze_body(module)
    if how == "deepcopy":
        module = copy.deepcopy(module)
    elif how == "pickle":
        module = pickle.loads(pickle.dumps(module))
    trainable = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trainable == ["fc.weight", "fc.bias"]
    before = copy.deepcopy(module)
    module.train()
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms
    assert all(layer.frozen and not layer.training for layer in norms)
    assert module.training
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(0)
    nn.functional.cross_entropy(
        module(torch.randn(4, 1, 8, 8)), torch.tensor([0, 1, 2, 0])
    ).backward()
    optimizer.step()
    assert_same_state(before, module, without=("fc.weight", "fc.bias"))
    assert not torch.equal(before.get_parameter("fc.weight"), module.get_parameter("fc.weight"))
