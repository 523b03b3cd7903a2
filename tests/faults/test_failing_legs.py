"""Whatever happens to a plan that is tried costs its own leg: the training goes on, exactly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline import api
from paceline.config import load_config
from paceline.schema import write_json
from paceline.schema.legs import Lesson, read_legs
from paceline.workflow.alone import lesson_place

MODEL = Path(__file__).with_name("faulty_model.py")
FAULTS = {
    "raise": "the sample of doom",
    "exit": "exited with code 3",
    "kill": "was killed by SIGKILL",
    "hang": "it hangs or is far slower",
    "memory": "can't allocate memory",
}


def settings(fault: str, *changes: str, slow_until: str = "") -> list[str]:
    """A training of which past ones have taught that `processes` is far better than it is."""
    place = f', slow_until = "{slow_until}"' if slow_until else ""
    pairs = (
        f"workload.model={MODEL}:build",
        f'workload.model_options={{ fault = "{fault}", rank = 1, update = 3{place} }}',
        "workload.data=synthetic",
        "data.options={ shape = [1, 28, 28], samples = 400, test_samples = 20 }",
        "workload.batch_size=20",
        "train.epochs=300",
        "train.evaluate_every=100",
        "train.deadline=3",
        "numerics.memory_format=contiguous",
        "pilot.budget=1.0",
        *changes,
    )
    return [word for pair in pairs for word in ("--set", pair)]


def teach(words: list[str], **factors: float) -> None:
    config = api.resolve(load_config(None, words[1::2]))
    place = lesson_place(config, 20)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, Lesson(factors=dict(factors)))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What all of them end with: the training in one process, where no fault happens."""
    run = tmp_path_factory.mktemp("plain") / "run"
    words = [*settings("none", "train.epochs=100", "local.strategy=threads"), "--run", str(run)]
    command = [sys.executable, "-m", "paceline.cli", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return weights(run)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_fails_is_left(
    fault: str, run_cli, tmp_path: Path, plain: dict[str, torch.Tensor]
) -> None:
    # Long updates make any trial worth its cost, however busy the machine is.
    words = settings(fault, "train.epochs=100", slow_until=str(tmp_path / "failed"))
    teach(words, **{"processes 2x1": 0.001, "replicas 2x1": 2.0})
    done = run_cli("train", *words, "--run", tmp_path / "run", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "processes 2x1 is out, and training goes on without it" in done.stdout
    assert FAULTS[fault] in done.stdout
    legs = read_legs(tmp_path / "run" / "legs.jsonl")
    assert [leg.name for leg in legs if leg.ended] == ["processes 2x1"]
    assert sum(leg.updates for leg in legs) == 2000
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, plain[name])


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_where_parts_do_not_add_up_all_that_divide_are_left(run_cli, tmp_path: Path) -> None:
    loss = Path(__file__).parents[1] / "parity" / "proof_models.py"
    words = settings("none", f"workload.loss={loss}:weighted")
    teach(words, **{"processes 2x1": 0.001, "replicas 2x1": 0.002})
    done = run_cli("train", *words, "--run", tmp_path / "run", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is out, and training goes on without it") == 1
    assert "not a mean over samples" in done.stdout
    legs = read_legs(tmp_path / "run" / "legs.jsonl")
    assert {leg.name for leg in legs if not leg.ended} == {"threads 2"}


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_ctrl_c_in_a_leg_of_ranks_saves_and_the_rest_can_be_done(
    start_cli, run_cli, tmp_path: Path
) -> None:
    words = settings("none", "train.epochs=100000", "train.deadline=60")
    teach(words, **{"processes 2x1": 0.001, "replicas 2x1": 2.0})
    run = tmp_path / "run"
    process = start_cli("train", *words, "--run", run, "-v")
    for line in process.stdout:
        if "updates with processes 2x1" in line:
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, output + errors
    saved = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert saved["position"]["update"] > 0
    more = saved["position"]["update"] + 5
    done = run_cli("train", "--resume", "--run", run, "--set", f"train.steps={more}", timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"continuing {run} from update {saved['position']['update']}" in done.stdout
    legs = read_legs(run / "legs.jsonl")
    assert [leg.first for leg in legs[1:]] == [leg.first + leg.updates for leg in legs[:-1]]
    assert legs[-1].first + legs[-1].updates == more


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_leg_that_fails_while_the_training_is_stopped_loses_nothing(
    run_cli, tmp_path: Path
) -> None:
    words = settings("ended", slow_until=str(tmp_path / "failed"))
    teach(words, **{"processes 2x1": 0.001, "replicas 2x1": 2.0})
    done = run_cli("train", *words, "--run", tmp_path / "run", timeout=600)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    saved = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "state.json").read_text())
    legs = read_legs(tmp_path / "run" / "legs.jsonl")
    assert saved["position"]["update"] == sum(leg.updates for leg in legs) > 0
