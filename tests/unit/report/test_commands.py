"""`paceline report`, `runs` and `compare` as they are called."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from written_runs import write_run

from paceline.commands import compare, report, runs


def call(module: object, *arguments: str | Path) -> Result:
    command = module.command  # type: ignore[attr-defined]
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def two(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one", hosts="a", speed=1000)
    write_run(tmp_path / "runs" / "two", hosts="ab", speed=1800)
    return tmp_path / "runs"


def test_report_writes_page_figures_and_tables(two: Path, tmp_path: Path) -> None:
    figures, tables = tmp_path / "figures", tmp_path / "tables"
    done = call(report, two / "two", "--figures", figures, "--tables", tables)
    assert done.exit_code == 0, done.output
    assert (two / "two" / "report.html").read_text().startswith("<!DOCTYPE html>")
    names = {path.stem for path in figures.iterdir()}
    assert {"race", "loss", "ledger", "timeline", "traffic-sent"} <= names
    assert all((figures / f"{n}.svg").exists() and (figures / f"{n}.png").exists() for n in names)
    rows = list(csv.DictReader((tables / "epochs.csv").open()))
    assert [row["epoch"] for row in rows] == ["1.0", "2.0", "3.0", "4.0"]
    assert (tables / "epochs.md").read_text().startswith("| epoch | train loss |")


def test_report_for_programs_is_json_alone_and_writes_nothing(two: Path) -> None:
    done = call(report, two / "one", two / "two", "--json")
    found = json.loads(done.output)
    assert "strong-scaling" in [section["key"] for section in found["sections"]]
    assert not (two / "one" / "report.html").exists()


def test_report_that_cannot_be_written_says_so(two: Path) -> None:
    done = call(report, two / "one", "--output", "/proc/nothing/report.html")
    assert "cannot be written" in str(done.exception)


def test_runs_has_a_line_for_each(two: Path) -> None:
    done = call(runs, two)
    assert [line.split()[0] for line in done.output.splitlines() if "mnist_cnn" in line] == [
        "one",
        "two",
    ]
    found = json.loads(call(runs, two, "--json").output)
    assert [line["hosts"] for line in found] == [1, 2]
    assert found[1]["images_per_second"] == 1800


def test_no_runs_is_not_an_error(tmp_path: Path) -> None:
    assert "no runs in" in call(runs, tmp_path).output
    assert json.loads(call(runs, tmp_path, "--json").output) == []


def test_compare_shows_plan_and_change(two: Path) -> None:
    done = call(compare, two / "one", two / "two")
    assert "nodes.1.host" in done.output
    assert "+80.0%" in done.output
    assert "+0.00 points" in done.output
    found = json.loads(call(compare, two / "one", two / "two", "--json").output)
    assert {"config", "plan", "measured"} <= set(found)
