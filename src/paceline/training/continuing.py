"""What a training is between two updates: saved, handed over to another leg, and taken over."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import local
from paceline.exchange.network import Traffic
from paceline.local.base import OptimizerState
from paceline.local.state import unsaved_sentence
from paceline.local.steps import Sums
from paceline.models.extra_state import check_extra_state, has_extra_state
from paceline.observe.metrics import MetricsFile, Tally, saved_sums
from paceline.observe.recorder import Recorder
from paceline.observe.tensorboard import TensorBoardFile
from paceline.schema.checkpoint import check_continued, fixed_settings, planned_updates
from paceline.schema.codec import encode
from paceline.schema.requests import CHECKPOINT
from paceline.signals import StopSignals
from paceline.training.assemble import (
    Task,
    beginning_of,
    make_feed,
    make_job,
    make_whole,
    whole_optimizer_state,
)
from paceline.training.carried import Carried
from paceline.training.checkpoint import Checkpoints, Position, TrainState, check_model
from paceline.training.evaluate import existing, has_classes
from paceline.training.goal import Goal, LossWatch
from paceline.training.handover import Handover
from paceline.training.parts import Parts
from paceline.training.schedules import OwnSchedule
from paceline.training.serving import make_team
from paceline.training.team import added_up, agreed_names

LOOK_SECONDS = 0.5
"""How often the first rank looks whether a checkpoint was asked for."""
MOST_SAVING = 0.05
"""Of the time, for checkpoints that only the clock asks for."""
BEGAN = time.time()
"""When this process did, for a run that has no checkpoint yet."""


class EpochLog:
    """Where the line of every epoch goes: the view, metrics.jsonl and TensorBoard's files.

    The first rank shows and writes; the others only remember.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._writes = task.context.is_first
        self._metrics = MetricsFile(task.run.metrics)
        self._tensorboard: TensorBoardFile | None = None
        if task.config.observe.tensorboard and self._writes:
            self._tensorboard = TensorBoardFile(task.run.path / "tensorboard", say=task.view.say)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of every epoch so far."""
        return self._metrics.lines

    def restore(self, epochs: int) -> None:
        """Keep what a resumed run had written about its first `epochs` epochs."""
        self._metrics.restore(epochs)
        lost = set(range(1, epochs + 1)) - {line["epoch"] for line in self.lines}
        if lost:
            self._task.view.say(
                f"warning: {self._task.run.metrics} has lost its lines on"
                f" {len(lost)} of {epochs} epochs: what they said is missing from the summary"
            )

    def add(self, line: dict[str, Any]) -> None:
        """One more; what a full disk refuses is said and written with the next one."""
        if not self._writes:
            self.lines.append(line)
            return
        task = self._task
        task.view.end_epoch(line, task.config.train.epochs)
        if self._tensorboard is not None:
            self._tensorboard.add_epoch(line)
        try:
            self._metrics.append(line)
        except OSError as error:
            task.view.say(f"warning: {task.run.metrics} cannot be written: {error.strerror}")


@dataclass(frozen=True, kw_only=True)
class _Interrupted:
    """What was there before something that other nodes may break off."""

    position: Position
    tally: Tally
    goals: tuple[Goal, Goal]
    buffers: list[torch.Tensor]
    steps_begun: int
    ends_epoch: bool


class Continuing:
    """The state of one training on one rank, and its way through legs and checkpoints."""

    def __init__(self, task: Task, parts: Parts, recorder: Recorder, *, started: float) -> None:
        self.task, self.config, self.view = task, task.config, task.view
        self.recorder = recorder
        self.team = make_team(task)
        self.job = dataclasses.replace(make_job(task, parts), span=recorder.span)
        self.dataset = parts.dataset
        self.strategy = local.build(self.job)
        self.carried = Carried(self.strategy.model, self.job.build_model)
        check_extra_state(self.strategy.model)
        self.trained = {
            name: parameter.requires_grad
            for name, parameter in self.strategy.model.named_parameters()
        }
        """Whether each parameter takes part in updates, as the model said when training began."""
        self.shares = [node.share for node in task.plan.nodes]
        self.feed = make_feed(task, parts, self.strategy)
        self.checkpoints = Checkpoints(task.run.checkpoints, self.config.train.keep)
        self.epochs = EpochLog(task)
        self.signals = StopSignals(self.team.request_stop)
        self.position = Position()
        self.tally = Tally()
        self.traffic = Traffic()
        self.goal = self.kept_goal = Goal(self.config.train.until, self.config.train.monitor)
        self.saved_at = -1
        self.save_seconds = 0.0
        """What the last checkpoint took to write."""
        self.unsaved = ""
        self.resumed: OptimizerState = {}
        """What the optimizer goes on from, until training begins."""
        self.losses = LossWatch()
        self.started = started
        check_model(self.strategy.model)
        self.schedule: OwnSchedule | None = None
        if parts.scheduler is not None:
            weights = list(self.strategy.model.parameters())
            self.schedule = OwnSchedule(parts.scheduler, parts.build_optimizer, weights)
        self.until: int | None = None
        """The update at which the current leg ends, if that is before the training does."""
        self.patience: float | None = None
        """Seconds after which the current leg ends before its time."""
        self.is_wanted = False
        """The current leg ends soon, at the wish of who leads the training."""
        self.looked_at = 0.0
        """When RUN/requests was last looked at (monotonic)."""
        self.times: list[float] = []
        """Seconds of each update of the current leg."""
        self.last_update = time.perf_counter()
        """When the last update had ended."""
        self.interrupted: _Interrupted | None = None
        """An update, or the end of an epoch, that is under way."""
        self.unclosed = False
        """The epoch's last update is done, but its end was interrupted in another leg."""

    @property
    def updates(self) -> int:
        return planned_updates(self.config.train, self.feed.sampler.steps_per_epoch)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.position.update >= self.updates or self.goal.reached() is not None

    def count_exchange(self, update: int | None = None) -> None:
        """Keep what went between nodes since the last call: for an update, or for none."""
        if self.task.network is not None:
            taken = self.task.network.take()
            self.traffic.add(taken)
            self.recorder.exchanged(update, taken)

    def checkpoint_due(self) -> bool:
        """Whether all ranks save after this update: by the settings, or since it was asked for."""
        update, every = self.position.update, self.config.train.checkpoint_every
        if self.team.is_first and not self.task.rehearsal:
            now = time.monotonic()
            if now - self.looked_at >= LOOK_SECONDS:
                self.looked_at = now
                if (self.task.run.requests / CHECKPOINT).exists() or self._much_to_lose():
                    self.team.request_save(update)
        return self.team.save_at == update or (every is not None and update % every == 0)

    def _much_to_lose(self) -> bool:
        """Whether other nodes could now take more with them than may be lost."""
        if self.task.context.nodes == 1 and not self.task.in_legs:
            return False
        try:
            saved = (self.checkpoints.folder / "latest").lstat().st_mtime
        except OSError:
            saved = BEGAN
        # A clock that was put back must not keep us from saving.
        age = abs(time.time() - max(saved, BEGAN))
        least = self.save_seconds / MOST_SAVING
        return age >= max(self.config.train.checkpoint_seconds, least)

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint; one that cannot be written ends the training and costs no older one.

        Going on would train for hours towards something that may never be saved.
        """
        if self.task.rehearsal:
            return
        with self.recorder.span("checkpoint"):
            self._save(best=best)
        self.count_exchange()

    def _save(self, *, best: bool) -> None:
        self.team.enter("checkpoint", self.position.update)
        found = self.hand_over()
        if self.team.is_first and self.position.update != self.saved_at:
            began = time.perf_counter()
            self.checkpoints.save(found.state, found.model, found.optimizer, best=best)
            self.save_seconds = time.perf_counter() - began
            self.saved_at = self.position.update
            with contextlib.suppress(OSError):
                (self.task.run.requests / CHECKPOINT).unlink(missing_ok=True)
            self.say_unsaved(found.optimizer)
        self.team.barrier("checkpoint")

    def hand_over(self) -> Handover:
        """The state between two updates, whole on the first rank; every rank calls it."""
        make_whole(self.task, self.team, self.job, self.strategy)
        optimizer = whole_optimizer_state(self.job, self.strategy, first=self.team.is_first)
        tally = self.tally.saved()
        sums = self.team.sum([tally["loss_sum"], tally["correct"], tally["samples"]], "checkpoint")
        tally |= dict(zip(("loss_sum", "correct", "samples"), sums, strict=True))
        tally["weight"], reported = self.reported(sums[2])
        tally |= saved_sums(reported)
        return self._handed_over(tally, optimizer)

    def _handed_over(self, tally: dict[str, Any], optimizer: OptimizerState) -> Handover:
        state = TrainState(
            position=self.position,
            updates=self.updates,
            lengths=dict(self.config.train.lengths),
            batch_size=self.feed.sampler.batch_size,
            samples=self.feed.sampler.samples,
            tally={name: value for name, value in tally.items() if existing(value) is not None},
            seconds=time.perf_counter() - self.started,
            best_accuracy=self.kept_goal.best_accuracy,
            best_loss=self.kept_goal.best_loss,
            best_value=self.kept_goal.best_value,
            since_best=self.kept_goal.since_best,
            settings=fixed_settings(self.config),
            plan=encode(self.task.plan),
            signature=self.dataset.signature,
        )
        return Handover(
            state=state,
            model=self.strategy.model.state_dict(),
            optimizer=optimizer | self.carried.read(),
            durations=tuple(self.tally.durations),
            saved_at=self.saved_at,
        )

    def begin_interruptible(self, *, ends_epoch: bool = False) -> None:
        """Before what other nodes may break off: keep what it changes before it is done."""
        if self.task.in_legs and self.task.context.nodes > 1:
            self.interrupted = _Interrupted(
                position=self.position,
                tally=copy.deepcopy(self.tally) if ends_epoch else self.tally,
                goals=(copy.copy(self.goal), copy.copy(self.kept_goal)),
                buffers=[buffer.clone() for buffer in self.strategy.model.buffers()],
                steps_begun=getattr(self.strategy, "steps_begun", -1),
                ends_epoch=ends_epoch,
            )

    def end_interruptible(self) -> None:
        """What was begun is done."""
        self.interrupted, self.last_update = None, time.perf_counter()

    def salvage(self) -> Handover | None:
        """The state before an update that was broken off; None where it is not all here.

        Asks no other node. The results of samples that lost nodes have computed since the leg
        began are in no sum of this node: the epoch's loss is a mean over those of the others.
        """
        before = self.interrupted
        torn = before is not None and before.steps_begun != getattr(
            self.strategy, "steps_begun", -1
        )
        lost = has_extra_state(self.strategy.model) or self.carried.has_attributes
        if self.job.partition is not None or torn or lost:
            return None
        if before is not None:
            self.position, self.tally = before.position, before.tally
            self.goal, self.kept_goal = before.goals
            with torch.no_grad():
                for buffer, old in zip(self.strategy.model.buffers(), before.buffers, strict=True):
                    buffer.copy_(old)
        tally = self.tally.saved()
        tally |= saved_sums(self.tally.sums)
        found = self._handed_over(tally, self.strategy.optimizer_state())
        return dataclasses.replace(found, unclosed=before is not None and before.ends_epoch)

    def reported(self, samples: float) -> tuple[float, Sums]:
        """Of this epoch and all ranks: by what the loss is a mean, and what else is reported.

        `samples`: of all ranks. Every rank calls it.
        """
        step, tally = self.job.step, self.tally
        names = agreed_names(self.team, step, tally.sums)
        sums = added_up(self.team, names, tally.sums, "metrics") if self.team.adds_up else {}
        if not step.weighs or not self.team.adds_up:
            return samples, sums
        return self.team.sum([tally.weight], "metrics")[0], sums

    def say_unsaved(self, optimizer: OptimizerState) -> None:
        """Say once what of an optimizer of the user's own no checkpoint holds."""
        if (sentence := unsaved_sentence(optimizer)) and sentence != self.unsaved:
            self.unsaved = sentence
            self.view.say(f"warning: {sentence}")

    def check_goal(self) -> None:
        """Refuse `train.until.accuracy` without classes before anything is trained."""
        # Layers that are split over nodes compute only together: there the first evaluation tells.
        if self.config.train.until.accuracy is not None and self.job.partition is None:
            with self.carried.set_aside():
                classes = has_classes(self.strategy, self.job, self.dataset.test)
            self.goal.check(classes=classes)

    def begin(self) -> None:
        """Meet the other nodes; one that joins a training goes on where that is."""
        if self.job.exchange is None:
            return
        beginning = beginning_of(self.strategy, self.position.update, self.resumed)
        update = self.job.exchange.start(beginning)
        self.resumed = {}
        if update != self.position.update:
            epoch, step = divmod(update, self.feed.sampler.steps_per_epoch)
            self.position = Position(epoch=epoch, step=step, update=update)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        newest = self.task.checkpoint
        if newest is None:
            self.strategy.spread_buffers()
            return
        saved = self.saved(newest)
        self.take_over(saved)
        self.resumed = saved.optimizer
        if self.team.is_first:
            self.welcome_back(saved)

    def saved(self, checkpoint: Path) -> Handover:
        """What a checkpoint of this training holds; the training's clock goes on from there."""
        found = Handover.of(self.checkpoints, checkpoint)
        check_continued(checkpoint, found.state, self.config, sampler=self.feed.sampler)
        self.started -= found.state.seconds
        return found

    def take_over(self, handover: Handover) -> None:
        """Go on where another leg, or a checkpoint, has left off; every rank calls it."""
        state = handover.state
        self.strategy.load_weights(handover.model)
        self.strategy.spread_buffers()  # also those that no checkpoint has
        self.strategy.load_optimizer_state(handover.optimizer)
        self.carried.write(handover.optimizer, self.strategy.copies)
        self.position, self.saved_at = state.position, handover.saved_at
        self.unclosed = handover.unclosed
        self.goal.best_accuracy, self.goal.best_loss = state.best_accuracy, state.best_loss
        self.goal.best_value, self.goal.since_best = state.best_value, state.since_best
        if self.team.is_first:
            self.tally = Tally.restored(state.tally)
            self.tally.durations = list(handover.durations)
            # The line of an epoch that ended halfway stays where there is nothing more to train.
            halfway = state.position.step > 0 and state.position.update >= self.updates
            self.epochs.restore(state.position.epoch + halfway)

    def welcome_back(self, saved: Handover) -> None:
        """Say what is continued, and what of it no checkpoint held."""
        self.say_unsaved(saved.optimizer)
        update, path = self.position.update, self.task.run.path
        if self.is_finished:
            text = f"{path} is finished after {update} updates: there is nothing left to train"
        else:
            text = f"continuing {path} from update {update} (epoch {self.position.epoch + 1})"
        self.view.say(text)
