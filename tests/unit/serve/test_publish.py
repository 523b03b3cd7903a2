"""Every new best of a run becomes a version once; what fails costs nothing but a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.schema.checkpoint import checkpoints_in
from paceline.serve.publish import Publisher
from paceline.serve.versions import read_version, version_numbers


def test_each_best_is_published_once(trained_run: Path, tmp_path: Path) -> None:
    run, to = tmp_path / "run", tmp_path / "models" / "digits"
    shutil.copytree(trained_run, run, symlinks=True)
    best = run / "checkpoints" / "best"
    target = best.readlink()
    best.unlink()
    said: list[str] = []
    publisher = Publisher(run, to, "safetensors", said.append)
    publisher.look()  # nothing was evaluated yet
    assert (version_numbers(to), said) == ([], [])
    best.symlink_to(target)
    publisher.look()
    publisher.look()
    assert version_numbers(to) == [1]
    assert said[0].startswith(f"published {to / '1'} (test accuracy ")
    assert read_version(to / "1").origin.update == int(target.name.removeprefix("step-"))
    other = next(path for path in checkpoints_in(run / "checkpoints") if path.name != target.name)
    best.unlink()
    best.symlink_to(other.name)
    publisher.look()
    assert version_numbers(to) == [1, 2]
    # A checkpoint that cannot be read is named, and tried no more.
    best.unlink()
    best.symlink_to(target)
    (run / "checkpoints" / target / "model.safetensors").write_bytes(b"")
    publisher.look()
    publisher.look()
    assert version_numbers(to) == [1, 2]
    assert [line.split(":")[0] for line in said[2:]] == ["warning"]


@pytest.mark.slow
def test_a_training_publishes_while_it_goes_on(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    to = tmp_path / "models" / "digits"
    done = run_cli(
        "train", "--run", str(tmp_path / "run"), "--publish", str(to),
        "--set=local.strategy=sequential", "--set=data.limit=256", "--set=train.epochs=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "published" in done.stdout
    newest = read_version(to / str(version_numbers(to)[-1]))
    best = (tmp_path / "run" / "checkpoints" / "best").readlink().name
    assert newest.origin.update == int(best.removeprefix("step-"))
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert newest.origin.metrics["test_accuracy"] == summary["best_accuracy"]
