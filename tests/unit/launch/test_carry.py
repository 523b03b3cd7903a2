"""What an agent brings and a launcher writes: whole, in pieces, and nothing that was not meant."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import carry
from paceline.launch.carry import PIECE, WINDOW, Bringing, Carrier, kept_folders, newest_update
from paceline.launch.collect import Receiving

EMPTY = hashlib.sha256().hexdigest()


class Wire:
    """Both ends in one process; pieces wait until they are delivered, and may be damaged."""

    is_waiting = False

    def __init__(self, run: Path, *, keep: int = 2) -> None:
        self.said: list[str] = []
        self.receiving = Receiving(run, keep=keep, say=self.said.append)
        self.waiting: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.most = 0
        self.damaged = ""
        """What is changed on the way: pieces of files with this name."""

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})
        if kind == "file":
            self.waiting.append(fields)
            self.most = max(self.most, len(self.waiting))

    def deliver(self, bringing: Bringing | Carrier, *, at_most: int = 10**6) -> None:
        """Let both ends work until nothing is left to do."""
        bringing.turn()
        while self.waiting and at_most > 0:
            at_most -= 1
            piece = self.waiting.pop(0)
            if self.damaged and piece.get("name") == self.damaged and piece["data"]:
                piece = piece | {"data": "AAAA" + piece["data"][4:]}
            bringing.hear({"taken": self.receiving.take(piece)})
            bringing.turn()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A host's folder with two checkpoints."""
    folder = tmp_path / "host"
    for update, size in ((4, 10), (8, 3 * PIECE + 5)):
        write_checkpoint(folder, update, size)
    (folder / "checkpoints" / "best").symlink_to("step-00000004")
    (folder / "checkpoints" / "latest").symlink_to("step-00000008")
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n')
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "events.jsonl").write_text("new\n" * PIECE)
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1").write_bytes(bytes(range(256)))
    return folder


def write_checkpoint(folder: Path, update: int, size: int) -> None:
    step = folder / "checkpoints" / f"step-{update:08d}"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(bytes(update % 256 for _ in range(size)))
    (step / "optimizer.safetensors").write_bytes(b"")
    (step / "state.json").write_text(f'{{"update": {update}}}')


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def made(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


def test_everything_comes_in_small_pieces_while_it_is_written(here: Path, tmp_path: Path) -> None:
    run = made(tmp_path)
    (run / "rank-0").mkdir()
    (run / "rank-0" / "events.jsonl").write_text("before\n")
    (run / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2, "of": "after the checkpoint"}\n')
    wire = Wire(run)
    bringing = Bringing(wire, here, ranks=[0])  # type: ignore[arg-type]
    wire.deliver(bringing)
    there = content(run)
    events = there.pop("rank-0/events.jsonl")
    assert events == b"before\n" + (here / "rank-0" / "events.jsonl").read_bytes()
    # Only the newest checkpoint at once: after it comes a rest, so that training has the network.
    assert there["checkpoints/latest"] == "step-00000008"
    assert there["metrics.jsonl"] == b'{"epoch": 1}\n'
    assert not bringing.is_done

    with (here / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2}\n{"epo')  # half a line waits for its rest
    bringing._looked = 0.0
    wire.deliver(bringing)
    assert (run / "metrics.jsonl").read_bytes() == b'{"epoch": 1}\n{"epoch": 2}\n'

    with (here / "metrics.jsonl").open("a") as file:
        file.write('ch": 3}\n')
    (here / "run.json").write_text("{}")
    bringing.finish()
    wire.deliver(bringing)
    assert bringing.is_complete
    theirs = content(here)
    theirs["rank-0/events.jsonl"] = b"before\n" + (here / "rank-0" / "events.jsonl").read_bytes()
    assert content(run) == theirs
    assert wire.most <= WINDOW
    assert max(len(piece.get("data", "")) for piece in wire.sent) <= PIECE * 4 // 3 + 4
    assert wire.said == []


def test_a_checkpoint_that_is_removed_on_the_way_comes_whole(here: Path, tmp_path: Path) -> None:
    wire = Wire(run := made(tmp_path))
    bringing = Bringing(wire, here)  # type: ignore[arg-type]
    while not (run / "checkpoints" / ".partial-step-00000008").exists():
        wire.deliver(bringing, at_most=1)
    expected = (here / "checkpoints" / "step-00000008" / "model.safetensors").read_bytes()
    shutil.rmtree(here / "checkpoints" / "step-00000008")
    wire.deliver(bringing)
    came = run / "checkpoints" / "step-00000008"
    assert (came / "model.safetensors").read_bytes() == expected
    assert sorted(path.name for path in came.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_what_is_damaged_is_not_there(here: Path, tmp_path: Path) -> None:
    wire = Wire(run := made(tmp_path))
    wire.damaged = "model.safetensors"
    bringing = Bringing(wire, here)  # type: ignore[arg-type]
    bringing.finish()
    wire.deliver(bringing)
    assert bringing.is_done
    assert not bringing.is_complete
    assert not list((run / "checkpoints").glob("step-*"))
    assert not (run / "checkpoints" / "latest").exists()
    assert wire.said == [
        "warning: what a host brings cannot be kept here: checkpoints/step-00000008 came damaged"
    ]
    # The next one who tries is not hindered by what is left of it.
    again = Wire(run)
    bringing = Bringing(again, here)  # type: ignore[arg-type]
    bringing.finish()
    again.deliver(bringing)
    assert bringing.is_complete
    assert content(run / "checkpoints") == content(here / "checkpoints")


def test_older_checkpoints_go_as_a_training_would_let_them_go(here: Path, tmp_path: Path) -> None:
    run = made(tmp_path)
    for update in (1, 2, 3):
        write_checkpoint(run, update, 1)
    (run / "checkpoints" / "best").symlink_to("step-00000001")
    (here / "checkpoints" / "best").unlink()
    wire = Wire(run, keep=2)
    bringing = Bringing(wire, here)  # type: ignore[arg-type]
    bringing.finish()
    wire.deliver(bringing)
    steps = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert steps == ["step-00000001", "step-00000003", "step-00000008"]
    assert (run / "checkpoints" / "best").readlink().name == "step-00000001"


@pytest.mark.parametrize(
    "piece",
    [
        {"log": "../metrics.jsonl", "at": 0, "data": "", "sum": ""},
        {"log": "tensorboard/events.x/../../../y", "at": 0, "data": "", "sum": ""},
        {"unit": "config.toml", "name": "", "at": 0, "data": ""},
        {"unit": "checkpoints/step-00000001", "name": "../../x", "at": 0, "data": ""},
        {"unit": "checkpoints/../../x", "sums": {}},
        {"links": {"latest": "../.."}},
        {"unit": "metrics.jsonl", "name": "", "at": "no number", "data": ""},
        {},
    ],
)
def test_only_what_belongs_into_a_run_is_written(piece: dict[str, Any], tmp_path: Path) -> None:
    run = made(tmp_path)
    assert not Receiving(run, keep=1, say=lambda text: None).take(piece)
    assert [path for path in tmp_path.rglob("*") if path != run] == []


def test_folders_stay_until_the_launcher_has_them(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, wire = tmp_path / "cache", Wire(tmp_path / "run")
    first = Carrier(wire, 0)  # type: ignore[arg-type]
    folder = first.settle(cache, "0123456789abcdef", "first session")
    shutil.copytree(here / "checkpoints", folder / "checkpoints", symlinks=True)
    first.begin([0])
    assert kept_folders(cache, "0123456789abcdef") == [], "it is in use"
    first.close()  # the launcher went before anything came
    assert f"stays in {folder}" in capsys.readouterr().err
    (folder / ".lock").unlink()  # as when its process has ended

    wire = Wire(run := made(tmp_path))
    second = Carrier(wire, 1)  # type: ignore[arg-type]
    own = second.settle(cache, "0123456789abcdef", "second session")
    assert second.newest_kept == {"folder": str(folder), "update": 8}
    second.bring(str(folder))
    wire.deliver(second)
    assert wire.sent[-1] == {"kind": "brought", "complete": True}
    assert newest_update(run) == 8
    second.forget(7)
    assert folder.exists()
    second.forget(8)
    assert not folder.exists()
    second.close()
    assert not own.exists()
    assert carry.kept_folders(cache, "another run") == []


def test_a_node_that_does_not_lead_brings_its_events_alone(here: Path, tmp_path: Path) -> None:
    """Its copies of what all share are older than the first node's, and would mix with them."""
    (here / "run.json").write_text("{}")
    wire = Wire(run := made(tmp_path))
    bringing = Bringing(wire, here, ranks=[0], leads=False)  # type: ignore[arg-type]
    bringing.finish()
    wire.deliver(bringing)
    assert bringing.is_complete
    assert list(content(run)) == ["rank-0/events.jsonl"]


def test_a_checkpoint_that_the_launcher_has_is_not_brought_again(
    here: Path, tmp_path: Path
) -> None:
    wire = Wire(run := made(tmp_path))
    write_checkpoint(run, 4, 10)
    bringing = Bringing(wire, here, has=["step-00000004"])  # type: ignore[arg-type]
    bringing.finish()
    wire.deliver(bringing)
    assert bringing.is_complete
    units = {piece["unit"] for piece in wire.sent if piece.get("unit", "").startswith("check")}
    assert units == {"checkpoints/step-00000008"}
    assert content(run / "checkpoints") == content(here / "checkpoints")


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([{"unit": "run.json"}], "its name is missing"),
        ([{"sums": {}}], "its unit is missing"),
        ([{"unit": "run.json", "sums": {"": "x"}}], "the file of run.json did not come"),
        ([{"unit": "run.json", "name": "", "at": 5, "data": ""}], "pieces of run.json are missing"),
        ([{"unit": "run.json", "name": "", "at": 0, "data": "?"}], "run.json came damaged"),
        ([{"links": {"latest": 5}}], "its links.latest is 5, not a text of one line"),
        ([{"log": "metrics.jsonl", "at": -1, "data": "", "sum": EMPTY}], "belongs behind -1"),
    ],
)
def test_what_cannot_be_kept_is_said_in_a_sentence(
    pieces: list[dict[str, Any]], why: str, tmp_path: Path
) -> None:
    said: list[str] = []
    receiving = Receiving(made(tmp_path), keep=1, say=said.append)
    for piece in pieces:
        assert not receiving.take(piece)
    assert len(said) == 1
    assert said[0].startswith("warning: what a host brings cannot be kept here: ")
    assert why in said[0]
