"""What a host gets of a run that it is to continue, where it cannot see it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.launch.carry import PIECE, to_go_on_from
from paceline.launch.channel import Message
from paceline.launch.collect import Receiving


def test_files_arrive_whole_and_the_newest_checkpoint_is_the_latest(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    step = here / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    there.mkdir()
    for name, size in (("model", 2 * PIECE), ("state", PIECE + 1), ("empty", 0)):
        (step / name).write_bytes(bytes(i % 251 for i in range(size)))
    (here / "checkpoints" / "latest").symlink_to(step.name)
    (here / "metrics.jsonl").write_text('{"epoch": 1}\n')
    sent = list(to_go_on_from(here))
    receiving = Receiving(there)
    for piece in sent:
        receiving.write(piece)
    assert (there / "checkpoints" / "latest").readlink() == Path(step.name)
    assert (there / "metrics.jsonl").read_bytes() == (here / "metrics.jsonl").read_bytes()
    for path in step.iterdir():
        assert (there / "checkpoints" / "latest" / path.name).read_bytes() == path.read_bytes()
    for piece in sent:  # once more, over what is there
        receiving.write(piece)


def test_a_run_without_a_checkpoint_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert not list(to_go_on_from(tmp_path))


@pytest.mark.parametrize(
    "piece",
    [
        {"unit": "../x", "name": "", "at": 0, "data": ""},
        {"unit": "/etc/x", "name": "", "at": 0, "data": ""},
        {"unit": "checkpoints/step-00000002", "name": "../x", "at": 0, "data": ""},
        {"links": {"latest": "../../x"}},
    ],
)
def test_nothing_is_written_elsewhere(tmp_path: Path, piece: dict[str, object]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="is nothing that belongs into a run"):
        Receiving(run).write(piece)


def test_what_the_disk_does_not_take_is_said_with_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    receiving = Receiving(tmp_path, say=said.append)

    def full(message: Message) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as from a file that is open

    monkeypatch.setattr(receiving, "write", full)
    assert not receiving.take({"kind": "file"})
    assert said == [
        f"warning: what a host brings cannot be kept here: No space left on device: {tmp_path}"
    ]
