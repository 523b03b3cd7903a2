"""Checkpoints: whole or not there, only the needed ones kept, and the same after loading."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from paceline.config import config_from
from paceline.errors import RunDirectoryError, StorageError, UnsupportedError
from paceline.schema.checkpoint import (
    check_continued,
    fixed_settings,
    newest_good,
    read_state,
    with_lengths,
)
from paceline.training import checkpoint as checkpoint_module
from paceline.training.checkpoint import Checkpoints, Position, TrainState, check_model

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
        ".optimizer": {"groups": [{"betas": (0.9, 0.999), "k": 7, "d": 1e-6, "none": None}]},
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
    assert moments[".optimizer"] == optimizer[".optimizer"]


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
    (tmp_path / "step-200000000").mkdir()  # nothing inside
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

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("flush", "save_file", "point"):
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
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbled", "bit", "zeros"])
def test_damage_is_one_sentence_with_the_way_out(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = save(checkpoints, 3)
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        flipped = bytearray(content)
        flipped[-5] ^= 1  # of a weight, or of a digit
        kinds = {
            "empty": b"",
            "cut": content[: len(content) // 2],
            "garbled": b"\xff" * 64,
            "bit": bytes(flipped),
            "zeros": content[:-16] + b"\0" * 16,
        }
        file.write_bytes(kinds[damage])
    with pytest.raises(RunDirectoryError) as caught:
        checkpoints.load(path)
    message = str(caught.value)
    assert f"the checkpoint {path} is damaged" in message
    assert "--resume" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "edit",
    [
        {"surprise": 1},
        {"position": {"epoch": 0, "step": 2, "update": 2}},
        {"settings": {"seed": 8}},
        {"since_best": 3},
        {"files": {}},
        {"format": 3},
    ],
)
def test_an_edited_state_is_refused(tmp_path: Path, edit: dict[str, object]) -> None:
    path = save(Checkpoints(tmp_path, keep=2), 3)
    data = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(data))  # laid out otherwise: the same
    assert read_state(path).position.update == 3
    (path / "state.json").write_text(json.dumps(data | edit))
    with pytest.raises(RunDirectoryError, match="is damaged"):
        Checkpoints(tmp_path, keep=2).load(path)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path, keep=2), 3)
    moved = path.rename(tmp_path / "step-00000009")
    with pytest.raises(RunDirectoryError, match="it is of update 3"):
        read_state(moved)


def test_the_newest_good_one_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert newest_good(tmp_path, print) is None
    paths = [save(checkpoints, update) for update in (1, 2, 3)]
    (paths[2] / "state.json").unlink()
    with (paths[1] / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    said: list[str] = []
    found = newest_good(tmp_path, said.append)
    assert found is not None
    assert found[0] == paths[0]
    assert [str(path) in line for path, line in zip(paths[:0:-1], said, strict=True)] == [True] * 2
    assert "model.safetensors is not what was written" in said[1]
    assert (tmp_path / "latest").resolve() == paths[0]
    # Out of the way of what is written next, and there to be looked at.
    assert (tmp_path / "damaged-step-00000003").is_dir()
    assert newest_good(tmp_path, said.append) == found
    assert len(said) == 2
    save(checkpoints, 2)
    assert checkpoints.newest() == paths[1]
    for path in paths[:2]:
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(RunDirectoryError, match="there is no other to continue from"):
        newest_good(tmp_path, said.append)


def test_one_from_before_there_were_sums_is_taken_with_a_word(tmp_path: Path) -> None:
    path = save(Checkpoints(tmp_path, keep=2), 13)
    data = json.loads((path / "state.json").read_text())
    old = {key: data[key] for key in ("batch_size", "samples", "tally", "optimizer_numbers")}
    # It took an epoch that ended halfway for a whole one.
    old |= {"format": 1, "position": {"epoch": 2, "step": 0, "update": 13}}
    (path / "state.json").write_text(json.dumps(old))
    said: list[str] = []
    found = newest_good(tmp_path, said.append)
    assert found is not None
    assert found[1].position == Position(epoch=1, step=3, update=13)
    assert said == [
        f"warning: {path} was written without checksums: whether it is whole is not known"
    ]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'thing' of weight as object"):
        Checkpoints(tmp_path, keep=1).save(state(1), tensors(1.0), {"weight": {"thing": object()}})
    with pytest.raises(UnsupportedError, match="complex64"):
        check_model(torch.nn.Linear(1, 2, dtype=torch.complex128))


CONFIG = config_from({"optimizer.schedule": "constant"})


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    before = state(3, settings=fixed_settings(CONFIG), updates=50)
    check_continued(tmp_path, before, dataclasses.replace(CONFIG, name="other"))
    with pytest.raises(RunDirectoryError, match=r"seed \(was 0, now 4\)"):
        check_continued(tmp_path, before, dataclasses.replace(CONFIG, seed=4))


@pytest.mark.parametrize(
    ("optimizer", "done", "epochs", "lengths"),
    [
        ({"schedule": "constant"}, 15, 9, {}),
        ({"schedule": "cosine"}, 15, 9, {"15": 20}),
        ({"schedule": "cosine"}, 15, 2, {}),
        ({"schedule": "cosine"}, 0, 9, {}),
        ({"schedule": "constant", "warmup": 0.2}, 15, 9, {"15": 20}),
        ({"schedule": "step", "step_every": 0.5}, 9, 9, {}),
        ({"schedule": "step", "step_every": 0.5}, 11, 9, {"11": 20}),
    ],
)
def test_another_length_is_noted_where_rates_so_far_followed_the_old_one(
    tmp_path: Path, optimizer: dict[str, object], done: int, epochs: int, lengths: dict[str, int]
) -> None:
    config = config_from({"optimizer": optimizer, "train.epochs": epochs})
    before = state(done, updates=20)  # 2 epochs of 10 updates
    longer = with_lengths(config, before)
    assert longer.train.lengths == lengths
    check_continued(tmp_path, before, longer)
    if lengths:
        with pytest.raises(RunDirectoryError, match="another learning rate in update"):
            check_continued(tmp_path, before, config)
        again = dataclasses.replace(before, updates=90, lengths=lengths)
        assert with_lengths(config, again).train.lengths == lengths


def test_a_run_cannot_become_shorter_than_it_is(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has 15 updates, more than the 10"):
        check_continued(tmp_path, state(15, updates=20), config_from({"train.epochs": 1}))
