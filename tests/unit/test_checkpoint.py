"""Checkpoints: whole or not there, only the needed ones kept, and the same after loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.errors import RunDirectoryError, StorageError
from paceline.train import checkpoint as checkpoint_module
from paceline.train.checkpoint import Checkpoints, Position, TrainState

Tensors = dict[str, torch.Tensor]


def state(update: int, **more: object) -> TrainState:
    position = Position(epoch=update // 10, step=update % 10, update=update)
    return TrainState(position=position, batch_size=4, samples=40, **more)  # type: ignore[arg-type]


def tensors(value: float) -> Tensors:
    return {"layer.weight": torch.full((3, 2), value), "layer.bias": torch.full((3,), -value)}


def save(checkpoints: Checkpoints, update: int, *, best: bool = False) -> Path:
    return checkpoints.save(state(update), tensors(update), {}, best=best)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    model: Tensors = {
        "conv": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "part": torch.randn(10)[3:7],
        "transposed": torch.randn(3, 4).t(),
        "count": torch.tensor(7),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    model["tied"] = model["part"]
    optimizer = {
        "layer|odd.name": {"exp_avg": torch.randn(3), "step": torch.tensor(5.0)},
        "plain": {"momentum_buffer": torch.randn(2), "count": 3, "flag": True, "rate": 0.1},
    }
    before = state(13, tally={"loss_sum": 1.25, "samples": 8.0}, best_accuracy=0.5, since_best=2)
    path = checkpoints.save(before, model, optimizer)
    after, loaded, moments = Checkpoints(tmp_path / "checkpoints", keep=2).load(path)
    assert after.position == Position(epoch=1, step=3, update=13)
    assert (after.tally, after.best_accuracy) == (before.tally, 0.5)
    assert loaded.keys() == model.keys()
    for name, tensor in model.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert moments.keys() == optimizer.keys()
    assert torch.equal(moments["layer|odd.name"]["exp_avg"], optimizer["layer|odd.name"]["exp_avg"])  # type: ignore[arg-type]
    assert moments["plain"]["count"] == 3
    assert moments["plain"]["flag"] is True
    assert float(moments["layer|odd.name"]["step"]) == 5.0


def test_only_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for update in (1, 2, 3, 4, 5):
        save(checkpoints, update, best=update == 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "latest", "step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "latest").resolve().name == "step-00000005"
    assert (tmp_path / "best").resolve().name == "step-00000002"
    save(checkpoints, 6, best=True)
    assert not (tmp_path / "step-00000002").exists()


def test_newest_is_by_number_and_ignores_what_is_not_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    assert checkpoints.newest() is None
    save(checkpoints, 99999999)
    save(checkpoints, 100000000)  # more digits than the names have
    (tmp_path / "step-200000000").mkdir()  # no state.json inside
    (tmp_path / ".partial-00000999").mkdir()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step-100000000"


def test_leftovers_of_a_killed_run_go_away(tmp_path: Path) -> None:
    (tmp_path / ".partial-00000005").mkdir()
    (tmp_path / ".partial-00000005" / "model.safetensors").write_bytes(b"half")
    save(Checkpoints(tmp_path, keep=1), 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_a_failed_write_costs_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("_flush", "save_file", "_point"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_module, broken, full)
            with pytest.raises(StorageError) as caught:
                save(checkpoints, 2)
        assert "update 2" in str(caught.value)
        assert "No space left on device" in str(caught.value)
        assert "\n" not in str(caught.value)
        _, model, _ = checkpoints.load(tmp_path / "step-00000001")
        assert torch.equal(model["layer.weight"], tensors(1.0)["layer.weight"])
        assert not list(tmp_path.glob(".partial-*"))


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="there is none before it"):
        save(Checkpoints(tmp_path / "file" / "checkpoints", keep=1), 1)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbled"])
def test_damage_is_one_sentence_with_the_way_out(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = save(checkpoints, 3)
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        kinds = {"empty": b"", "cut": content[: len(content) // 2], "garbled": b"\xff" * 64}
        file.write_bytes(kinds[damage])
    with pytest.raises(RunDirectoryError) as caught:
        checkpoints.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "remove it to continue from the one before" in message
    assert "\n" not in message


def test_state_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = save(checkpoints, 3)
    data = json.loads((path / "state.json").read_text()) | {"surprise": 1}
    (path / "state.json").write_text(json.dumps(data))
    with pytest.raises(RunDirectoryError, match="surprise"):
        checkpoints.load(path)
