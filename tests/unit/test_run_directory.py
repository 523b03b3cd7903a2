"""Run directories: names, the link to the latest, the lock, and taking a mistake back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunDirectoryError
from paceline.run import RunDirectory, create_run, open_run


def test_names_and_the_latest(tmp_path: Path) -> None:
    first = create_run("a name: with/odd chars", root=tmp_path / "runs")
    second = create_run("b", root=tmp_path / "runs")
    assert first.path.name.endswith("-a-name-with-odd-chars")
    assert (tmp_path / "runs" / "latest").resolve() == second.path.resolve()
    assert open_run(tmp_path / "runs" / "latest").path == second.path.resolve()


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    paths = {create_run("same", root=tmp_path).path for _ in range(5)}
    assert len(paths) == 5


def test_own_place_makes_no_latest(tmp_path: Path) -> None:
    run = create_run("x", tmp_path / "deep" / "own", root=tmp_path / "runs")
    assert run.path.is_dir()
    assert not (tmp_path / "runs").exists()


def test_a_place_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"is not empty: continue it with --resume"):
        create_run("x", tmp_path)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        create_run("x", tmp_path / "notes.txt")
    with pytest.raises(RunDirectoryError, match="cannot be made: Not a directory"):
        create_run("x", tmp_path / "notes.txt" / "inside")


def test_the_lock_of_a_run_that_was_killed_as_it_began_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert create_run("x", tmp_path).path == tmp_path


def test_a_missing_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no run directory .*nothing"):
        open_run(tmp_path / "nothing")


def test_the_lock_keeps_a_second_training_out(tmp_path: Path) -> None:
    one = create_run("x", tmp_path / "run")
    one.lock()
    with pytest.raises(RunDirectoryError, match="is in use by another training"):
        RunDirectory(one.path).lock()
    one.unlock()
    one.unlock()
    two = RunDirectory(one.path)
    two.lock()
    two.unlock()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from paceline.run import RunDirectory\n"
        "RunDirectory(pathlib.Path(sys.argv[1])).lock(); print('locked', flush=True)\n"
        "import time; time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunDirectoryError, match="in use"):
            RunDirectory(tmp_path).lock()
        holder.kill()
        holder.wait()
    run = RunDirectory(tmp_path)
    run.lock()
    run.unlock()


def test_a_mistake_is_taken_back(tmp_path: Path) -> None:
    before = create_run("before", root=tmp_path)
    run = create_run("mistake", root=tmp_path)
    (run.path / "config.toml").write_text("")
    run.discard()
    assert not run.path.exists()
    assert (tmp_path / "latest").resolve() == before.path.resolve()
    before.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_has_trained_or_was_opened_is_kept(tmp_path: Path) -> None:
    run = create_run("x", tmp_path / "run")
    opened = open_run(run.path)
    opened.discard()
    assert run.path.exists()
    run.checkpoints.mkdir()
    run.discard()
    assert run.path.exists()


def test_a_refused_continuation_leaves_an_opened_run_as_it_was(tmp_path: Path) -> None:
    create_run("kept", tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.config.write_text("before\n")
    run.remember()
    run.config.write_text("after\n")
    run.plan.write_text("{}\n")
    run.discard()
    assert run.config.read_text() == "before\n"
    assert not run.plan.exists()

    run.config.write_text("after\n")
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").symlink_to("step-00000001")
    run.discard()
    assert run.config.read_text() == "after\n", "it has trained since"


def begun(path: Path) -> Path:
    """A run as a kill before its first checkpoint leaves it."""
    (path / "rank-0").mkdir(parents=True)
    (path / "rank-0" / "events.jsonl").write_text("{}\n")
    (path / "checkpoints").mkdir()
    (path / "config.toml").write_text("seed = 5\n")
    for name in ("plan.json", "race-a.json", "metrics.jsonl", ".lock"):
        (path / name).touch()
    return path


def test_a_run_that_was_only_begun_can_begin_again(tmp_path: Path) -> None:
    path = begun(tmp_path / "run")
    run = create_run("x", path)
    assert run.is_new
    assert [entry.name for entry in path.iterdir()] == [".lock"]
    with pytest.raises(RunDirectoryError, match="is in use by another training"):
        RunDirectory(path).lock()
    run.lock()  # it has the lock already
    (path / "rank-0").mkdir()
    run.discard()  # the try was refused
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "config.toml", "plan.json"]
    assert run.config.read_text() == "seed = 5\n"
    run.unlock()
    create_run("x", path).unlock()


@pytest.mark.parametrize(
    "more", ["notes.txt", "checkpoints/step-00000004", "checkpoints/damaged-step-4", ".away.json"]
)
def test_a_run_with_something_to_lose_does_not_begin_again(tmp_path: Path, more: str) -> None:
    path = begun(tmp_path / "run")
    (path / more).touch()
    with pytest.raises(RunDirectoryError, match="is not empty: continue it with --resume"):
        create_run("x", path)
    assert (path / "rank-0" / "events.jsonl").exists()


def test_an_evaluation_is_something_to_lose(tmp_path: Path) -> None:
    path = begun(tmp_path / "run")
    (path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(RunDirectoryError, match="is not empty"):
        create_run("x", path)


def test_a_run_that_has_just_begun_elsewhere_is_left_alone(tmp_path: Path) -> None:
    other = RunDirectory(begun(tmp_path / "run"))
    other.lock()
    with pytest.raises(RunDirectoryError, match="is in use by another training"):
        create_run("x", other.path)
    assert other.config.exists()
    other.unlock()
