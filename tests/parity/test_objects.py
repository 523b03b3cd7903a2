"""Objects of a script: trained as by a plain loop, or refused in a sentence; never replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.references import is_object

HERE = Path(__file__).parent
ROUNDING = 1e-6
"""What the order of sums may change; weights here are about 1."""


class Runs:
    """What object_runs.py did, and where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "object_runs.py"), str(folder)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        self.found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    def group(self, name: str) -> dict[str, Any]:
        """Outcomes by what comes after `name/`."""
        begin = f"{name}/"
        return {k.removeprefix(begin): v for k, v in self.found.items() if k.startswith(begin)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("objects"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", ["kinds", "odd"])
def test_objects_are_trained_as_by_a_plain_loop(runs: Runs, group: str) -> None:
    outcomes = runs.group(group)
    assert len(outcomes) > 9
    for case, outcome in outcomes.items():
        exact = case.endswith("/sequential")
        assert outcome.get("difference", outcome) <= (0.0 if exact else ROUNDING), case
        assert outcome["updates"] == 8, case


def test_a_module_itself_ends_with_the_trained_weights(runs: Runs) -> None:
    outcomes = runs.group("finished")
    assert outcomes.keys() == {f"module/{each}" for each in ("sequential", "replicas", "processes")}
    for case, outcome in outcomes.items():
        room = 0.0 if case == "module/sequential" else ROUNDING
        assert outcome.get("difference", outcome) <= room, case


def test_config_names_nothing_that_was_not_trained(runs: Runs) -> None:
    config = tomllib.loads((runs.folder / "kinds-class-sequential" / "config.toml").read_text())
    assert config["workload"]["model"] == "object:__main__.Net"
    assert config["optimizer"]["name"] == "object:__main__.own_optimizer"
    for outcome in runs.group("kinds").values():
        names = [line.partition(" = ")[2].strip('"') for line in outcome["config"]]
        assert len(names) == 4, "model, data, loss and optimizer"
        assert all(map(is_object, names))


def test_objects_travel_to_other_processes_of_the_machine_but_not_to_hosts(runs: Runs) -> None:
    outcomes = runs.group("several")
    on_hosts = outcomes.pop("hosts")
    assert on_hosts.startswith("other hosts cannot get the model __main__.Net of this Python")
    assert not (runs.folder / "hosts").exists()
    refused = outcomes.pop("a lock/processes")
    assert "the data of this Python program cannot be sent to other processes" in refused["refused"]
    assert "local.strategy = 'threads'" in refused["refused"]
    assert refused["exit_code"] == 2
    assert not refused["run"]
    assert outcomes.keys() == {"all parts/processes", "a lock/auto"}
    for case, outcome in outcomes.items():
        assert outcome.get("difference", outcome) <= ROUNDING, case
        assert outcome["updates"] == 8, case


SCRIPT = """
import threading
import torch, paceline
from beside import Reader, scale
from torch.nn import functional
from torch.utils.data import Dataset

print("the script runs")
WORDS = 11

class Texts(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        words = torch.arange(index, index + 2 + index % 5) % WORDS
        return words[:-1], words[1:]

def pad(items):
    longest = max(len(words) for words, _ in items)
    rows = [[functional.pad(each, (0, longest - len(each)), value=-100) for each in pair]
            for pair in items]
    return {"words": torch.stack([r[0] for r in rows]), "next": torch.stack([r[1] for r in rows])}

def step(model, batch):
    outputs = model(batch["words"].clamp(min=0)).flatten(0, 1)
    wanted = batch["next"].flatten()
    loss = functional.cross_entropy(outputs, wanted, ignore_index=-100) * scale()
    return {"loss": loss, "weight": (wanted != -100).sum()}

work = paceline.Workload(model=lambda: Reader(WORDS), data=(Texts(), Texts()), step=step,
                         collate_fn=pad, optimizer="sgd", batch_size=15, unit="tokens")
for strategy in ("threads", "processes"):
    result = paceline.train(work, epochs=2, run=strategy, silent=True, settings={
        "local.strategy": strategy, "optimizer.learning_rate": 0.1})
    print(strategy, result.summary["test_loss"], result.summary["unit"])
    torch.save(result.load_model(Reader(WORDS)).state_dict(), strategy + ".pt")
"""
BESIDE = """
from torch import nn

def scale():
    return 1.5

class Reader(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(words, 6), nn.Tanh(), nn.Linear(6, words))
    def forward(self, words):
        return self.layers(words)
"""


def test_a_script_without_a_guard_and_with_modules_beside_it(tmp_path: Path) -> None:
    folder, place = tmp_path / "code", tmp_path / "runs"
    folder.mkdir()
    place.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text(BESIDE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "script.py")],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script runs") == 1
    assert done.stdout.count("tokens") == 2
    one, two = (torch.load(place / f"{name}.pt") for name in ("threads", "processes"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= ROUNDING
    plan = json.loads((place / "processes" / "plan.json").read_text())
    assert plan["nodes"][0]["strategy"] == "processes"


REFUSALS = {
    "a module that its loss holds/threads": "the loss __main__.penalised uses the model",
    "a finished optimizer/threads": "the optimizer is a finished SGD, bound to weights",
    "options of a module/threads": "takes no options: leave 'width' out",
    "extra state without a form/threads": "saves object in '_extra_state'",
    "a dict for cross entropy/threads": "gives a dict, which loss",
    "a dict for cross entropy/auto": "the model gives a dict, which loss",
    "two inputs/threads": "a tuple of several inputs, and the model takes one: train with a step",
    "closure/threads": "its step() needs a closure",
    "closure/auto": "its step() needs a closure",
    "a class as loss/threads": "is a class: give an instance of it, as loss=CrossEntropyLoss()",
    "losses/threads": "tensor of shape [16]: it must give the mean",
    "no gradient/threads": "gave a number that no weight has a part in",
    "bytes/threads": "weights are torch.float32 and its inputs torch.uint8",
    "doubles/threads": "weights are torch.float32 and its inputs torch.float64",
    "short labels/threads": "cannot take torch.int16 targets",
    "one class/threads": "gives outputs of shape [16, 1] (targets: [16])",
    "no classes/threads": "set workload.classes",
    "exit as model/threads": "raised SystemExit",
    "sys.exit as model/threads": "model 'sys:exit' is a built-in function",
    "os.abort as data/threads": "data 'os:abort' is a built-in function",
    "os.system as optimizer/threads": "'os:system' is a built-in function",
    "exit as optimizer/threads": "raised SystemExit",
    "data that exits/threads": "raised SystemExit: 3",
    "an object's name/threads": "the model __main__.Net came as an object",
    "two names/threads": "workload.model = 'vgg11', but the workload gives object:__main__.Net",
    "extra state/replicas": "get_extra_state",
    "scripted/replicas": "TorchScript",
}


def test_what_cannot_be_trained_is_a_sentence_and_leaves_no_run(runs: Runs) -> None:
    outcomes = runs.group("refused")
    assert outcomes.keys() == REFUSALS.keys()
    for case, words in REFUSALS.items():
        outcome = outcomes[case]
        assert words in outcome.get("refused", outcome), case
        assert "\n" not in outcome["refused"]
        assert outcome["exit_code"] == 2
        assert not outcome["run"]


def test_a_run_of_objects_is_continued_with_the_same_kind(runs: Runs) -> None:
    outcomes = runs.group("resume")
    for model in ("Net", "Counting"):
        assert outcomes[f"{model}/sequential"]["difference"] == 0.0
    refused = {
        "another strategy": "another configuration (local.strategy",
        "another model": "another configuration (workload.model",
        "fewer samples": "another configuration (workload.data",
        "fewer samples of the same kind": "60 samples",
    }
    for case, words in refused.items():
        assert words in outcomes[f"{case}/sequential"]["refused"], case
    assert outcomes["config is as it was"]
    assert outcomes["plan is as it was"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "Net/config.toml"], "the model __main__.Net"),
        (["train", "--resume", "--run", "Net", "--set", "train.epochs=9"], "came as an object"),
        (["train", "Net/config.toml", "--set", "local.strategy=processes"], "came as an object"),
        (["race", "Net/config.toml"], "was an object of a Python program"),
    ],
)
def test_a_run_of_objects_cannot_be_repeated_without_them(
    runs: Runs, command: list[str], words: str
) -> None:
    before = (runs.folder / "Net" / "config.toml").read_text()
    done = cli(runs, *command)
    assert done.returncode == 2
    assert words in done.stderr
    assert (runs.folder / "Net" / "config.toml").read_text() == before
    assert not (runs.folder / "runs").exists()


@pytest.mark.parametrize(
    "command", [["report", "Net"], ["compare", "Net", "Counting"], ["runs", "."]]
)
def test_a_run_of_objects_can_be_read(runs: Runs, command: list[str]) -> None:
    done = cli(runs, *command)
    assert done.returncode == 0, done.stderr
    if command[0] == "runs":
        assert "object:__main__" in "".join(done.stdout.split())


def cli(runs: Runs, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli", *arguments],
        cwd=runs.folder,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "200"},
    )
