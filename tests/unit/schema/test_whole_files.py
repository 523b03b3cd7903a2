"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run import RunDirectory, write_whole
from paceline.schema import write_json
from paceline.workflow.legs import write_legs


def test_nothing_stays_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("plan.json", "legs.jsonl", "word"):
        (tmp_path / name).mkdir()  # a folder cannot be replaced by a file
    for write in (
        lambda: write_json(run.plan, {"nodes": []}),
        lambda: write_legs(run, []),
        lambda: write_whole(tmp_path / "word", "text"),
    ):
        with pytest.raises(IsADirectoryError):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["legs.jsonl", "plan.json", "word"]
