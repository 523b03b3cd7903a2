"""The run directory of a loop of one's own: what it was, what it logged, what it goes on from."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import config_from, dump_config, with_versions
from paceline.errors import PacelineError, RunDirectoryError, shortened
from paceline.local.base import OptimizerState
from paceline.local.state import OwnOptimizer
from paceline.observe.metrics import MetricsFile, totals
from paceline.pace.ranks import Ranks
from paceline.references import OBJECT, object_name
from paceline.run import RunDirectory, create_run, open_run, write_whole
from paceline.schema import Config, ExchangeSettings, NodePlan, Plan, write_json
from paceline.schema.checkpoint import fixed_settings, newest_good, other_settings
from paceline.schema.codec import encode
from paceline.schema.legs import Leg, cut_at, read_legs
from paceline.schema.plain import checked
from paceline.training.checkpoint import FILES, Checkpoints, Position, TrainState
from paceline.workflow.legs import write_legs

OWN = ".pace"
"""Where a checkpoint has what belongs to no parameter: no parameter's name begins with a dot."""
KEPT = 2
"""Checkpoints, besides the best one."""


def script_name() -> str:
    """What the run is called."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return name if name not in ("", "-", "-c", "ipykernel_launcher") else "loop"


def described(
    name: str, models: Sequence[nn.Module], optimizers: Sequence[Any], loaders: Sequence[Any],
    epochs: int, monitor: str, exchange: ExchangeSettings,
) -> Config:  # fmt: skip
    """What config.toml says of a loop: by name, since its objects are the script's."""
    data = object_name(loaders[0].dataset) if loaders else f"{OBJECT}{name}"
    batch = next((each.batch_size for each in loaders if each.batch_size), None)
    settings = {
        "name": name,
        "workload.model": _joined(models) or f"{OBJECT}{name}",
        "workload.data": data,
        "workload.step": f"{OBJECT}the loop of {name}",
        "optimizer.name": _joined(optimizers) or f"{OBJECT}{name}",
        "train.epochs": max(1, epochs),
        "train.monitor": monitor,
        "exchange.compression": exchange.compression,
        "exchange.rank": exchange.rank,
    } | ({"workload.batch_size": batch} if batch else {})
    return with_versions(config_from(settings))


def _joined(things: Sequence[Any]) -> str:
    if not things:
        return ""
    return object_name(type(things[0]) if len(things) == 1 else [type(each) for each in things])


def found_seats(ranks: Ranks) -> list[Any]:
    """Host and threads of every rank; each calls it."""
    return ranks.gather([socket.gethostname(), torch.get_num_threads()])


def planned(
    seats: Sequence[Any], members: Sequence[int], shares: Sequence[float], batch: int | None
) -> Plan:
    """Who computes what, as plan.json says it; `shares` are those of the members."""
    nodes: list[NodePlan] = []
    by_rank = dict(zip(members, shares, strict=True))
    for host in dict.fromkeys(seats[member][0] for member in members):
        here = [member for member in members if seats[member][0] == host]
        nodes.append(
            NodePlan(
                host=host,
                strategy="processes" if len(here) > 1 else "threads",
                share=sum(by_rank[member] for member in here),
                processes=len(here),
                threads=sum(seat[1] for seat in seats if seat[0] == host) // len(here),
            )
        )
    return Plan(nodes=tuple(nodes), batch_size=batch or 1, reason="a loop of the script's own")


class Keeper:
    """The run directory, which the first rank writes."""

    def __init__(self, run: RunDirectory, config: Config, plan: Plan) -> None:
        self.run, self.config, self.plan = run, config, plan
        self.checkpoints = Checkpoints(run.checkpoints, KEPT)
        self.metrics = MetricsFile(run.metrics)
        self.best: float | None = None
        self.before: list[Leg] = read_legs(run.legs)
        """Of a run that is continued."""
        self.started = time.perf_counter()

    def note(self, line: dict[str, Any]) -> bool:
        """The line of an epoch; whether it is the best so far."""
        self.metrics.append(line)
        name, higher = _monitored(self.config.train.monitor, line)
        value = line.get(name)
        if not isinstance(value, float) or value != value:
            return False
        better = self.best is None or (value > self.best if higher else value < self.best)
        self.best = value if better else self.best
        return better

    def note_legs(self, legs: Sequence[Leg]) -> None:
        """legs.jsonl: those of an interrupted run, and those since."""
        first = legs[0].first if legs else 0
        write_legs(self.run, [*cut_at(self.before, first), *legs])

    def save(
        self, epoch: int, update: int, model: dict[str, Any], state: OptimizerState, *, best: bool
    ) -> None:
        """A checkpoint of a whole number of epochs."""
        self.checkpoints.save(
            TrainState(
                position=Position(epoch=epoch, update=update),
                batch_size=self.plan.batch_size,
                seconds=time.perf_counter() - self.started,
                best_value=self.best,
                settings=fixed_settings(self.config),
                plan=encode(self.plan),
            ),
            model,
            state,
            best=best,
        )

    def summarize(self, epoch: int, update: int, parameters: int, *, finished: bool) -> None:
        """run.json, as any training has it."""
        lines = self.metrics.lines
        summary = {
            "name": self.config.name,
            "finished": finished,
            "epochs": epoch,
            "updates": update,
            **totals(lines, open_seconds=0.0),
            "best_value": self.best,
            "total_seconds": time.perf_counter() - self.started,
            "parameters": parameters,
        }
        write_json(self.run.summary, summary)


def _monitored(monitor: str, line: Mapping[str, Any]) -> tuple[str, bool]:
    """The key of what makes an epoch the best, and whether more is better."""
    name, _, way = monitor.partition(":")
    if monitor != "auto":
        return next((k for k in (f"test_{name}", f"train_{name}") if k in line), name), way == "max"
    order = (("test_accuracy", True), ("test_loss", False), ("train_loss", False))
    return next((each for each in order if each[0] in line), ("", False))


def open_keeper(
    where: Path | None, resume: bool | None, config: Config, plan: Plan
) -> tuple[Keeper, Path | None]:
    """The run directory on the first rank, and the checkpoint to go on from, if there is one."""
    path = where or (Path("runs/latest") if resume else None)
    found = None
    if path is not None and resume is not False and (path / "checkpoints").is_dir():
        found = newest_good(path / "checkpoints", print)
    if found is None and resume:
        raise RunDirectoryError(
            f"{path} has no checkpoint to continue from: leave resume out to start a new run"
        )
    if found is None:
        run = create_run(config.name, where)
        run.lock()
        write_whole(run.config, dump_config(config))
        write_json(run.plan, plan)
        return Keeper(run, config, plan), None
    assert path is not None
    run = open_run(path)
    run.lock()
    checkpoint, state = found
    other = other_settings(state.settings, fixed_settings(config))
    if other:
        raise RunDirectoryError(
            f"{run.path} was begun with another loop ({', '.join(other[:4])}): name another run, or"
            " continue it with what it began"
        )
    write_whole(run.config, dump_config(config))
    write_json(run.plan, plan)
    keeper = Keeper(run, config, plan)
    keeper.metrics.restore(state.position.epoch)
    keeper.best = state.best_value
    keeper.started -= state.seconds
    return keeper, run.checkpoints / checkpoint.name


def spread_checkpoint(
    ranks: Ranks, checkpoint: Path | None
) -> tuple[TrainState, dict[str, Any], OptimizerState] | None:
    """The first rank's checkpoint on every rank, which need share no files; None: there is none."""
    name = ranks.spread_bytes(checkpoint.name.encode() if checkpoint else b"").decode()
    if not name:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / name
        copy.mkdir()
        for file in (*FILES, "state.json"):
            content = (checkpoint / file).read_bytes() if checkpoint else b""
            (copy / file).write_bytes(ranks.spread_bytes(content))
        return Checkpoints(Path(folder), KEPT).load(copy)


def random_state() -> dict[str, Any]:
    """Of this process, as JSON can hold it."""
    version, numbers, rest = random.getstate()
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(numbers), rest],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """As `random_state` found it."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, numbers, rest = state["python"]
    random.setstate((version, tuple(numbers), rest))


_OWN_SHAPE = {
    "others": [dict],
    "generators": [[int]],
    "random": [{"torch": [int], "python": list}],
    "shares": [float],
}


def own_state(found: Any, others: int, generators: int) -> dict[str, Any]:
    """What a checkpoint holds of a loop beside models and optimizers, if it is of such a loop."""
    with of_this_loop():
        own: dict[str, Any] = checked(found, _OWN_SHAPE, "its own state")
        for name, count in (("others", others), ("generators", generators)):
            if len(own[name]) != count:
                kind = "schedulers and the like" if name == "others" else "generators of loaders"
                raise ValueError(f"it has {len(own[name])} {kind}, the loop {count}")
        if any(share < 0 for share in own["shares"]) or not sum(own["shares"]) > 0:
            raise ValueError("its shares are no shares")
    return own


@contextlib.contextmanager
def of_this_loop() -> Iterator[None]:
    """A checkpoint that does not fit is the user's to know, in a sentence."""
    try:
        yield
    except PacelineError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        why = shortened(" ".join(str(error).split()))
        raise RunDirectoryError(
            f"the checkpoint is of another loop ({why}): name another run, or continue it with the"
            " loaders, schedulers and models that it began with"
        ) from error


def model_state(models: Sequence[nn.Module], more: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Of all models; one alone keeps the names of its parameters."""
    found: dict[str, Any] = dict(more)
    for number, model in enumerate(models):
        before = f"{number}." if len(models) > 1 else ""
        found |= {f"{before}{name}": value for name, value in model.state_dict().items()}
    return found


def load_models(
    models: Sequence[nn.Module], more: Mapping[str, torch.Tensor], state: dict[str, Any]
) -> None:
    """What `model_state` gave."""
    rest = dict(state)
    for name, parameter in more.items():
        with of_this_loop():
            parameter.detach().copy_(rest.pop(name))
    for number, model in enumerate(models):
        before = f"{number}." if len(models) > 1 else ""
        own = {
            name.removeprefix(before): value
            for name, value in rest.items()
            if name.startswith(before)
        }
        try:
            model.load_state_dict(own)
        except RuntimeError as error:
            raise RunDirectoryError(
                f"the checkpoint is of another model ({' '.join(str(error).split())}): name another"
                " run, or continue it with the model that it began with"
            ) from None


def optimizer_states(optimizers: Sequence[OwnOptimizer]) -> OptimizerState:
    """Of all optimizers, by number and parameter."""
    return {
        f"{number}:{name}": entries
        for number, optimizer in enumerate(optimizers)
        for name, entries in optimizer.read().items()
    }


def load_optimizers(optimizers: Sequence[OwnOptimizer], state: OptimizerState) -> None:
    """What `optimizer_states` gave."""
    for number, optimizer in enumerate(optimizers):
        before = f"{number}:"
        with of_this_loop():
            optimizer.write(
                {k.removeprefix(before): v for k, v in state.items() if k.startswith(before)}
            )
