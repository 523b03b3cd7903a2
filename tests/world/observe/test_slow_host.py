"""A host that is slowed on purpose is the one that the ledger says was waited for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from two_nodes import NODE, environment, write_node

from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.observe.ledger import ledger_of

__all__ = ["make_lab"]


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(900)
def test_a_host_that_takes_longer_is_named(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Both have the same share of each batch: shares by speed would leave nothing to wait for."""
    lab = make_lab("a", "b", rate="1gbit")
    settings = {
        "workload__model_options": "{ node = 1, each = 0.5 }",
        "data__options__samples": 160,
        "exchange__rebalance": "false",
    }
    run = write_node(tmp_path / "run", 300, **settings)
    log = tmp_path / "log"
    with log.open("wb") as output:
        processes = [
            lab.start(
                [sys.executable, "-c", NODE, str(run)],
                on=name,
                env=environment(node, lab.addresses["a"], 29_600),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            for node, name in enumerate("ab")
        ]
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.close()
    assert codes == [0, 0], log.read_text()
    found = ledger_of(run)
    print(found.sentences())
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.host) == (1, "b")
    assert found.made_wait(1) > found.made_wait(0)
    assert found.sentences()[0].startswith("Rank 1 on host b made the other wait ")
