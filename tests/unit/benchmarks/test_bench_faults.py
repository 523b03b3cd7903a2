"""Results of `paceline bench faults` that are kept, without a lab."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lab.faults import FAULTS, KINDS, Kept, Outcome, chosen, run_cells, sentence
from paceline.schema import read_json, write_json


def test_a_cell_that_survived_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    well = Outcome(kind="mpi", fault="rank", code=0, equal=True, is_hit=True, seconds=3.0)
    other = Outcome(kind="ring", fault="cut", code=1, is_hit=True, orphans=("prted on c",))
    assert well.survived
    assert not other.survived
    write_json(out, Kept(outcomes=(well, other)))
    said: list[str] = []
    assert run_cells([("mpi", "rank")], said.append, out=out) == [well]
    assert not said
    assert read_json(Kept, out).outcomes == (well, other)


def test_cells_are_named_by_exchange_and_fault() -> None:
    assert chosen(["/disk full"]) == [(kind, "disk full") for kind in KINDS]
    assert chosen(["mpi/disk full", "mpi/rank"]) == [("mpi", "disk full"), ("mpi", "rank")]
    assert len(chosen([])) == len(KINDS) * len(FAULTS)


def test_what_came_of_a_full_disk_is_said() -> None:
    note = "ended with 1 2.3 s after it, update 15 was saved"
    outcome = Outcome(kind="mpi", fault="disk full", is_hit=True, ended_seconds=2.3, note=note)
    assert sentence(outcome) == f"{note}, --resume: it did not end, 0 updates repeated"
