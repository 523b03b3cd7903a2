"""A worker that raises, exits, is killed, stopped or hangs ends the run with its rank named.

That no process, shared memory or socket outlives the run is checked by the leak
watch around every test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("faulty_model.py")
EXPECTED = {
    "raise": ("rank 1 failed with ValueError: the sample of doom", "in fail"),
    "exit": ("rank 1 exited with code 3 in update 2",),
    "kill": ("rank 1 was killed by SIGKILL (often: out of memory) in update 2",),
    "stop": ("rank 1 has not responded for", "it is stopped or hangs"),
    "hang": ("s in 'gradients' of update 2 for rank 1 (in update 2): it hangs",),
}


def arguments(fault: str, *changes: str) -> list[str]:
    settings = {
        "workload.model": f"{MODEL}:build",
        "workload.model_options": f'{{ fault = "{fault}" }}',
        "workload.data": "synthetic",
        "data.options": "{ shape = [1, 28, 28], samples = 400, test_samples = 20 }",
        "workload.batch_size": "20",
        "local.strategy": "processes",
        "local.processes": "2",
        "train.deadline": "2",
    }
    pairs = [f"{key}={value}" for key, value in settings.items()]
    return [word for pair in (*pairs, *changes) for word in ("--set", pair)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "fault",
    [
        fault if fault == "kill" else pytest.param(fault, marks=pytest.mark.slow)
        for fault in EXPECTED
    ],
)
def test_a_failing_worker_ends_the_run(fault: str, run_cli, tmp_path: Path) -> None:
    # A stopped process shows no heartbeat, which is noticed before a long deadline.
    patience = ("train.deadline=60",) if fault == "stop" else ()
    changes = arguments(fault, *patience)
    done = run_cli("train", *changes, "--run", str(tmp_path / "run"), timeout=600)
    assert done.returncode == 1
    for text in EXPECTED[fault]:
        assert text in done.stderr
    if fault != "raise":  # there the worker's own traceback is the point
        assert "Traceback" not in done.stderr


@pytest.mark.world_size(2)
def test_without_barriers_too(run_cli, tmp_path: Path) -> None:
    changes = arguments("kill", "local.strategy=hogwild")
    done = run_cli("train", *changes, "--run", str(tmp_path / "run"), timeout=600)
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_candidate_that_brings_its_ranks_down_loses_the_race(run_cli, tmp_path: Path) -> None:
    # The model fails on rank 1 only, which takes part in `processes` and `pipeline` alone.
    changes = [
        word for word in arguments("kill") if not word.startswith(("local.", "train.deadline"))
    ]
    pairs = [word for word in changes if word != "--set"]
    line = [word for pair in pairs for word in ("--set", pair)]
    done = run_cli("race", *line, "--seconds", "1", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "brought its processes down" in done.stdout


MODEL_WITH_A_VIEW = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 26 * 26, 10)

    def forward(self, images):
        return self.head(self.conv(images).view(len(images), -1))
"""


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_model_that_does_not_bear_a_layout_is_raced_without_it(run_cli, tmp_path: Path) -> None:
    """As in many tutorials: `view` refuses what lies in memory as channels_last."""
    (tmp_path / "net.py").write_text(MODEL_WITH_A_VIEW)
    model = f"workload.model={tmp_path / 'net.py'}:Net"
    done = run_cli("race", "--set", model, "--seconds", "1", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    found = {c["name"]: c for c in json.loads(done.stdout)["candidates"]}
    for name, entry in found.items():
        if "channels_last" in name:
            assert entry["images_per_second"] is None
            assert "view size is not compatible" in entry["reason"]
    assert any("channels_last" in name for name in found)
    assert all(found[name]["images_per_second"] for name in ("threads 2", "processes 2x1"))
    assert any(entry["chosen"] for entry in found.values())
