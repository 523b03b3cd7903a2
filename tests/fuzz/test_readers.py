"""Every reader of a file or a socket, given damaged input: a few of each here, many by `make fuzz`.

hypothesis hands out the damage, always the same: a failure repeats, and is made as small as it
can be.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from readers import Target, call, targets

from paceline.errors import RunDirectoryError

SLOW = ("run: report", "run: page", "run: several", "machines.json", "run: trace", "run: compare")
"""Whole commands: some a second each."""


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_damage_is_named_or_borne(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target.prepare(tmp_path)

    @settings(
        max_examples=2 if target.name.startswith(SLOW) else 30,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def damaged(seed: int) -> None:
        target.run(random.Random(seed), tmp_path)

    damaged()


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
