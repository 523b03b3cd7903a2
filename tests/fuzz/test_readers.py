"""Every reader of a file or a socket, given damaged input: a few of each here, many by `make fuzz`.

hypothesis hands out the damage, always the same: a failure repeats, and is made as small as it
can be.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import lines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pages import asked
from readers import Target, call, targets

from paceline import cli
from paceline.errors import RunDirectoryError
from paceline.serve.core import Core, Limits
from paceline.serve.door import Access, Listener
from paceline.serve.manager import Manager, Options
from paceline.serve.routes import routes
from paceline.watch.follow import Follower
from paceline.watch.server import Watch, application

SLOW = (
    "run: report",
    "run: page",
    "run: several",
    "machines.json",
    "run: trace",
    "run: compare",
    "run: runs",
    "plan cache",
    "ssh: doctor",
    "serve: requests",
)
"""Whole commands: some a second each."""


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_damage_is_named_or_borne(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target.prepare(tmp_path)

    @settings(
        max_examples=1 if target.name.startswith(SLOW) else 15,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def damaged(seed: int) -> None:
        target.run(random.Random(seed), tmp_path)

    damaged()


REFUSED = [
    line for line in lines.lines() if any(len(word) > 400 or "\\u0000" in word for word in line)
]


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: " ".join(line)[-60:])
def test_command_lines_that_are_refused_at_once(
    line: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(list(line))
    error = capsys.readouterr().err
    assert caught.value.code == 2, error
    assert "internal error" not in error
    assert len(error) < 12_000


def test_a_rate_that_lets_weights_overflow_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [word for each in lines.SMALL for word in ("--set", each)]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *small, "--set", "optimizer.learning_rate=1e308"])
    assert caught.value.code == 1
    assert "learning rate" in capsys.readouterr().err


def test_a_wish_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    headers = {"host": "localhost", "content-type": "application/json"}

    async def post() -> tuple[int, bytes]:
        app = application(Watch([follower]), Listener())
        return await asked(app, "POST", "/api/runs/0/settings", headers, b"[" * 4000)

    status, said = asyncio.run(post())
    assert status == 400
    assert b"nested" in said


@pytest.mark.parametrize("path", ["/v1/models/x/versions/", "/v2/models/x/versions/"])
def test_a_version_of_thousands_of_digits_is_not_there(path: str) -> None:
    core = Core(Manager(Options(), print), Limits(), Access(), routes)
    headers = {"host": "localhost"}
    status, _ = asyncio.run(asked(core, "GET", path + "9" * 5000, headers, b""))
    core.close()
    assert status == 404


def test_a_summary_that_is_null_is_named(tmp_path: Path) -> None:
    next(target for target in targets() if target.name == "run: audit").prepare(tmp_path)
    run = tmp_path / "runs" / "one"
    (run / "run.json").write_text("null")
    for command in ("report", "audit"):
        call(command, str(run))  # what is left of the run is shown
    (run / "config.toml").write_text("a" + ".a" * 100_000 + " = 1")
    call("runs", str(tmp_path / "runs"))
    with pytest.raises(RunDirectoryError, match="more than 64 parts"):
        call("train", str(run / "config.toml"))
