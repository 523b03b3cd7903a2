"""What `paceline bench predict` makes of what it timed, and which runs `audit` believes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from cost_cases import host, machines

from benchmarks.lab.predict import CaseOutcome, exchange_errors, options, summarised, verdicts
from benchmarks.lab.predict_cases import EVERY, MODELS, QUICK, chosen_cases
from paceline.commands.audit import disturbance
from paceline.errors import ConfigError


def outcome(option: str, predicted: float, measured: float, rate: str = "1gbit") -> CaseOutcome:
    return CaseOutcome(
        model="mnist_cnn", hosts="two", cores=(1.0, 1.0), rate=rate, option=option,
        predicted=predicted, measured=measured, low=measured, high=measured,
    )  # fmt: skip


def test_errors_and_choices() -> None:
    found = summarised(
        [
            outcome("alone", 1.0, 1.0),
            outcome("allreduce", 0.9, 1.2),  # predicted fastest, 20% behind the fastest
            outcome("alone", 1.0, 1.04, "100mbit"),  # 4% behind: as good
            outcome("allreduce", 2.0, 1.0, "100mbit"),
        ]
    )
    assert found.configurations == 4
    assert found.worst == pytest.approx(1.0)
    assert found.mean == pytest.approx((0 + 0.25 + 0.04 / 1.04 + 1.0) / 4)
    assert [choice.right for choice in found.choices] == [False, True]
    assert found.right == 0.5
    assert not found.passed
    assert summarised([outcome("alone", 1.05, 1.0), outcome("allreduce", 1.9, 2.0)]).passed


def test_a_verdict_is_right_on_the_same_side_of_one() -> None:
    cases = [("mnist_cnn", "two", "1gbit")]
    slow = [outcome("alone", 1.0, 1.0), outcome("allreduce", 2.0, 1.1)]
    (verdict,) = verdicts(slow, cases)
    assert (verdict.predicted, verdict.right) == (0.5, True)
    (verdict,) = verdicts([outcome("alone", 1.0, 1.0), outcome("allreduce", 0.5, 1.1)], cases)
    assert not verdict.right
    assert verdicts([outcome("alone", 1.0, 1.0)], cases) == []


def test_errors_of_exchanges_leave_computing_out() -> None:
    together = dataclasses.replace(
        outcome("allreduce", 0.7, 1.2), terms={"compute": 0.4, "waiting": 0.1, "exposed": 0.2}
    )
    # the machine was twice as slow while options were timed: 2 x 0.5 + 0.2 s
    found = exchange_errors([outcome("alone", 1.0, 2.0), together])
    assert found == {(together.case, "allreduce"): pytest.approx(0.0)}


def test_cases() -> None:
    assert {model for model, _, _ in EVERY} == set(MODELS)
    assert len(set(EVERY)) == len(EVERY) == 3 + 9 + 4 + 7
    assert set(QUICK) <= set(EVERY)
    assert {rate for _, _, rate in chosen_cases(EVERY, [], ["four"], ["300mbit"])} == {"300mbit"}
    with pytest.raises(ConfigError, match="mnist_cnn"):
        chosen_cases(EVERY, ["mnist"], [], [])


def test_the_planner_predicts_every_option() -> None:
    found = options(machines(host("a"), host("b", slower=4.0)))
    assert set(found) == {"alone", "allreduce", "partition", "parameter_server"}
    assert [node.host for node in found["alone"].nodes] == ["a"]
    servers = found["parameter_server"]
    assert [(node.host, node.role) for node in servers.nodes] == [("a", "worker"), ("b", "server")]
    assert set(options(machines(host("a")))) == {"alone"}


def test_disturbed_runs_teach_nothing(tmp_path: Path) -> None:
    def epochs(*seconds: float) -> None:
        lines = [json.dumps({"update_seconds_median": value}) for value in seconds]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))

    assert disturbance(tmp_path) == ""
    epochs(0.9, 0.1, 0.11)  # the first epoch warms up
    assert disturbance(tmp_path) == ""
    epochs(0.1, 0.1, 0.2)
    assert "0.1 to 0.2 s" in disturbance(tmp_path)
    (tmp_path / "race.json").write_text(json.dumps({"busy": 0.5}))
    assert "50%" in disturbance(tmp_path)
