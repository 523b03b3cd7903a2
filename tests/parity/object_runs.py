"""A script as a user writes it: objects of its own, handed to `paceline.train`.

`python object_runs.py FOLDER` trains every kind of object, in every way, and the same with a plain
loop; what came of each is printed as one JSON object. Run by test_objects.py, once for all tests.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.config import config_from

SAMPLES, BATCH, EPOCHS, RATE = 60, 16, 2, 0.05
POINTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
LABELS = (POINTS.sum(dim=1) > 0).long()
TRAIN, TEST = TensorDataset(POINTS, LABELS), TensorDataset(POINTS[:20], LABELS[:20])


class Net(nn.Module):
    def __init__(self, width: int = 8, out: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


class Maker:
    def build(self) -> nn.Module:
        return Net()

    def __call__(self) -> nn.Module:
        return Net()


def nested() -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return Net()

    return build


def two_sets(samples: int = SAMPLES) -> tuple[Any, Any]:
    return TensorDataset(POINTS[:samples], LABELS[:samples]), TEST


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def own_optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class Counting(Net):
    """Saves more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, Any] = {"batches": 0, "last": (None, float("inf"))}

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = {"batches": self.seen["batches"] + 1, "last": (points.mean(dim=0), 0.5)}
        return super().forward(points)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Unsaveable(Net):
    def get_extra_state(self) -> Any:
        return object()

    def set_extra_state(self, state: Any) -> None: ...


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


class Forces(nn.Module):
    """Takes a derivative in its forward pass, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        points = points.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.energy(points).sum(), points, create_graph=True)
        return slope[:, :2]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, points: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"first": self.first(points), "second": self.second(points)}


def loss_of_heads(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return own_loss(outputs["first"], targets) + own_loss(outputs["second"], targets)


class FromBytes(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        assert points.dtype is torch.uint8
        return super().forward(points.float() - 3)


def loss_of_flags(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What it means depends on the dtype: ~1 is -2, ~True is False."""
    return (
        (outputs[:, 0] * ~targets).mean() - (outputs[:, 1] * targets).mean() + outputs.pow(2).mean()
    )


class Turned(Dataset[Any]):
    """As torchvision's: `targets` are not what its items have."""

    def __init__(self) -> None:
        self.targets = LABELS
        self.target_transform = lambda label: 1 - label

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return POINTS[index], self.target_transform(LABELS[index])


class Locked(Turned):
    """Cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class TwoInputs(Turned):
    def __getitem__(self, index: int) -> Any:
        return (POINTS[index], POINTS[index]), LABELS[index]


def pair(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, Any]:
    return TensorDataset(inputs, targets), TensorDataset(inputs[:20], targets[:20])


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


BASE = {"model": Net, "data": (TRAIN, TEST), "loss": own_loss, "optimizer": own_optimizer}
KINDS: dict[str, dict[str, Any]] = {
    "class": {},
    "lambda": {"model": lambda: Net(), "loss": lambda o, t: own_loss(o, t)},
    "partial": {"model": functools.partial(Net, width=8), "data": functools.partial(two_sets)},
    "nested function": {"model": nested()},
    "bound method": {"model": Maker().build},
    "instance with __call__": {"model": Maker(), "loss": nn.CrossEntropyLoss()},
    "function as data": {"data": two_sets},
    "lambda as data": {"data": lambda: (TRAIN, TEST)},
}
"""Each is the same training."""
BYTES = (POINTS * 2 + 3).clamp(0, 7).to(torch.uint8)
ODD: dict[str, dict[str, Any]] = {
    "extra state": {"model": Counting},
    "lazy": {"model": Lazy},
    "scripted": {"model": scripted},
    "derivative in forward": {"model": Forces},
    "dict of outputs": {"model": TwoHeads, "loss": loss_of_heads},
    "bytes": {"model": FromBytes, "data": pair(BYTES, LABELS)},
    "doubles": {"model": lambda: Net().double(), "data": pair(POINTS.double(), LABELS)},
    "flags": {"data": pair(POINTS, LABELS.bool()), "loss": loss_of_flags},
    "regression on doubles": {
        "model": lambda: Net(out=1),
        "data": pair(POINTS, POINTS.sum(dim=1, keepdim=True).double()),
        "loss": nn.MSELoss(),
    },
    "turned targets": {"data": (Turned(), Turned())},
    "segmentation": {
        "model": lambda: nn.Conv1d(1, 3, 1),
        "data": pair(POINTS[:, None], LABELS[:, None].expand(-1, 4).contiguous()),
    },
}
"""Each is what a plain loop makes of it."""
HELD = Net()


def penalised(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return own_loss(outputs, targets) + 0.1 * HELD.layers[0].weight.square().sum()


REFUSED: dict[str, dict[str, Any]] = {
    "a module that its loss holds": {"model": HELD, "loss": penalised},
    "a finished optimizer": {"optimizer": torch.optim.SGD(HELD.parameters(), lr=0.1)},
    "options of a module": {"model": HELD},
    "extra state without a form": {"model": Unsaveable},
    "a dict for cross entropy": {"model": TwoHeads},
    "two inputs": {"data": (TwoInputs(), TwoInputs())},
    "closure": {"optimizer": torch.optim.LBFGS},
    "a class as loss": {"loss": nn.CrossEntropyLoss},
    "losses": {"loss": nn.CrossEntropyLoss(reduction="none")},
    "no gradient": {"loss": lambda outputs, targets: outputs.detach().mean()},
    "bytes": {"data": pair(BYTES, LABELS)},
    "doubles": {"data": pair(POINTS.double(), LABELS)},
    "short labels": {"data": pair(POINTS, LABELS.short()), "loss": "cross_entropy"},
    "one class": {"model": lambda: Net(out=1), "loss": "cross_entropy"},
    "no classes": {"model": lambda classes: Net(), "data": pair(POINTS, POINTS)},
    "exit as model": {"model": "builtins:exit"},
    "sys.exit as model": {"model": "sys:exit"},
    "os.abort as data": {"data": "os:abort"},
    "os.system as optimizer": {"optimizer": "os:system"},
    "exit as optimizer": {"optimizer": "builtins:exit"},
    "data that exits": {"data": lambda: sys.exit(3)},
    "an object's name": {"model": "object:__main__.Net"},
}


def built(model: Callable[[], nn.Module]) -> nn.Module:
    """A new model, with shapes for layers that wait for a first batch."""
    made = model()
    if isinstance(made, Lazy):
        with torch.no_grad():
            made.eval()(POINTS[:1])
    return made.train()


def plain_loop(
    model: Any, data: Any, loss: Any, optimizer: Any, epochs: int = EPOCHS
) -> dict[str, Any]:
    """What anyone would write, on the batches that Paceline takes."""
    train = (data() if callable(data) else data)[0]
    inputs, targets = next(iter(DataLoader(train, batch_size=len(train))))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = built(model)
    stepping = optimizer(made.parameters(), lr=RATE)
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(len(train))
        for start in range(0, len(train), BATCH):
            part = torch.from_numpy(order[start : start + BATCH])
            stepping.zero_grad()
            loss(made(inputs[part]), targets[part]).backward()
            stepping.step()
    return made.state_dict()


def differences(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """How far two state dicts are apart; infinite where they are of another kind."""
    if found.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            same = repr(found[name]) == repr(value)
            worst = worst if same else float("inf")
        elif found[name].dtype != value.dtype:
            return float("inf")
        else:
            worst = max(worst, float((found[name] - value).abs().max()))
    return worst


class Runs:
    """Trainings below one folder, and what came of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, {}

    def train(
        self, group: str, name: str, strategy: str, changes: dict[str, Any], **more: Any
    ) -> Any:
        """One training; its outcome is kept under `group/name/strategy`."""
        run = self.folder / f"{group}-{name}-{strategy}".replace(" ", "-")
        settings = {"local.strategy": strategy, "optimizer.learning_rate": RATE}
        settings |= {"local.replicas": 2} if strategy == "replicas" else {}
        work = paceline.Workload(**{**BASE, **changes}, batch_size=BATCH)
        outcome: dict[str, Any] = {}
        self.found[f"{group}/{name}/{strategy}"] = outcome
        options = {"epochs": EPOCHS, "run": run, "silent": True, **more}
        options["settings"] = settings | more.get("settings", {})
        try:
            result = paceline.train(work, **options)
        except paceline.UserError as error:
            outcome |= {"refused": str(error), "exit_code": error.exit_code, "run": run.exists()}
            return None
        outcome["updates"] = result.summary["updates"]
        config = result.run / "config.toml"
        outcome["config"] = [line for line in config.read_text().splitlines() if "object:" in line]
        return result


def weights(result: Any, model: Any) -> dict[str, Any]:
    return result.load_model(built(model)).state_dict()


def finished(runs: Runs) -> None:
    """A module itself: it begins with its own weights, and has the trained ones in the end."""
    for strategy in ("sequential", "replicas", "processes"):
        torch.manual_seed(5)
        model = Net()
        model(POINTS).sum().backward()  # gradients of whatever was done before
        expected = plain_loop(**{**BASE, "model": functools.partial(copy.deepcopy, model)})
        again = {}
        for epochs in (1, EPOCHS):
            runs.train("finished", "module", strategy, {"model": model}, epochs=epochs, **again,
                       run=runs.folder / f"finished-{strategy}")  # fmt: skip
            again = {"resume": True}
        runs.found[f"finished/module/{strategy}"]["difference"] = differences(
            model.state_dict(), expected
        )


def several(runs: Runs) -> None:
    """Objects in other processes, and one that stays."""
    result = runs.train("several", "all parts", "processes", {"data": lambda: (TRAIN, TEST)})
    runs.found["several/all parts/processes"]["difference"] = differences(
        weights(result, Net), plain_loop(**BASE)
    )
    result = runs.train("several", "a lock", "auto", {"data": (Locked(), Locked())})
    runs.found["several/a lock/auto"]["difference"] = differences(
        weights(result, Net), plain_loop(**{**BASE, "data": (Turned(), Turned())})
    )


def compare(runs: Runs, group: str, cases: dict[str, dict[str, Any]], strategy: str) -> None:
    for name, changes in cases.items():
        result = runs.train(group, name, strategy, changes)
        if result is not None:
            parts = {**BASE, **changes}
            found = weights(result, parts["model"])
            difference = differences(found, plain_loop(**parts))
            runs.found[f"{group}/{name}/{strategy}"]["difference"] = difference


def refuse(runs: Runs) -> None:
    locked = {"data": (Locked(), Locked())}
    runs.train("several", "a lock", "processes", locked)
    runs.found["several/hosts"] = refused_on_hosts(runs.folder)
    of_a_model = {"settings": {"workload.model_options": {"width": 3}}}
    for name, changes in REFUSED.items():
        more = of_a_model if name == "options of a module" else {}
        runs.train("refused", name, "threads", changes, **more)
    for name in ("a dict for cross entropy", "closure"):
        runs.train("refused", name, "auto", REFUSED[name])
    twice = {"settings": {"workload.model": "vgg11"}}
    runs.train("refused", "two names", "threads", {}, **twice)
    for name in ("extra state", "scripted"):
        runs.train("refused", name, "replicas", ODD[name])


def refused_on_hosts(folder: Path) -> str:
    """What `train` says of objects where a run is to be spread over machines."""
    from paceline import api
    from paceline.config.hosts import numbered_hosts

    names, given = api._names_and_objects(paceline.Workload(**BASE))
    config, run, _ = api.begin(config_from(names), run=folder / "hosts", given=given)
    hosts = api.HostsRequest(hosts=numbered_hosts(2))
    try:
        api.run_training(api.TrainingStart(config=config, run=run, given=given, hosts=hosts))
    except paceline.UserError as error:
        return str(error)
    raise AssertionError("it was not refused")


def resume(runs: Runs) -> None:
    for model in (Net, Counting):
        name = model.__name__
        run = runs.folder / name
        runs.train("resume", f"{name} first", "sequential", {"model": model}, run=run, epochs=1)
        again = runs.train(
            "resume", name, "sequential", {"model": model}, run=run, epochs=2, resume=True
        )
        expected = plain_loop(**{**BASE, "model": model})
        outcome = runs.found[f"resume/{name}/sequential"]
        outcome["difference"] = differences(weights(again, model), expected)
    kept = (runs.folder / "Net" / "config.toml").read_text()
    stored = runs.folder / "Net" / "plan.json"
    plan = stored.read_text()
    again = {"run": runs.folder / "Net", "epochs": 9, "resume": True}
    other = {"settings": {"local.strategy": "processes"}}
    runs.train("resume", "another strategy", "sequential", {}, **again, **other)
    runs.train("resume", "another model", "sequential", {"model": Lazy}, **again)
    runs.train("resume", "fewer samples", "sequential", {"data": lambda: two_sets(40)}, **again)
    fewer = pair(POINTS[:40], LABELS[:40])
    name = "fewer samples of the same kind"
    runs.train("resume", name, "sequential", {"data": fewer}, **again)
    runs.found["resume/config is as it was"] = (
        runs.folder / "Net" / "config.toml"
    ).read_text() == kept
    runs.found["resume/plan is as it was"] = stored.read_text() == plan


if __name__ == "__main__":
    all_runs = Runs(Path(sys.argv[1]))
    compare(all_runs, "kinds", KINDS, "sequential")
    compare(
        all_runs, "kinds", {"class": {}, "function as data": KINDS["function as data"]}, "replicas"
    )
    compare(all_runs, "odd", ODD, "sequential")
    compare(all_runs, "odd", {"lazy": ODD["lazy"]}, "replicas")
    several(all_runs)
    finished(all_runs)
    refuse(all_runs)
    resume(all_runs)
    print(json.dumps(all_runs.found))
