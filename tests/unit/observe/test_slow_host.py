"""A host that is slowed on purpose is the one that the ledger says was waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.observe.ledger import ledger_of

__all__ = ["make_lab"]
SETTINGS = (
    "workload.model=mnist_cnn",
    "workload.data=synthetic",
    "workload.batch_size=32",
    "data.options={ shape = [1, 28, 28], samples = 640, test_samples = 32 }",
    "train.epochs=3",
    "local.strategy=sequential",
    "exchange.kind=allreduce",
    "exchange.partition=none",
    "exchange.rebalance=false",
)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_a_host_at_a_fifth_of_a_core_is_named(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab({"name": "a", "cores": 0.8}, {"name": "b", "cores": 0.2}, rate="1gbit")
    run = tmp_path / "run"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    done = lab.run(
        [sys.executable, "-m", "paceline.cli", "train", "--hosts", "lab", "--engine", "ssh",
         "--run", str(run), *words],
        capture_output=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    found = ledger_of(run)
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.host) == (1, "b")
    assert found.made_wait(1) > 3 * found.made_wait(0)
    print(found.sentences())
    assert found.sentences()[0].startswith("Rank 1 on host b made the other wait ")
