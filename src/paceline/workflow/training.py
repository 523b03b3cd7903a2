"""The chain of stages of one training: on this machine in legs or by a plan, or on hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import ConfigError, RunDirectoryError, UserError, is_of_users_code, shown
from paceline.plan import asked_node, asked_plan, refuse_foreign_options
from paceline.run import RunDirectory, write_whole
from paceline.schema import Config, Plan, write_json
from paceline.schema.checkpoint import newest_good
from paceline.schema.plain import read_json_file
from paceline.schema.requests import CHECKPOINT, SETTINGS, STOP, TAKES, wished_settings

if TYPE_CHECKING:
    from paceline.schema.hosts import Host, Hosts
    from paceline.schema.legs import Broken, Leg
    from paceline.serve.answers import Guess
    from paceline.training.given import Given


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` gives back."""

    run: Path
    """The run directory."""
    summary: dict[str, Any]
    """What run.json holds: loss, accuracy where there are classes, seconds, images per second."""
    exit_code: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings with which it was asked to go on, where it was stopped for that."""
    factory: Callable[..., Any] | None = field(default=None, repr=False)
    """What makes the model, where it came as an object."""
    given: Given | None = field(default=None, repr=False)
    """Everything that came as an object."""

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last epoch, 0 to 1; None where there are no classes."""
        return self.summary.get("test_accuracy")

    def load_model(self, model: Any) -> Any:
        """Put the trained weights into `model` (a module of the same kind) and return it."""
        from paceline.models.extra_state import load_model

        model.load_state_dict(load_model(self.run / "checkpoints" / "latest" / "model.safetensors"))
        return model

    def model(self, weights: Literal["best", "latest"] = "best") -> Any:
        """A new model with the best or the latest weights of the run, in evaluation mode.

        >>> result.model("best")(inputs)                                     # doctest: +SKIP
        """
        from paceline.serve.trained import open_trained

        return open_trained(self.run, weights=weights, factory=self.factory).model

    def predict(self, inputs: Any) -> list[list[Guess]]:
        """The five likeliest classes of each input, by the best weights of the run.

        `inputs`: paths of pictures, or numbers as the model takes them (a tensor, an array).

        >>> result.predict(["seven.png"])[0][0].label                        # doctest: +SKIP
        '7'
        """
        from paceline.serve.trained import open_trained, predict_any

        return predict_any(open_trained(self.run, factory=self.factory), inputs)


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """How a training is begun."""

    config: Config
    run: RunDirectory
    plan: Plan | None = None
    fixed: bool = False
    """The plan was asked for by name: nothing else is tried."""
    given: Given | None = None
    silent: bool = False
    again: bool = False
    """Forget what past trainings have taught."""
    say: Callable[[str], None] = print
    show: Callable[[str], None] = print
    """Where the lines that ranks of other hosts print go."""
    hosts: HostsRequest | None = None
    """Where to train, if not on this machine alone."""
    verbose: bool = False
    """Tell of every leg."""
    script: Sequence[Leg] = ()
    """The legs of a run that is repeated."""
    changeable: bool = False
    """Whoever started it goes on with settings that are changed on the way (`Result.changes`)."""
    began: float = field(default_factory=time.perf_counter)
    """When the training was asked for."""
    broken: Broken | None = None
    """Why its nodes are started again, if they are."""
    unheard: tuple[Host, ...] = ()
    """Hosts that were silent then: they are not asked before the others train."""


@dataclass(frozen=True, kw_only=True)
class HostsRequest:
    """Which machines train, and who starts them."""

    hosts: Hosts
    engine: str = "auto"
    """A name of `launch.engines`, with an option as in "torchrun:c10d"."""
    options: tuple[str, ...] = ()
    """For sbatch or srun; of a cluster, its address."""
    nodes: int | None = None
    """Of a cluster, which names the hosts itself: how many; all when left out."""


def run_training(start: TrainingStart) -> Result:
    """Plan if needed, launch, train, and return what came of it."""
    try:
        takes = (STOP, CHECKPOINT, *((SETTINGS,) if start.changeable else ()))
        _say_without_effect(start)
        with start.run.explained(), taking_requests(start.run, takes, start.say) as requests:
            result = _run_training(_with_objects(start))
        # A training that came to its end before it heard of a wish is finished all the same.
        if requests is None or not requests.changes or not result.exit_code:
            return result
        return dataclasses.replace(result, changes=requests.changes)
    except BaseException as error:
        if isinstance(error, UserError | KeyboardInterrupt) or is_of_users_code(error):
            start.run.discard()  # unless something was trained
        raise
    finally:
        start.run.unlock()


def _say_without_effect(start: TrainingStart) -> None:
    """Of settings that nobody will read."""
    if start.given is None and ":" not in start.config.optimizer.name:
        return
    from paceline.training.optimizers import without_effect
    from paceline.training.parts import own_optimizer

    optimizer = start.config.optimizer
    for sentence in without_effect(optimizer, own_optimizer(start.config, start.given)):
        start.say(f"note: {sentence}")


def _with_objects(start: TrainingStart) -> TrainingStart:
    """With data of the caller's own opened; what would leave objects behind is refused."""
    from paceline.training.given import refuse_other_hosts, with_open_data

    if start.given is None:
        return start
    if start.hosts is not None:
        refuse_other_hosts(start.config, start.given)
    from paceline.training.parts import data_request

    given = with_open_data(start.given, start.config, data_request(start.config, start.given))
    return dataclasses.replace(start, given=given)


def _run_training(start: TrainingStart) -> Result:
    from paceline.hardware.instructions import use_safe_instructions

    config, run = start.config, start.run
    if start.hosts is None and start.plan is not None and len(start.plan.nodes) > 1:
        start = _on_this_machine(start, start.plan)
    plans = [leg.plan for leg in start.script] + ([start.plan] if start.plan else [])
    rounds = any(plan.precision == "bf16" for plan in plans)
    if note := use_safe_instructions(config, all_numerics=rounds):
        start.say(note)
    if start.hosts is None and (start.script or _finds_out(start)):
        for leg in start.script:
            _refuse_other_nodes(leg.plan)
        return _train_in_legs(start)
    earlier = earlier_seconds(run)
    if start.hosts is not None:
        from paceline.workflow.spread import train_on_hosts

        code = train_on_hosts(start)
        result = Result(run=run.path, summary=summary_of(run), exit_code=code)
    else:
        result = _train_by(start, start.plan if start.plan is not None else _asked_plan(start))
    return counted_from_enter(start, result, earlier=earlier)


def _on_this_machine(start: TrainingStart, plan: Plan) -> TrainingStart:
    """A run of several nodes that goes on on one machine is planned anew."""
    if start.fixed or start.run.is_new:
        return start
    start.say(
        f"the run was trained by {len(plan.nodes)} nodes: it goes on with a new plan for this"
        " machine alone; name hosts with --hosts to use them"
    )
    return dataclasses.replace(start, plan=None)


def earlier_seconds(run: RunDirectory) -> float:
    """What a training that is continued has taken so far."""
    newest = newest_good(run.checkpoints, lambda text: None)
    return newest[1].seconds if newest else 0.0


def counted_from_enter(start: TrainingStart, result: Result, *, earlier: float) -> Result:
    """With a total that has everything since the training was asked for, and what went before."""
    if "total_seconds" not in result.summary:
        return result
    total = earlier + time.perf_counter() - start.began
    summary = {**result.summary, "total_seconds": max(total, result.summary["total_seconds"])}
    with contextlib.suppress(OSError):  # the ranks' own figure stays, which begins later
        write_json(start.run.summary, summary)
    return dataclasses.replace(result, summary=summary)


def _finds_out(start: TrainingStart) -> bool:
    """Whether the training finds its fastest way while it trains, or has until it was left."""
    if start.config.local.strategy != "auto":
        return False
    return start.plan is None or (start.run.legs.exists() and not start.fixed)


def _train_in_legs(start: TrainingStart) -> Result:
    from paceline.workflow.alone import train_alone

    refuse_foreign_options(start.config.local)
    outcome = train_alone(start)
    return Result(run=start.run.path, summary=outcome.summary, exit_code=outcome.exit_code)


def summary_of(run: RunDirectory) -> dict[str, Any]:
    """What run.json holds; empty before the end of a training."""
    if not run.summary.exists():
        return {}
    try:
        found = read_json_file(run.summary)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{run.summary} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{run.summary} is {shown(found)}, not a table of keys")
    return found


def _asked_plan(start: TrainingStart) -> Plan:
    """The plan that the configuration names."""
    from paceline.local.cores import usable_cores

    own = start.given is not None and start.given.optimizer is not None
    elementwise = not own and ":" not in start.config.optimizer.name
    node = asked_node(start.config.local, usable_cores(), elementwise=elementwise)
    return asked_plan(start.config, node, f"local.strategy = {node.strategy!r} was asked for")


def _refuse_other_nodes(plan: Plan) -> None:
    if len(plan.nodes) > 1:
        raise UserError(
            f"the plan has {len(plan.nodes)} nodes, but only this machine was given: name the hosts"
            " with --hosts, or leave the plan out to make a new one"
        )


def _train_by(start: TrainingStart, plan: Plan) -> Result:
    """By this plan and no other: it is proved, and trains or is refused."""
    run = start.run
    _refuse_other_nodes(plan)
    write_json(run.plan, plan)
    node = plan.nodes[0]
    if not node.shares_memory:
        from paceline.training.assemble import Task
        from paceline.training.loop import train
        from paceline.training.progress import make_view

        task = Task(
            config=start.config,
            plan=plan,
            run=run,
            given=start.given,
            view=make_view(silent=start.silent, unit=start.config.workload.unit),
        )
        outcome = train(task)
        return Result(run=run.path, summary=outcome.summary, exit_code=outcome.exit_code)
    from paceline.launch.local import run_ranks
    from paceline.training.given import parcel_of

    code = run_ranks(
        RunDirectory(run.path.resolve()),
        node,
        silent=start.silent,
        objects=parcel_of(start.given),
    )
    return Result(run=run.path, summary=summary_of(run), exit_code=code)


LOOK_SECONDS = 0.5


class Requests:
    """Looks for wishes from a thread of its own, and stops the training as Ctrl-C would."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.changes: dict[str, Any] = {}
        """Settings with which the training is to go on after it has stopped."""
        self._run, self._say = run, say
        self._closing = threading.Event()
        self._asked = False
        self._thread = threading.Thread(target=self._work, name="paceline-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            # Before the loop listens to signals, one would end the process as it stands.
            if self._asked or not callable(signal.getsignal(signal.SIGTERM)):
                continue
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        folder = self._run.requests
        if (folder / STOP).exists():
            self._say("asked to stop: saving")
            self._stop()
        elif (folder / "settings.json").exists():
            try:
                self.changes = wished_settings(self._run)
            except ConfigError as error:
                self._say(f"warning: {error}")
                (folder / "settings.json").unlink(missing_ok=True)
                return
            self._say(f"asked to change {shown_settings(self.changes)}: saving and going on")
            self._stop()

    def _stop(self) -> None:
        self._asked = True
        os.kill(os.getpid(), signal.SIGTERM)


def shown_settings(settings: dict[str, Any]) -> str:
    """Settings as they are written on a line."""
    return ", ".join(f"{key} = {'none' if v is None else v}" for key, v in settings.items())


@contextlib.contextmanager
def taking_requests(
    run: RunDirectory, takes: Sequence[str], say: Callable[[str], None]
) -> Iterator[Requests | None]:
    """Take wishes while inside; those of an earlier training are forgotten."""
    shutil.rmtree(run.requests, ignore_errors=True)
    if threading.current_thread() is not threading.main_thread() or not takes:
        yield None  # only the main thread hears signals
        return
    try:
        run.requests.mkdir()
        write_whole(run.requests / TAKES, json.dumps(list(takes)))
    except OSError:
        yield None  # a disk that takes no wishes is no reason not to train
        return
    found = Requests(run, say)
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(run.requests, ignore_errors=True)
