"""The experiment `lerat`: its cuts, its steps, and what is made of what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from written_runs import write_run

from paceline import models
from studies.lerat.findings import findings
from studies.lerat.speeds import GPU_SETUPS, SETUPS, WORKS, speedup
from studies.outcome import Claim, load_outcomes
from studies.page import write_experiment
from studies.peers.recipes import names, recipe
from studies.running import check
from studies.spec import Experiment, find_experiment, load_experiment

ROOT = Path(__file__).parents[3]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Experiment:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    return load_experiment(find_experiment("lerat"))


@pytest.mark.parametrize(("model", "convolutions"), [("alexnet", 4), ("vgg16", 8)])
def test_models_are_cut_where_the_study_cut_them(
    experiment: Experiment, model: str, convolutions: int
) -> None:
    with torch.device("meta"):
        network = models.build(model, classes=3, channels=3)
    for setup in ("model", "hybrid"):
        (first,) = experiment.step(f"{model}-{setup}").settings["local.split_at"]
        before = []
        for name, module in network.named_modules():
            if name == first:
                break
            before.append(module)
        else:
            pytest.fail(f"{model} has no layer {first}")
        assert sum(isinstance(each, nn.Conv2d) for each in before) == convolutions
        assert isinstance(before[-1], nn.ReLU)


def test_steps_cover_the_study_and_fit_on_two_cores(experiment: Experiment) -> None:
    check(experiment)
    quick = load_experiment(experiment.folder, quick=True)
    check(quick)
    assert all(step.cores <= 2.0 for step in experiment.steps)
    assert sum(step.seconds for step in experiment.steps) <= 120 * 60
    assert 0 < sum(step.seconds for step in quick.steps) <= 10 * 60
    for work in WORKS:
        have = {s.facts["setup"] for s in experiment.steps if s.facts.get("work") == work}
        assert have == {setup.key for setup in SETUPS}
        assert set(experiment.published[work]["gpu"]) >= {key for key, _ in GPU_SETUPS}
    for step in experiment.steps:
        assert step.settings["workload.data"] == "synthetic"  # there is no other here
        if step.facts["place"] == "hosts":
            assert (step.hosts, step.visible) == ((1.0, 1.0), 2)


def test_photographs_where_they_are(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "fire" / "train" / "fire").mkdir(parents=True)
    real = load_experiment(experiment.folder)
    assert {step.settings["workload.data"] for step in real.steps} == {"fire"}
    assert real.steps[0].fingerprint != experiment.steps[0].fingerprint


def leave(experiment: Experiment, out: Path, name: str, speed: float, **more: Any) -> None:
    """What a step that trained at this speed would have left."""
    step, folder = experiment.step(name), out / "steps" / name
    folder.mkdir(parents=True)
    if step.kind == "peer":
        epochs = [{"images_per_second": value, "updates": 8} for value in (speed / 9, speed)]
        result = {"epochs": epochs, "bytes_sent": 16 * 2 * 3e6, **more}
        (folder / "result.json").write_text(json.dumps(result))
    else:
        hosts = ("a", "b") if step.hosts else ("a",)
        write_run(folder / "run", hosts=hosts, speed=speed, epochs=2)
        if more:
            path = folder / "run" / "run.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | more))
    record = {"fingerprint": step.fingerprint, "seconds": 20.0, "failed": ""}
    (folder / "step.json").write_text(json.dumps(record))


def claims_of(experiment: Experiment, out: Path) -> dict[str, Claim]:
    return {claim.claim[:24]: claim for claim in findings(load_outcomes(experiment, out)).claims}


def test_nothing_run_is_nothing_claimed(experiment: Experiment, tmp_path: Path) -> None:
    outcomes = load_outcomes(experiment, tmp_path)
    found = findings(outcomes)
    assert {claim.verdict for claim in found.claims} == {"cannot be tested here"}
    assert write_experiment(outcomes, tmp_path).page.exists()
    assert "made samples" in found.notes[0]


def test_speedups_stand_beside_the_study(experiment: Experiment, tmp_path: Path) -> None:
    speeds = {"baseline": 100.0, "threads": 180.0, "replicas": 150.0, "processes": 190.0,
              "model": 120.0}  # fmt: skip
    for setup, speed in speeds.items():
        leave(experiment, tmp_path, f"alexnet-{setup}", speed)
    outcomes = load_outcomes(experiment, tmp_path)
    assert speedup(outcomes, "simple_big", "processes") == pytest.approx(1.9, rel=0.03)
    assert speedup(outcomes, "complex_small", "processes") is None
    found = findings(outcomes)
    table = found.sections[0].tables[0]
    row = next(row for row in table.rows if row[0] == "several processes")
    assert row[1:4] == (5.76, None, 15.57)
    assert row[4] == pytest.approx(1.9, rel=0.03)
    assert found.sections[0].tables[1].rows[-1] == ("GPUs, Horovod", 1.91, 1.57)
    assert "0.89 of a core for AlexNet" in found.notes[-1]  # as the written samples say
    claims = claims_of(experiment, tmp_path)
    assert claims["Several processes are fa"].verdict == "holds"
    assert claims["On a CPU, model parallel"].verdict == "holds"
    resources = next(s for s in found.sections if s.key == "simple_big-resources")
    assert {figure.key for figure in resources.figures} == {
        f"simple_big-{key}" for key in ("ledger", "cpu", "memory", "threads")
    }
    assert [row[0] for row in resources.tables[0].rows] == [s.title for s in SETUPS[:5]]


def test_verdicts_follow_the_figures(experiment: Experiment, tmp_path: Path) -> None:
    for setup, speed in {"baseline": 100.0, "replicas": 190.0, "processes": 150.0,
                         "model": 195.0}.items():  # fmt: skip
        leave(experiment, tmp_path, f"alexnet-{setup}", speed)
    claims = claims_of(experiment, tmp_path)
    assert claims["Several processes are fa"].verdict == "does not hold"
    assert claims["On a CPU, model parallel"].verdict == "does not hold"


@pytest.mark.parametrize(
    ("own", "loss", "verdict"),
    [(140.0, 0.9, "holds"), (120.0, 0.9, "does not hold"), (140.0, 0.91, "does not hold")],
)
def test_two_hosts_must_be_faster_and_exact(
    experiment: Experiment, tmp_path: Path, own: float, loss: float, verdict: str
) -> None:
    leave(experiment, tmp_path, "alexnet-baseline", 90.0)
    leave(experiment, tmp_path, "alexnet-hosts-ddp", 100.0)
    leave(experiment, tmp_path, "alexnet-hosts-paceline", own)
    leave(experiment, tmp_path, "exact-one", 100.0, train_loss=0.9, test_loss=1.0)
    leave(experiment, tmp_path, "exact-two", 100.0, train_loss=loss, test_loss=1.0)
    found = claims_of(experiment, tmp_path)
    assert found["Paceline's own: two host"].verdict == verdict
    assert found["The network carries at m"].verdict == "does not hold"
    table = findings(load_outcomes(experiment, tmp_path)).sections[1].tables[0]
    rows = {row[1]: row for row in reversed(table.rows) if row[0] == "AlexNet"}
    ratio = rows["Paceline, raced"][4]
    assert isinstance(ratio, float)
    assert ratio == pytest.approx(own / 100, rel=0.03)
    assert rows["stock DDP"][5] == pytest.approx(3.0)
    assert rows["Paceline, raced"][5] == pytest.approx(2.77)


def test_a_peer_that_is_not_installed_says_how(experiment: Experiment, tmp_path: Path) -> None:
    said = "not installed: paceline peers install horovod"
    step = experiment.step("alexnet-hosts-horovod")
    folder = tmp_path / "steps" / step.name
    folder.mkdir(parents=True)
    record = {"fingerprint": step.fingerprint, "seconds": 1.0, "failed": said}
    (folder / "step.json").write_text(json.dumps(record))
    found = findings(load_outcomes(experiment, tmp_path))
    rows = {row[0]: row for row in found.sections[0].tables[0].rows}
    assert rows["two hosts: Horovod"][5] == "not installed: AlexNet"
    assert f"Horovod is {said}" in found.sections[1].text


def test_of_several_settings_of_a_peer_the_fastest_counts(
    experiment: Experiment, tmp_path: Path
) -> None:
    leave(experiment, tmp_path, "alexnet-baseline", 50.0)
    leave(experiment, tmp_path, "alexnet-hosts-ray", 60.0, processes=4, threads=1)
    leave(experiment, tmp_path, "alexnet-hosts-ray-1x2", 90.0, processes=2, threads=2)
    outcomes = load_outcomes(experiment, tmp_path)
    assert speedup(outcomes, "simple_big", "ray") == pytest.approx(1.8, rel=0.03)
    rows = [row for row in findings(outcomes).sections[1].tables[0].rows if row[1] == "Ray"]
    assert [row[2:4] for row in rows if row[0] == "AlexNet"] == [
        ("2 processes x 1 thread", 60.0),
        ("1 process x 2 threads", 90.0),
    ]


@pytest.mark.parametrize("peer", names())
def test_peers_end_with_the_line_that_installs_them(peer: str) -> None:
    if find_spec(recipe(peer).module.partition(".")[0]) is not None:
        pytest.skip(f"{peer} is installed here")
    command = [sys.executable, "-m", f"benchmarks.peers.{peer}", "config.toml", "--result", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 3
    assert done.stderr == f"not installed: paceline peers install {peer}\n"
