"""Pages of experiments: of nothing, of a part, of failures; and the verdicts of `wang`."""

from __future__ import annotations

import dataclasses
import json
from html import escape
from pathlib import Path
from typing import Any

import pytest

from paceline.schema import write_json
from studies.outcome import NOT_RUN, Outcomes, StepOutcome, load_outcomes
from studies.page import write_experiment
from studies.spec import built_in, find_experiment, load_experiment
from studies.wang.findings import findings


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("quick", [False, True])
def test_a_page_of_nothing(name: str, quick: bool, tmp_path: Path) -> None:
    experiment = load_experiment(find_experiment(name), quick=quick)
    outcomes = load_outcomes(experiment, tmp_path)
    assert {each.failed for each in outcomes.all} == {NOT_RUN}
    written = write_experiment(outcomes, tmp_path / "out")
    page = written.page.read_text()
    assert escape(experiment.title) in page
    assert f"0 of {len(experiment.steps)}" in page
    assert "holds" not in {claim["verdict"] for claim in written.results["claims"]}
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [step["name"] for step in results["steps"]] == [step.name for step in experiment.steps]


def study(tmp_path: Path, results: dict[str, dict[str, Any]]) -> Outcomes:
    """`wang` with results for some of its steps, written as the steps write them."""
    experiment = load_experiment(find_experiment("wang"))
    # Peers leave one file; so every step is made one here, which changes no finding.
    steps = tuple(
        dataclasses.replace(step, kind="peer", peer="ddp", processes=None)
        for step in experiment.steps
    )
    experiment = dataclasses.replace(experiment, steps=steps)
    for name, result in results.items():
        folder = tmp_path / "steps" / name
        folder.mkdir(parents=True)
        hosts = result.pop("hosts", {})
        record = {"fingerprint": experiment.step(name).fingerprint, "seconds": 1.0, "hosts": hosts}
        write_json(folder / "step.json", {**record, "failed": result.pop("failed", "")})
        write_json(folder / "result.json", result)
    return load_outcomes(experiment, tmp_path)


def timed(seconds: float, loss: float = 2.0, sent: tuple[float, ...] = ()) -> dict[str, Any]:
    """What a step that measures time leaves."""
    line = {"updates": 8, "update_seconds_mean": seconds, "train_loss": loss}
    hosts = {f"host-{i}": {"bytes_sent": each} for i, each in enumerate(sent)}
    return {"epochs": [line, line], "read_seconds": 0.1, "hosts": hosts}


def verdict(outcomes: Outcomes, words: str) -> tuple[str, str]:
    found = [claim for claim in findings(outcomes).claims if words in claim.claim]
    assert len(found) == 1
    return found[0].verdict, found[0].because


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.5, "holds"), (1.0, "does not hold")]
)  # of an update with eight processes; 0.45 with one
def test_wang_weak_and_strong_scaling(tmp_path: Path, seconds: float, expected: str) -> None:
    outcomes = study(tmp_path, {"time-study-1x1": timed(0.45), "time-study-4x2": timed(seconds)})
    assert verdict(outcomes, "as long with many")[0] == expected
    state, because = verdict(outcomes, "in proportion")
    assert state == expected
    assert f"{0.45 * 469 / (seconds * 59):.1f} on 4 x 2" in because


@pytest.mark.parametrize(
    ("study_8", "paceline_8", "expected", "rate"),
    [(0.95, 0.99, "holds", True), (0.988, 0.99, "does not hold", False),
     (0.95, 0.96, "holds", False)],
)  # fmt: skip
def test_wang_accuracy(
    tmp_path: Path, study_8: float, paceline_8: float, expected: str, rate: bool
) -> None:
    outcomes = study(
        tmp_path,
        {
            "accuracy-study-1": {"test_accuracy": 0.99},
            "accuracy-study-8": {"test_accuracy": study_8},
            "accuracy-paceline-1": {"test_accuracy": 0.99},
            "accuracy-paceline-8": {"test_accuracy": paceline_8},
        },
    )
    state, because = verdict(outcomes, "cost accuracy")
    assert state == expected
    assert ("it is the learning rate" in because) == rate
    table = next(
        table
        for section in findings(outcomes).sections
        for table in section.tables
        if table.key == "wang-accuracy"
    )
    row = dict(zip(table.columns, table.rows[-1], strict=True))
    assert row["nodes x processes"] == "4 x 2"
    assert row["published"] == 94.03
    assert row["Paceline"] == pytest.approx(100 * paceline_8)
    assert row["stock PyTorch"] is None


@pytest.mark.parametrize(("loss", "expected"), [(2.00001, "does not hold"), (2.1, "holds")])
def test_wang_places_change_no_result(tmp_path: Path, loss: float, expected: str) -> None:
    outcomes = study(
        tmp_path, {"time-study-1x8": timed(0.5), "time-paceline-4x2": timed(0.5, loss)}
    )
    assert verdict(outcomes, "Where processes are")[0] == expected


def test_wang_traffic_is_that_of_the_busiest_host(tmp_path: Path) -> None:
    outcomes = study(
        tmp_path,
        {
            "time-study-2x2": timed(0.6, sent=(160e6, 16e6)),
            "time-paceline-2x2": timed(0.5, sent=(32e6, 48e6)),
        },
    )
    state, because = verdict(outcomes, "All-reduce")
    assert state == "holds"
    assert "3.0 against 10.0 MB" in because


def test_a_failed_step_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    outcomes = study(
        tmp_path,
        {"time-study-1x1": timed(0.45), "time-stock-1x1": {"failed": "the <host> has gone"}},
    )
    written = write_experiment(outcomes, tmp_path / "out")
    page = written.page.read_text()
    assert "time-stock-1x1 failed: the \\u003chost\\u003e has gone" in page
    table = (tmp_path / "out" / "tables" / "wang-update.csv").read_text().splitlines()
    assert table[1] == "1 x 1,1,0.14,0.45,,"


def test_a_step_that_was_changed_since_counts_as_not_run(tmp_path: Path) -> None:
    outcomes = study(tmp_path, {"time-study-1x1": timed(0.45)})
    record = tmp_path / "steps" / "time-study-1x1" / "step.json"
    record.write_text(record.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    again = load_outcomes(outcomes.experiment, tmp_path)
    found = again.one(what="time", recipe="study", nodes=1, processes=1)
    assert isinstance(found, StepOutcome)
    assert found.failed == NOT_RUN
