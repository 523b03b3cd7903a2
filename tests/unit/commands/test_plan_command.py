"""`paceline plan` and `paceline audit` on made-up machines and runs, and what they leave behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cost_cases import host, machines

from paceline.commands import audit, measure, plan
from paceline.config import load_config
from paceline.config.hosts import find_hosts
from paceline.plan.measured import choose, foresee
from paceline.schema import NodePlan, Plan, read_json, write_json
from paceline.schema.machines import Machines
from paceline.workflow.calibration import calibration
from paceline.workflow.machines import cache_path, kept_machines
from paceline.workflow.spread import hosts_of_plan

WHOLE = ("--set", 'exchange.partition="none"', "--set", "workload.batch_size=128")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def run(command: Any, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)


def stored(folder: Path, found: Machines) -> Path:
    path = folder / "machines.json"
    write_json(path, dataclasses.replace(found, workload=dataclasses.replace(
        found.workload, name="shallow_cnn on digits")))  # fmt: skip
    return path


def light(*names: str, slower: dict[str, float] | None = None) -> list[Any]:
    """Hosts that train a model of few weights."""
    return [host(name, slower=(slower or {}).get(name, 1.0), parameters=0.01) for name in names]


def test_plan_of_two_machines(tmp_path: Path) -> None:
    path, output = stored(tmp_path, machines(*light("a", "b"))), tmp_path / "plan.json"
    result = run(plan.command, "--machines", path, "--output", output, *WHOLE)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "Machines: a, b (2 of 2 machines)."
    assert len(lines) == 6
    made = read_json(Plan, output)
    assert [node.host for node in made.nodes] == ["a", "b"]
    assert [node.share for node in made.nodes] == [1.0, 1.0]
    assert made.partition == "none"
    for key in ("update_seconds", "images_per_second", "bytes_per_update", "memory_mb"):
        assert made.predicted[key] > 0
    assert any(r.option == "a alone" and "s per update" in r.reason for r in made.rejected)
    # Again, from what was kept.
    again = tmp_path / "again.json"
    assert run(plan.command, "--machines", path, "--output", again, *WHOLE).exit_code == 0
    assert again.read_text() == output.read_text()


def test_a_machine_that_hurts_is_left_out_and_training_does_without_it(tmp_path: Path) -> None:
    slow = stored(tmp_path, machines(*light("a", "b", "c", slower={"c": 400.0})))
    output = tmp_path / "plan.json"
    result = run(plan.command, "--machines", slow, "--output", output, *WHOLE)
    assert "Left out: c" in result.output
    made = read_json(Plan, output)
    assert [node.host for node in made.nodes] == ["a", "b"]
    assert any(r.option == "c too" for r in made.rejected)
    hosts = find_hosts("a,b,c")
    assert [h.name for h in hosts_of_plan(hosts, made).host] == ["a", "b"]
    assert hosts_of_plan(find_hosts("a,c"), made) == find_hosts("a,c")  # said elsewhere


def test_slots_of_one_host_keep_its_name_and_their_cores(tmp_path: Path) -> None:
    slots = [
        dataclasses.replace(each, node=NodePlan(host="localhost", cores=(number,)))
        for number, each in enumerate(light("localhost-0", "localhost-1"))
    ]
    path, output = stored(tmp_path, machines(*slots)), tmp_path / "plan.json"
    run(plan.command, "--machines", path, "--output", output, *WHOLE)
    made = read_json(Plan, output)
    assert [(node.host, node.cores) for node in made.nodes] == [
        ("localhost", (0,)),
        ("localhost", (1,)),
    ]


def test_measured_for_something_else(tmp_path: Path) -> None:
    path = stored(tmp_path, machines(*light("a", "b")))
    with pytest.raises(Exception, match="measured for shallow_cnn on digits"):
        run(plan.command, "--machines", path, "--set", 'workload.model="mnist_cnn"')


def test_measurements_are_kept_by_hosts_and_workload() -> None:
    config, hosts = load_config(), find_hosts("a,b")
    assert kept_machines(config, hosts) is None
    path = cache_path(config, hosts)
    path.parent.mkdir(parents=True)
    found = machines(*light("a", "b"))
    write_json(path, dataclasses.replace(
        found, workload=dataclasses.replace(found.workload, name="")))  # fmt: skip
    assert kept_machines(config, hosts) is not None
    assert kept_machines(config, find_hosts("a,c")) is None
    other = load_config(None, ("workload.batch_size=64",))
    assert kept_machines(other, hosts) is None
    path.write_text("{}")
    assert kept_machines(config, hosts) is not None  # valid, if empty


def test_unequal_shares_by_hand_are_foreseen_as_slower() -> None:
    found = machines(*light("a", "b"))
    config = load_config(None, ("workload.batch_size=128",))

    def seconds(*shares: float) -> float:
        nodes = tuple(
            NodePlan(host=name, share=share) for name, share in zip("ab", shares, strict=True)
        )
        return foresee(config, found, Plan(nodes=nodes), ["a", "b"])["update_seconds"]

    assert seconds(3.0, 1.0) > 1.2 * seconds(1.0, 1.0)
    whole = load_config(None, ("workload.batch_size=128", 'exchange.partition="none"'))
    best = choose(whole, found)[0].predicted["update_seconds"]
    assert seconds(1.0, 1.0) == pytest.approx(best, rel=0.05)


def past_run(folder: Path, name: str, *, predicted: dict[str, float], measured: float) -> Path:
    path = folder / name
    path.mkdir()
    summary = {
        "exchange": "allreduce",
        "predicted": predicted,
        "measured": {"nodes": 2, "update_seconds": measured, "bytes_per_update": 1000.0},
    }
    (path / "run.json").write_text(json.dumps(summary))
    return path


def test_audit_finds_errors_and_what_to_multiply_with(tmp_path: Path) -> None:
    guess = {"update_seconds": 0.1, "exposed_seconds": 0.0, "bytes_per_update": 1000.0}
    paths = [
        past_run(tmp_path, f"run-{n}", predicted=guess, measured=took)
        for n, took in enumerate((0.12, 0.125, 0.16))
    ]
    two = run(audit.command, *paths[:2])
    assert "2 of the 3 runs" in two.output
    assert calibration() == {}
    looked = json.loads(run(audit.command, "--only-look", "--json", *paths).output)
    assert looked["mean"]["update_seconds"] == pytest.approx((1 / 6 + 0.2 + 0.375) / 3)
    assert looked["worst"]["update_seconds"] == pytest.approx(0.375)
    assert looked["mean"]["bytes_per_update"] == 0
    assert calibration() == {}
    result = run(audit.command, *paths)
    assert "allreduce: multiply predicted times by 1.25 (3 runs)" in result.output
    assert calibration() == {"allreduce": pytest.approx(1.25)}
    # Predictions that were already multiplied do not make the factor grow.
    for path in paths:
        summary = json.loads((path / "run.json").read_text())
        summary["predicted"] |= {"update_seconds": 0.125, "calibration": 1.25}
        (path / "run.json").write_text(json.dumps(summary))
    run(audit.command, *paths)
    assert calibration() == {"allreduce": pytest.approx(1.25)}


def test_runs_that_disagree_give_no_factor(tmp_path: Path) -> None:
    guess = {"update_seconds": 0.1, "exposed_seconds": 0.0}
    paths = [
        past_run(tmp_path, f"run-{n}", predicted=guess, measured=took)
        for n, took in enumerate((0.1, 0.2, 0.3))
    ]
    output = " ".join(run(audit.command, *paths).output.split())
    assert "allreduce: runs took 1.00 to 3.00 times what was predicted" in output
    assert calibration() == {}


def test_audit_leaves_out_what_cannot_be_compared(tmp_path: Path) -> None:
    only_computing = {"update_seconds": 0.05}
    paths = [
        past_run(tmp_path, f"run-{n}", predicted=only_computing, measured=0.1) for n in range(3)
    ]
    (tmp_path / "broken").mkdir()
    paths += [past_run(tmp_path, "asked", predicted={}, measured=0.1), tmp_path / "broken"]
    result = run(audit.command, *paths)
    assert result.exit_code == 0
    assert "computing only" in result.output
    assert "nothing was predicted" in result.output
    assert "did not end" in result.output
    assert calibration() == {}


def test_what_was_asked_for_is_what_is_predicted(tmp_path: Path) -> None:
    path, output = stored(tmp_path, machines(*light("a", "b", "c"))), tmp_path / "plan.json"
    asked = ("--set", 'exchange.kind="averaging"', "--set", "exchange.every=4")
    result = run(plan.command, "--machines", path, "--output", output, *WHOLE, *asked)
    assert "Exchange: averaging every 4" in result.output
    assert read_json(Plan, output).exchange == "averaging"
    asked = ("--set", 'exchange.kind="parameter_server"', "--set", "workload.batch_size=4096")
    run(plan.command, "--machines", path, "--output", output, *WHOLE, *asked)
    made = read_json(Plan, output)
    assert [node.role for node in made.nodes] == ["worker", "worker", "server"]
    assert made.with_servers(1) == made


def test_measurements_in_words() -> None:
    found = machines(*light("a", "b"))
    assert measure.describe_host(found.hosts[0]).startswith("a: 2 cores")
    assert "trains 1,280 images/s at batch 128" in measure.describe_host(found.hosts[0])
    assert all("Mbit/s" in line for line in measure.describe_network(found))
