"""What a report says of runs whose numbers are known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import SLOW, write_legs, write_run

from paceline.commands.compare import compare
from paceline.commands.runs import line_of, read_runs
from paceline.errors import RunDirectoryError
from paceline.report.figure import Figure, Section
from paceline.report.load import RunData, load_run
from paceline.report.make import make_report
from paceline.report.page import Report, frozen
from paceline.report.scaling import scalings
from paceline.report.timeline import typical_update
from paceline.schema import NodePlan, Plan, encode
from paceline.schema.legs import Leg
from paceline.watch.state import whole_run


def whole(path: Path) -> RunData:
    return whole_run(path)


def section(report: Report, key: str) -> Section:
    return next(each for each in report.sections if each.key == key)


def figure(report: Report, key: str) -> Figure:
    return next(each for each in report.figures if each.key == key)


@pytest.fixture
def four(tmp_path: Path) -> RunData:
    return whole(write_run(tmp_path / "four", hosts="abcd", speed=3300))


def test_one_run_has_every_section(four: RunData) -> None:
    report = make_report([four])
    assert [each.key for each in report.sections] == [
        "legs", "hosts", "training", "ledger", "exchanged", "timeline", "resources", "network",
        "predicted", "race", "plan", "asked",
    ]  # fmt: skip
    keys = [each.key for each in report.figures]
    assert len(keys) == len(set(keys)) == 18
    table_keys = [each.key for each in report.tables]
    assert len(table_keys) == len(set(table_keys))


def test_the_ledger_sums_and_names_the_slow_rank(four: RunData) -> None:
    report = make_report([four])
    shown = figure(report, "ledger")
    for rank in range(4):
        assert sum(each.y[rank] or 0.0 for each in shown.series) == pytest.approx(1.0)
    assert f"Rank {SLOW} on host c" in section(report, "ledger").text[0]


def test_the_timeline_has_the_spans_of_one_update(four: RunData) -> None:
    assert typical_update(four.sessions) in range(40)
    shown = figure(make_report([four]), "timeline")
    waiting = next(each for each in shown.series if each.name == "wait")
    assert "rank 2 on c" not in waiting.x
    assert waiting.y == (150.0,) * 3
    forward = next(each for each in shown.series if each.name == "forward")
    assert forward.base == (10.0,) * 4


def test_traffic_leaves_loopback_out(four: RunData) -> None:
    report = make_report([four])
    assert set(figure(report, "traffic-sent").series[0].y) == {7.0}
    assert set(figure(report, "packets-sent").series[0].y) == {900.0}


def test_predicted_beside_measured(four: RunData) -> None:
    table = section(make_report([four]), "predicted").tables[0]
    assert table.shown(0) == ("images/s", "3,630", "3,300", "-9.1%")


def test_strong_scaling_of_two_exchanges(tmp_path: Path) -> None:
    made = [
        ("one", "a", "allreduce", 1000), ("two", "ab", "allreduce", 1800),
        ("four", "abcd", "allreduce", 3000), ("ring", "abcd", "ring", 2000),
    ]  # fmt: skip
    runs = [
        whole(write_run(tmp_path / name, hosts=hosts, exchange=exchange, speed=speed))
        for name, hosts, exchange, speed in made
    ]
    found = {line.name: line for line in scalings(runs, "strong")}
    assert set(found) == {"allreduce", "ring"}
    assert [step.size for step in found["allreduce"].steps] == [1, 2, 4]
    assert [step.speedup for step in found["allreduce"].steps] == pytest.approx([1, 1.8, 3])
    assert found["ring"].steps[-1].efficiency == pytest.approx(0.5)
    assert scalings(runs, "weak") == []
    report = make_report(runs)
    ideal = figure(report, "strong-speedup").series[0]
    assert (ideal.name, ideal.x, ideal.y) == ("ideal", (1.0, 2.0, 4.0), (1.0, 2.0, 4.0))
    ratios = figure(report, "coordination-to-computation")
    assert ratios.title == "Ratio of coordination to computation"
    assert ratios.series[0].y[0] == 0.0
    assert figure(report, "exchange-speed").order == ("two", "four", "ring")


def test_weak_scaling_and_batches(tmp_path: Path) -> None:
    runs = [
        whole(write_run(tmp_path / "one", hosts="a", batch=64, speed=1000)),
        whole(write_run(tmp_path / "two", hosts="ab", batch=128, speed=1900)),
        whole(write_run(tmp_path / "large", hosts="a", batch=1024, speed=1200)),
    ]
    (line,) = scalings(runs, "weak")
    assert [step.efficiency for step in line.steps] == pytest.approx([1.0, 0.95])
    assert figure(make_report(runs), "batch-accuracy").series[0].x == (64.0, 1024.0)


def test_runs_of_several_models_are_lines_of_their_own(tmp_path: Path) -> None:
    runs = [
        whole(write_run(tmp_path / f"{model}-{len(hosts)}", hosts=hosts, model=model, speed=speed))
        for model, hosts, speed in [
            ("mnist_cnn", "a", 100), ("mnist_cnn", "ab", 190),
            ("alexnet", "a", 10), ("alexnet", "ab", 12),
        ]
    ]  # fmt: skip
    assert [line.name for line in scalings(runs, "strong")] == ["mnist_cnn", "alexnet"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "bare", observed=False)
    (path / "plan.json").write_text("{ not json")
    (path / "metrics.jsonl").write_text('{"epoch": 1, "train_loss": NaN}\n{"epoch": 2, "tr')
    (path / "run.json").unlink()
    run = load_run(path)
    report = make_report([run])
    assert any("plan.json could not be read" in each for each in report.problems)
    assert "rank-*/events.jsonl" in section(report, "ledger").text[0]
    assert "no readable plan.json" in section(report, "plan").text[0]
    assert line_of(run)["finished"] is False
    frozen(report)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run"):
        load_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="no run directory"):
        load_run(tmp_path / "nothing")


def test_nothing_from_a_file_becomes_markup(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)></script>"
    path = write_run(tmp_path / "run", hosts=(bad, "b"), model=bad)
    page = frozen(make_report([whole(path)]))
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "\\u003cimg src=x" in page
    sly = replace(whole(path), name="<!-- SCRIPT --><!-- DATA --><title>")
    assert frozen(make_report([sly])).count("<title>") == 1


def test_the_page_asks_for_nothing_outside(four: RunData) -> None:
    page = frozen(make_report([four]))
    assert len(page.encode()) < 1_000_000
    assert "default-src 'none'" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    markup = markup.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in markup
    assert "https:" not in markup
    assert not re.search(r"<(link|iframe|object|img)\b|\burl\(", markup)


def test_runs_are_listed_oldest_first_without_links(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(tmp_path / name, observed=False)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "empty").mkdir()
    assert [run.name for run in read_runs(tmp_path)] == ["b", "a"]


def test_compare_says_what_differs(tmp_path: Path) -> None:
    first = load_run(write_run(tmp_path / "x", speed=1000, observed=False))
    second = load_run(write_run(tmp_path / "y", speed=1500, batch=256, observed=False))
    found = compare(first, second)
    keys = {row["key"] for row in found["config"]}
    assert keys == {"name", "workload.batch_size"}
    assert "batch_size" in {row["key"] for row in found["plan"]}
    speed = next(row for row in found["measured"] if row["key"] == "images_per_second")
    assert speed["change"] == pytest.approx(0.5)
    json.dumps(found)
    assert compare(first, first)["config"] == compare(first, first)["plan"] == []


def test_what_agreeing_cost_is_shown_by_rank(four: RunData) -> None:
    shown = section(make_report([four]), "exchanged")
    (table,) = shown.tables
    waited = dict(zip((row[0] for row in table.rows), (row[-1] for row in table.rows), strict=True))
    assert waited[SLOW] == pytest.approx(50.0)
    assert waited[0] == pytest.approx(200.0)
    assert [row[2] for row in table.rows] == [40] * 4
    assert table.rows[0][3] == pytest.approx(2.77)
    time = figure(make_report([four]), "exchange-time")
    assert [series.name for series in time.series] == [
        "hidden under computing",
        "computing stood still",
    ]
    assert time.series[0].y == pytest.approx((50.0,) * 4)


def test_exchanges_are_compared_by_the_same_numbers(tmp_path: Path) -> None:
    runs = [
        whole(write_run(tmp_path / kind, hosts="ab", exchange=kind, speed=speed))
        for kind, speed in (("allreduce", 1800.0), ("ring", 1700.0))
    ]
    runs.append(whole(write_run(tmp_path / "blind", hosts="ab", observed=False)))
    report = make_report(runs)
    (table,) = section(report, "exchange").tables
    assert [row[0] for row in table.rows] == ["allreduce", "ring", "allreduce"]
    assert [row[4] for row in table.rows[:2]] == pytest.approx([2.77, 2.77])
    assert table.rows[2][4] is not None  # from metrics.jsonl
    assert table.rows[2][5] is None  # known from events only
    assert {each.key for each in section(report, "exchange").figures} == {
        "exchange-speed",
        "exchange-time",
        "exchange-traffic",
    }


def test_every_prediction_stands_beside_its_measurement(four: RunData) -> None:
    predicted = {
        "images_per_second": 3000.0,
        "images_per_second_low": 2500.0,
        "images_per_second_high": 3200.0,
        "update_seconds": 0.4,
        "compute_seconds": 0.2,
        "exposed_seconds": 0.05,
        "waiting_seconds": 0.1,
        "data_seconds": 0.001,
        "bubble_seconds": 0.0,
        "bytes_per_update": 2.5e6,
        "memory_mb": 300.0,
        "calibration": 1.5,
        "speedup": 3.0,
    }
    assert four.plan is not None
    run = replace(
        four,
        plan=replace(four.plan, predicted=predicted),
        summary={**four.summary, "measured": {"memory_mb": 450.0, "nodes": 4}},
    )
    shown = section(make_report([run]), "predicted")
    (table,) = shown.tables
    assert all(row[2] is not None for row in table.rows)
    found = {str(row[0]): row[2] for row in table.rows}
    assert found["memory of a node (MB)"] == 450.0
    assert found["sent per update by the busiest node (MB)"] == pytest.approx(2.77)
    # Three ranks compute 0.17 s of an update, the slow one 0.32.
    assert found["computing, per update (ms)"] == pytest.approx((3 * 170 + 320) / 4)
    assert found["waiting for others, per update (ms)"] == pytest.approx(3 * 150 / 4)
    assert "outside" in shown.text[0]
    assert "multiplied by 1.50" in shown.text[0]
    assert len(figure(make_report([run]), "predicted").series[0].x) == len(table.rows) - 1


def test_races_of_several_hosts_are_shown_together(four: RunData) -> None:
    assert four.race is not None
    slower = replace(four.race, busy=0.5, decision="sequential: 900 images/s, 1.00x sequential")
    run = replace(four, race=None, races={"a": four.race, "b": slower})
    shown = section(make_report([run]), "race")
    assert "a: threads 2: 2,000 images/s" in shown.text[0]
    assert "before the race of b" in shown.text[1]
    (bars,), (table,) = shown.figures, shown.tables
    assert [series.name for series in bars.series] == ["a", "b"]
    assert bars.order[0] == "threads 2, bf16"
    assert len(table.rows) == 6


def test_legs_are_a_band_over_time(tmp_path: Path) -> None:
    path = write_run(tmp_path / "legs")
    (path / "race.json").unlink()
    write_legs(path)
    report = make_report([whole(path)])
    assert "race" not in [each.key for each in report.sections]
    shown = section(report, "legs")
    assert "took 0.9 s and saved at least 3.0 s" in " ".join(shown.text)
    band = figure(report, "legs")
    assert band.order == ("training",)  # this machine's name is in no plan of one machine
    assert [each.base for each in band.series] == [(1.0,), (1.5,), (3.0,)]
    assert [each.y for each in band.series] == [(0.4,), (1.2,), (7.5,)]
    (path / "legs.jsonl").write_text("{")
    broken = whole(path)
    assert not broken.legs
    assert "legs.jsonl could not be read" in broken.problems[0]


def test_hosts_that_come_and_go_are_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", hosts="abc")
    plans = [Plan(nodes=tuple(NodePlan(host=host) for host in hosts)) for hosts in ("abc", "ab")]
    legs = [
        Leg(name="all", plan=plans[0], updates=4, began_at=1.0, seconds=4.0, left=("c",),
            lost_seconds=1.5, ended="host c has gone"),
        Leg(name="a and b", plan=plans[1], first=4, updates=6, began_at=6.5, seconds=9.0),
        Leg(name="all", plan=plans[0], first=10, updates=9, began_at=15.5, setup_seconds=0.5,
            seconds=8.0, came=("c",), left=("c",), lost_seconds=2.0),
    ]  # fmt: skip
    (path / "legs.jsonl").write_text("".join(json.dumps(encode(leg)) + "\n" for leg in legs))
    report = make_report([whole(path)])
    text = " ".join(section(report, "legs").text)
    assert "broken off 2 times (lost: c (2 times)), which took 3.5 s until it went on" in text
    assert "Hosts that came while it trained: c." in text
    all_three, two, lost, came, *_ = figure(report, "legs").series
    assert all_three.x == ("a", "b", "c", "a", "b", "c")
    assert (two.x, two.base, two.y) == (("a", "b"), (6.5, 6.5), (9.0, 9.0))
    assert (lost.x, lost.base, lost.y) == (("c", "c"), (5.0, 24.0), (1.5, 2.0))
    assert (came.x, came.base, came.y) == (("c",), (15.5,), (0.5,))
    hosts = [row[5] for row in section(report, "legs").tables[0].rows]
    assert hosts == ["c was lost (1.5 s)", "", "c came; c was lost (2.0 s)"]


def test_races_are_read_by_host(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", hosts="ab")
    (path / "race.json").rename(path / "race-a.json")
    (path / "race-b.json").write_text("{")
    run = load_run(path)
    assert list(run.races) == ["a"]
    assert "race-b.json could not be read" in run.problems[0]
