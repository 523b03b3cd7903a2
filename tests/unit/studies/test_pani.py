"""The experiment `pani`: its sweep, and what is made of what the steps leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lab.shares import equal_seconds, updates_within
from paceline import models
from studies.outcome import Claim, Outcomes, load_outcomes
from studies.page import write_experiment
from studies.pani.findings import batches, findings
from studies.running import check
from studies.spec import Experiment, find_experiment, load_experiment

BATCHES = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Experiment:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    return load_experiment(find_experiment("pani"))


def test_networks_are_the_studys() -> None:
    shallow = models.build("shallow_cnn", classes=10, channels=1, image_size=28)
    linear = [each for each in shallow.modules() if isinstance(each, nn.Linear)]
    assert [(each.in_features, each.out_features) for each in linear] == [(800, 500), (500, 10)]
    with torch.device("meta"):
        residual = models.build("resnet18", classes=10, channels=1, options={"stem": "small"})
    first = next(each for each in residual.modules() if isinstance(each, nn.Conv2d))
    assert (first.in_channels, first.kernel_size, first.stride) == (1, (3, 3), (1, 1))


def test_sweep_covers_the_study(experiment: Experiment) -> None:
    check(experiment)
    quick = load_experiment(experiment.folder, quick=True)
    check(quick)
    assert sum(step.seconds for step in experiment.steps) <= 40 * 60
    assert 0 < sum(step.seconds for step in quick.steps) <= 10 * 60
    sweeps = [s for s in experiment.steps if s.facts["about"] == "batch"]
    plain = {s.facts["batch"]: s for s in sweeps
             if (s.facts["model"], s.facts["recipe"]) == ("shallow_cnn", "plain")}  # fmt: skip
    assert sorted(plain) == BATCHES == experiment.published["batches"]
    assert {s.settings["optimizer.learning_rate"] for s in plain.values()} == {0.01}
    for step in sweeps:
        assert step.settings["workload.batch_size"] == step.facts["batch"]
        if step.facts["recipe"] == "recipe":
            rate = min(0.01 * step.facts["batch"] / 32, 0.16)
            assert step.settings["optimizer.learning_rate"] == pytest.approx(rate)
            assert step.settings["optimizer.warmup"] > 0


def leave(experiment: Experiment, out: Path, name: str, **result: Any) -> None:
    """What a step with this result would have left."""
    step, folder = experiment.step(name), out / "steps" / name
    folder.mkdir(parents=True)
    if step.kind == "train":
        run = folder / "run"
        run.mkdir()
        (run / "config.toml").write_text("[workload]\nbatch_size = 1\n")
        (run / "run.json").write_text(json.dumps({"finished": True, **result}))
    else:
        (folder / "result.json").write_text(json.dumps(result))
    record = {"fingerprint": step.fingerprint, "seconds": 20.0, "failed": ""}
    (folder / "step.json").write_text(json.dumps(record))


def trained(loss: float, accuracy: float, seconds: float = 10.0) -> dict[str, Any]:
    return {
        "test_loss": loss,
        "test_accuracy": accuracy,
        "epoch_seconds_median": seconds,
        "images_per_second": 1000.0,
        "updates": 8,
        "measured": {"memory_mb": 500.0},
    }


def verdicts(outcomes: Outcomes) -> dict[str, Claim]:
    return {claim.claim[:22]: claim for claim in findings(outcomes).claims}


def test_nothing_run_is_nothing_claimed(experiment: Experiment, tmp_path: Path) -> None:
    outcomes = load_outcomes(experiment, tmp_path)
    assert {claim.verdict for claim in findings(outcomes).claims} == {"cannot be tested here"}
    assert write_experiment(outcomes, tmp_path).page.exists()
    assert "made samples" in " ".join(findings(outcomes).notes)


def test_loss_and_accuracy_against_batch(experiment: Experiment, tmp_path: Path) -> None:
    for place, batch in enumerate(BATCHES):
        result = trained(0.1 + 0.2 * place, 0.97 - 0.1 * place, 12.0 - place)
        leave(experiment, tmp_path, f"shallow-plain-{batch}", **result)
        if batch > 32:
            better = trained(0.1, 0.97 - 0.01 * place)
            leave(experiment, tmp_path, f"shallow-recipe-{batch}", **better)
    outcomes = load_outcomes(experiment, tmp_path)
    assert list(batches(outcomes, "shallow_cnn", "plain")) == BATCHES
    assert list(batches(outcomes, "shallow_cnn", "recipe")) == BATCHES
    section = next(s for s in findings(outcomes).sections if s.key == "batch-shallow_cnn")
    assert [figure.key.partition("-")[2] for figure in section.figures] == [
        "loss",
        "accuracy",
        "time",
    ]
    assert [len(series.x) for series in section.figures[0].series] == [9, 9]
    last = section.tables[0].rows[-1]
    assert last[:3] == (8192, 8.0, 0.01)
    assert last[6] == 0.16
    found = verdicts(outcomes)
    assert found["The shallow network's "].verdict == "holds"
    assert found["Paceline's own: a rate"].verdict == "holds"
    assert found["At batch 512 the time "].verdict == "does not hold"


def test_verdicts_follow_the_figures(experiment: Experiment, tmp_path: Path) -> None:
    for place, batch in enumerate((32, 256, 512, 1024, 2048)):
        seconds = 40.0 if batch == 512 else 10.0
        leave(experiment, tmp_path, f"shallow-plain-{batch}",
              **trained(0.9 - 0.1 * place, 0.8, seconds))  # fmt: skip
        leave(experiment, tmp_path, f"resnet18-plain-{batch}",
              **trained(0.9 - 0.1 * place, 0.5 + 0.1 * place))  # fmt: skip
    leave(experiment, tmp_path, "shallow-recipe-2048", **trained(0.5, 0.7))
    found = verdicts(load_outcomes(experiment, tmp_path))
    assert found["The shallow network's "].verdict == "does not hold"
    assert found["ResNet-18 improves in "].verdict == "holds"
    assert found["ResNet-18 gives NaN at"].verdict == "does not hold"
    assert found["At batch 512 the time "].verdict == "holds"
    assert found["Networks share one cur"].verdict == "does not hold"
    assert found["Paceline's own: a rate"].verdict == "does not hold"


def row(name: str, speed: float) -> dict[str, Any]:
    keys = ("seconds", "low", "high", "mb_sent", "mb_counted", "packets", "waiting")
    return {"name": name, "images_per_second": speed, "failed": "", **dict.fromkeys(keys, 0.5)}


@pytest.mark.parametrize(("together", "verdict"), [(94.0, "holds"), (92.0, "does not hold")])
def test_shares_must_reach_the_sum(
    experiment: Experiment, tmp_path: Path, together: float, verdict: str
) -> None:
    rows = [row("alone", 100.0), row("shares by speed", together), row("equal parts", 9.5)]
    leave(experiment, tmp_path, "unequal", rows=rows)
    outcomes = load_outcomes(experiment, tmp_path)
    claim = verdicts(outcomes)["Batch sizes by node sp"]
    assert (claim.verdict, "9.5%" in claim.because) == (verdict, True)
    section = next(s for s in findings(outcomes).sections if s.key == "shares")
    assert [line[2] for line in section.tables[0].rows] == [1.0, together / 100, 0.095]


def prediction(speeds: dict[int, float], exposed: float) -> dict[str, Any]:
    """As `paceline forecast --json` prints it: alone, then all-reduce and one that is not exact."""
    rows = []
    for nodes, speedup in speeds.items():
        for exchange, exact in (
            ("allreduce" if nodes > 1 else "alone", True),
            ("averaging", False),
        ):
            rows.append(
                {
                    "nodes": nodes,
                    "exchange": exchange,
                    "exact": exact,
                    "fits": True,
                    "images_per_second": 100 * speedup * (1 if exact else 2),
                    "speedup": speedup,
                    "speedup_low": speedup * 0.9,
                    "speedup_high": speedup * 1.1,
                    "efficiency": speedup / nodes,
                    "epoch_seconds": 10 / speedup,
                    "epoch_cost": 0.1,
                    "bytes_sent": 1e6,
                    "terms": {"compute": 1.0, "exposed": exposed, "waiting": 0.0, "bubble": 0.0},
                }
            )
    even = {"nodes": 2, "link_bits_per_second": 2e9, "batch": 4096}
    return {"rows": rows, "break_even": even, "verdict": "not worth it", "notes": []}


def test_the_guide_compares_both_networks(experiment: Experiment, tmp_path: Path) -> None:
    falling = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.7}
    rising = {1: 1.0, 2: 1.5, 4: 2.5, 8: 4.0}
    leave(experiment, tmp_path, "guide-shallow_cnn", **prediction(falling, 2.0))
    leave(experiment, tmp_path, "guide-resnet18", **prediction(rising, 0.2))
    outcomes = load_outcomes(experiment, tmp_path)
    section = next(s for s in findings(outcomes).sections if s.key == "guide")
    assert {line[2] for line in section.tables[0].rows} == {"alone", "allreduce"}
    assert section.figures[0].series[2].y == (1.0, 1.5, 2.5, 4.0)
    assert "2,000 Mbit/s" in " ".join(section.text)
    found = verdicts(outcomes)
    assert found["For the small network "].verdict == "holds"
    assert found["The ratio of coordinat"].verdict == "holds"


def test_slow_hosts_make_fewer_updates_per_turn() -> None:
    assert equal_seconds(1024, (1900.0, 64.0)) == 8.0
    assert [updates_within(seconds, 4) for seconds in (0.1, 4.0, 8.0, 60.0)] == [4, 2, 1, 1]
