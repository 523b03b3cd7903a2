"""A disk that becomes full costs the new checkpoint, never an old one, and ends the training."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainings import STRATEGIES, PacedTraining, Training

from paceline.training.checkpoint import Checkpoints

StartCli = Callable[..., "subprocess.Popen[str]"]
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]

ROOM = 3_500_000
"""Bytes of the small disk: three or four checkpoints of a small model with Adam, no more."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room; skipped where only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root; the limit on file sizes is tested without")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def check_old_checkpoint(subject: Training) -> int:
    """The newest checkpoint that is there can be loaded; its update."""
    checkpoints = Checkpoints(subject.run / "checkpoints", keep=1)
    newest = checkpoints.newest()
    assert newest is not None
    state, model, optimizer = checkpoints.load(newest)
    assert model
    assert optimizer
    return state.position.update


def test_full_disk_then_room_again(
    small_disk: Path,
    tmp_path: Path,
    start_cli: StartCli,
    call_cli: RunCli,
    whole: Callable[[str], Training],
) -> None:
    subject = PacedTraining(small_disk / "run", pace=0.05, folder=tmp_path)
    process = start_cli(*subject.begin, cwd=tmp_path)
    subject.wait_for_checkpoint(process)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    output, error = process.communicate(timeout=600)
    assert process.returncode == 1, output + error
    assert error.startswith("paceline: the checkpoint of update ")
    assert "No space left on device" in error
    assert "free some room" in error
    assert len(error.splitlines()) == 1
    # At the first one that was lost, not hours later.
    kept = check_old_checkpoint(subject)
    assert 0 < kept < 40
    lost = int(error.split("of update ")[1].split()[0])
    assert lost in (kept + 1, kept + 2, kept + 3)
    filler.unlink()
    subject.set_pace(None)
    done = call_cli(*subject.resume)
    assert done.returncode == 0, done.stderr
    assert [line["epoch"] for line in subject.lines()] == [1, 2, 3, 4]
    assert subject.weights() == whole("threads").weights()


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The same without root: the system refuses to write more than a few kilobytes to a file."""
    subject = Training(tmp_path / "run", train__epochs=1, train__checkpoint_every=2)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *subject.begin],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("paceline: the checkpoint of update 2 could not be written to ")
    assert "there is none before it" in done.stderr
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list((subject.run / "checkpoints").iterdir())


def test_ranks_on_a_full_disk(small_disk: Path, tmp_path: Path, start_cli: StartCli) -> None:
    """Not even word of the failure can be left then."""
    subject = PacedTraining(
        small_disk / "run", pace=0.05, folder=tmp_path, **STRATEGIES["processes"]
    )
    process = start_cli(*subject.begin, cwd=tmp_path)
    subject.wait_for_checkpoint(process)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 1, output + error
    assert "the checkpoint of update" in error
    assert "No space left on device" in error
    assert "Traceback" not in error
    check_old_checkpoint(subject)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_nodes_on_a_full_disk(
    small_disk: Path, tmp_path: Path, start_cli: StartCli, call_cli: RunCli
) -> None:
    """What the disk does not take is no loss of a host: it would be started again, three times."""
    hosts = ["--hosts", "localhost:2", "--engine", "ssh"]
    subject = PacedTraining(small_disk / "run", pace=0.05, folder=tmp_path)
    process = start_cli(*subject.begin, *hosts, cwd=tmp_path)
    subject.wait_for_checkpoint(process)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    output, error = process.communicate(timeout=600)
    told = output + error
    assert process.returncode == 1, told
    said = [line for line in told.splitlines() if "could not be written" in line]
    assert len(said) == 1, told
    assert said[0].startswith("paceline: rank 0 on host localhost: the checkpoint of update ")
    assert "No space left on device" in said[0]
    assert "Traceback" not in told
    assert "starting again" not in told
    check_old_checkpoint(subject)
    filler.unlink()
    subject.set_pace(None)
    done = call_cli(*subject.resume, *hosts)
    assert done.returncode == 0, done.stderr
    assert [line["epoch"] for line in subject.lines()] == [1, 2, 3, 4]


def test_a_disk_that_may_only_be_read(small_disk: Path, call_cli: RunCli) -> None:
    subject = PacedTraining(small_disk / "run", train__epochs=1)
    assert call_cli(*subject.begin).returncode == 0
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    for arguments in (
        [*subject.resume, "--set", "train.epochs=2"],
        Training(small_disk / "new").begin,
    ):
        done = call_cli(*arguments)
        assert done.returncode in (1, 2)
        assert "Read-only file system" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "internal error" not in done.stderr
