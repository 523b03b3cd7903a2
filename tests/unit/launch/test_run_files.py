"""Files of a run that travel between hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.channel import CHUNK
from paceline.launch.files import pieces_of, take_piece


def test_files_arrive_whole_and_links_stay_links(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    step = here / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    there.mkdir()
    for name, size in (("model", 2 * CHUNK), ("state", CHUNK + 1), ("empty", 0)):
        (step / name).write_bytes(bytes(i % 251 for i in range(size)))
    for link in ("latest", "best"):
        (here / "checkpoints" / link).symlink_to(step.name)
    sent = list(pieces_of(here, ["absent", "checkpoints/latest", "checkpoints/best"]))
    for piece in sent:
        take_piece(there, piece)
    for link in ("latest", "best"):
        assert (there / "checkpoints" / link).readlink() == Path(step.name)
        for path in step.iterdir():
            assert (there / "checkpoints" / link / path.name).read_bytes() == path.read_bytes()
    assert len({(p["path"], p.get("at")) for p in sent}) == len(sent)
    for piece in sent:  # once more, over what is there
        take_piece(there, piece)


@pytest.mark.parametrize(
    "piece",
    [
        {"path": "../x", "at": 0, "data": ""},
        {"path": "/etc/x", "at": 0, "data": ""},
        {"path": "latest", "link": "../../x"},
        {"path": "way/x", "at": 0, "data": ""},
    ],
)
def test_nothing_is_written_elsewhere(tmp_path: Path, piece: dict[str, object]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "way").symlink_to("..")
    with pytest.raises(ValueError, match="does not lie inside the run"):
        take_piece(run, piece)
