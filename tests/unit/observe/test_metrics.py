"""metrics.jsonl: every epoch once, whatever was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.observe.metrics import TIMES, MetricsFile, Tally, read_metrics


def line(epoch: int) -> dict[str, object]:
    times = dict.fromkeys(TIMES, 0.5)
    return {"epoch": epoch, "train_loss": 1.0 / epoch, "test_accuracy": None, **times}


def write(path: Path, epochs: int) -> MetricsFile:
    metrics = MetricsFile(path)
    for epoch in range(1, epochs + 1):
        metrics.append(line(epoch))
    return metrics


def test_lines_are_json_in_order(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 3)
    lines = [json.loads(text) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [line(1), line(2), line(3)]


def test_resume_drops_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 4)
    with path.open("a") as file:
        file.write('{"epoch": 5, "train')  # killed in the middle of a line
    resumed = MetricsFile(path)
    resumed.restore(3)
    resumed.append(line(4))
    assert read_metrics(path) == [line(1), line(2), line(3), line(4)] == resumed.lines
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 3)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        whole[0] + b"\xff\0\n[1]\n" + whole[1].replace(b"seconds", b"sekonds") + whole[2]
    )
    metrics = MetricsFile(path)
    metrics.restore(3)
    assert metrics.lines == [line(1), line(3)]
    assert path.read_bytes() == whole[0] + whole[2]


def test_resume_of_nothing(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.restore(0)
    assert metrics.lines == []
    metrics.append(line(1))
    assert read_metrics(tmp_path / "m.jsonl") == [line(1)]


def test_a_kill_during_resume_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 3)

    def killed(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path).restore(2)
    monkeypatch.undo()
    assert read_metrics(path) == [line(1), line(2), line(3)]


def test_a_line_that_could_not_be_written_comes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = write(path, 1)
    path.rename(tmp_path / "away")
    path.mkdir()  # nothing can be written here
    with pytest.raises(OSError, match="Is a directory"):
        metrics.append(line(2))
    path.rmdir()
    (tmp_path / "away").rename(path)
    metrics.append(line(3))
    assert read_metrics(path) == [line(1), line(2), line(3)]


def test_half_a_line_on_a_full_disk_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    metrics = write(path, 1)
    real_open = Path.open

    class Half:
        """A file on a disk that becomes full in the middle of a line."""

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def writelines(self, lines: object) -> None:
            with real_open(path, "a") as file:
                file.write(next(iter(lines))[:9])  # type: ignore[call-overload]
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "open", lambda self, mode: Half())
    with pytest.raises(OSError, match="No space left"):
        metrics.append(line(2))
    monkeypatch.undo()
    metrics.append(line(3))
    assert read_metrics(path) == [line(1), line(2), line(3)]


def test_a_tally_goes_through_a_checkpoint() -> None:
    tally = Tally()
    tally.add(loss_sum=2.5, correct=3, samples=4)
    tally.seconds, tally.read_seconds = 1.5, 0.25
    tally.durations += [0.1, 0.3, 0.2]
    assert (tally.update_mean, tally.update_median) == (pytest.approx(0.2), 0.2)
    again = Tally.restored(json.loads(json.dumps(tally.saved())))
    assert again.saved() == tally.saved()
    again.add(loss_sum=0.5, correct=1, samples=4)
    assert (again.loss_sum, again.correct, again.samples, again.updates) == (3.0, 4, 8, 2)
    assert Tally().update_median == 0.0
