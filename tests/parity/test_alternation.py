"""Strategies that are built at once in the same ranks and make their updates in turns."""

from __future__ import annotations

from pathlib import Path

import alternating
import pytest

from paceline.config import dump_config, load_config

TOLERANCE = 1e-5
"""Of weights of about 0.1 after three updates; what ranks sum in another order differs by 1e-7."""


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 4)]
)
def test_each_trains_as_if_it_were_alone(tmp_path: Path, ranks: int) -> None:
    model = Path(__file__).parent / "own_models.py"
    config = dump_config(load_config(None, [f"workload.model={model}:onto_one_pixel"]))
    found = alternating.run(tmp_path, ranks, config)
    names = found["entries"]
    assert len(names) == (3 if ranks == 1 else 5)
    assert [len(times) for times in found["seconds"]] == [len(names)] * alternating.ROUNDS
    assert all(seconds > 0 for times in found["seconds"] for seconds in times)
    assert set(found["differences"]) == set(names)
    assert max(found["differences"].values()) < TOLERANCE
    assert min(found["moved"].values()) > 100 * TOLERANCE, "it trained at all"
    assert set(found["updates"].values()) == {alternating.ROUNDS}
    assert len(found["trial"]) == 2
    assert not found["sign"]
