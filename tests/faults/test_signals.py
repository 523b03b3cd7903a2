"""Ctrl-C, SIGTERM and SIGHUP: the update is finished, the state saved; the run goes on later."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import STRATEGIES, PacedTraining, Training

StartCli = Callable[..., "subprocess.Popen[str]"]
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("strategy", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_saved_and_continued_to_the_same_weights(
    strategy: str,
    tmp_path: Path,
    start_cli: StartCli,
    call_cli: RunCli,
    whole: Callable[[str], Training],
) -> None:
    subject = PacedTraining(tmp_path / "run", pace=0.05, **STRATEGIES[strategy])
    arguments = subject.begin
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        before = subject.position() if subject.has_checkpoint() else 0
        process = start_cli(*arguments)
        subject.wait_for_checkpoint(process, after=before)
        process.send_signal(number)
        output, error = process.communicate(timeout=600)
        assert process.returncode == code, output + error
        assert f"continue with: paceline train --resume --run {subject.run}" in output
        assert error == ""
        summary = json.loads((subject.run / "run.json").read_text())
        assert summary["finished"] is False
        # Saved where it stopped, wherever the last regular checkpoint was.
        assert summary["updates"] == subject.position() > before
        arguments = subject.resume
    subject.set_pace(None)
    done = call_cli(*subject.resume)
    assert done.returncode == 0, done.stderr
    assert [line["epoch"] for line in subject.lines()] == [1, 2, 3, 4]
    assert subject.weights() == whole(strategy).weights()


@pytest.mark.parametrize("strategy", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_terminal_that_closes(strategy: str, tmp_path: Path) -> None:
    """What a training would still print has nowhere to go then; it saves all the same."""
    subject = PacedTraining(tmp_path / "run", pace=0.05, **STRATEGIES[strategy])
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *subject.begin],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.set_blocking(ours, False)

    def has_checkpoint() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 65536)
        return subject.has_checkpoint()

    subject.wait_for(has_checkpoint)
    os.close(ours)
    status = process.wait(300)
    assert status == 129
    summary = json.loads((subject.run / "run.json").read_text())
    assert summary["finished"] is False
    assert summary["updates"] == subject.position()


@pytest.mark.parametrize("strategy", [pytest.param("threads", marks=pytest.mark.slow), "processes"])
def test_a_second_ctrl_c_ends_at_once(strategy: str, tmp_path: Path, start_cli: StartCli) -> None:
    subject = PacedTraining(tmp_path / "run", pace=0.05, **STRATEGIES[strategy])
    process = start_cli(*subject.begin)
    subject.wait_for_checkpoint(process)  # before that there is nothing that could be saved
    subject.set_pace(300.0)
    subject.wait_for(lambda: subject.sleeps(300.0), process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)  # the first one waits for the update
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=600)
    assert process.returncode == 130, output + error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("strategy", "number", "codes"),
    [
        ("threads", signal.SIGTERM, (143, -signal.SIGTERM)),
        ("processes", signal.SIGINT, (130, -signal.SIGINT)),
        ("processes", signal.SIGTERM, (143, -signal.SIGTERM)),
    ],
)
def test_before_training_begins(
    strategy: str,
    number: signal.Signals,
    codes: tuple[int, ...],
    training: Callable[..., Training],
    start_cli: StartCli,
) -> None:
    subject = training("run", train__epochs=500, **STRATEGIES[strategy])
    process = start_cli(*subject.begin)
    subject.wait_for((subject.run / "plan.json").exists, process)
    process.send_signal(number)
    output, error = process.communicate(timeout=600)
    assert process.returncode in codes, output + error
    assert "internal error" not in error
    assert "Traceback" not in error
    assert "WorkerError" not in error


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_in_a_race(number: signal.Signals, code: int, tmp_path: Path, start_cli: StartCli) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = start_cli("race", "--again", env={"TMPDIR": str(folder)})
    assert process.stdout is not None
    assert any("images/s" in line for line in process.stdout)  # ranks are at work
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert not list(folder.glob("paceline*"))
