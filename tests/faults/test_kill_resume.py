"""`kill -9` at random moments, resumed until done: nothing is lost and nothing comes twice.

That no rank outlives its killed launcher is what the leak check of every test sees to.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainings import STRATEGIES, PacedTraining, Training

from paceline.training.checkpoint import Checkpoints

StartCli = Callable[..., "subprocess.Popen[str]"]

KILLS = {"threads": 3, "processes": 2}
EXACT = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "test_top5")


def kill_until_done(start_cli: StartCli, subject: Training, kills: int, seed: int) -> list[str]:
    """Kill the training `kills` times, each at a random moment; then let it end."""
    moments = random.Random(seed)
    errors = []
    for _ in range(kills):
        before = subject.position() if subject.has_checkpoint() else 0
        process = start_cli(*subject.arguments)
        if moments.random() < 0.75:  # most kills come while it trains, some before
            subject.wait_for_checkpoint(process, after=before)
            time.sleep(moments.uniform(0.0, 0.12))
        else:
            time.sleep(moments.uniform(0.0, 2.0))
        process.kill()
        errors.append(process.communicate(timeout=600)[1])
    last = start_cli(*subject.arguments)
    output, error = last.communicate(timeout=600)
    assert last.returncode == 0, output + error
    return errors


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", [pytest.param("threads", marks=pytest.mark.slow), "processes"])
def test_weights_and_metrics_are_those_of_an_uninterrupted_run(
    strategy: str, tmp_path: Path, start_cli: StartCli, whole: Callable[[str], Training]
) -> None:
    expected = whole(strategy)
    broken = PacedTraining(tmp_path / "broken", pace=0.01, **STRATEGIES[strategy])
    for error in kill_until_done(start_cli, broken, KILLS[strategy], seed=len(strategy)):
        assert "Traceback" not in error
    assert [line["epoch"] for line in broken.lines()] == [1, 2, 3, 4]
    assert broken.weights() == expected.weights()
    for mine, theirs in zip(broken.lines(), expected.lines(), strict=True):
        for key in EXACT:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9), key
    moments = [
        load_file(subject.run / "checkpoints" / "latest" / "optimizer.safetensors")
        for subject in (expected, broken)
    ]
    assert moments[0].keys() == moments[1].keys()
    assert all(moments[0][key].equal(moments[1][key]) for key in moments[0])
    # Nothing half-written stays.
    names = {path.name for path in (broken.run / "checkpoints").iterdir()}
    assert not {name for name in names if name.startswith(".")}
    assert len(names) <= 5


def test_a_killed_rank_ends_the_run_with_its_number(
    training: Callable[..., Training], start_cli: StartCli
) -> None:
    subject = training("run", local__strategy="processes", local__processes=2, train__epochs=500)
    process = start_cli(*subject.begin)
    subject.wait_for_checkpoint(process)
    victim = ranks_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    output, error = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "continue with: paceline train --resume --run" in output
    assert error.startswith("paceline: rank 1 was killed by SIGKILL (often: out of memory) in ")
    assert len(error.splitlines()) == 1
    # What was saved before is whole.
    checkpoints = Checkpoints(subject.run / "checkpoints", keep=2)
    newest = checkpoints.newest()
    assert newest is not None
    assert checkpoints.load(newest)[0].position.update == subject.position()


def ranks_of(pid: int) -> list[int]:
    """The processes that a launcher has started, first rank first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
