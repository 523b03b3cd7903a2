"""The training loop. One rank and many ranks run the same lines."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from paceline import local
from paceline.data.feed import Batch
from paceline.errors import DivergedError, RunDirectoryError, StorageError
from paceline.exchange.network import Traffic
from paceline.local.memory import keep_freed_memory
from paceline.observe.metrics import Tally, exchange_counts, exchange_line, totals
from paceline.observe.recorder import Recorder
from paceline.schema import write_json
from paceline.train.assemble import (
    Task,
    loss_total,
    make_feed,
    make_job,
    make_whole,
    whole_optimizer_state,
)
from paceline.train.checkpoint import Checkpoints, Position, TrainState
from paceline.train.comparison import comparison, node_memory_mb
from paceline.train.device import use_deterministic
from paceline.train.epoch_log import EpochLog
from paceline.train.evaluate import evaluate
from paceline.train.goal import Goal, LossWatch
from paceline.train.optimizers import batch_factor, schedule_factor
from paceline.train.parts import Parts, make_parts
from paceline.train.proof import prove
from paceline.train.serving import make_team
from paceline.train.shares import describe_shares, rebalanced, worker_shares
from paceline.train.signals import StopSignals
from paceline.train.watching import observed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training came to."""

    summary: dict[str, Any]
    exit_code: int = 0


def train(task: Task) -> Outcome:
    """Train as the plan says, from the newest checkpoint of the run if there is one."""
    keep_freed_memory()
    with observed(task) as recorder:
        return _train(task, recorder)


def _train(task: Task, recorder: Recorder) -> Outcome:
    start = time.perf_counter()
    use_deterministic(task.config.train.deterministic)
    parts = make_parts(task.config, task.given)
    opened = time.perf_counter() - start
    try:
        prove(task, parts, recorder)
    except BaseException:
        task.view.close()
        if task.given is None or task.given.data is None:  # else the next plan trains on it
            parts.dataset.close()
        raise
    trainer = Trainer(task, parts, recorder, started=start)
    try:
        trainer.resume()
        trainer.begin()
        recorder.ready()
        with trainer.signals.installed():
            trainer.run()
        return trainer.finish(open_seconds=opened)
    finally:
        task.view.close()
        trainer.strategy.close()
        if trainer.job.exchange is not None:
            trainer.job.exchange.close()
        parts.dataset.close()


class Trainer:
    """The state of one training on one rank, and the steps it is made of."""

    def __init__(self, task: Task, parts: Parts, recorder: Recorder, *, started: float) -> None:
        self.task, self.config, self.view = task, task.config, task.view
        self.recorder = recorder
        self.team = make_team(task)
        self.job = dataclasses.replace(make_job(task, parts), span=recorder.span)
        self.dataset = parts.dataset
        self.strategy = local.build(self.job)
        self.shares = [node.share for node in task.plan.nodes]
        self.feed = make_feed(task, parts, self.strategy)
        self.checkpoints = Checkpoints(task.run.checkpoints, self.config.train.keep)
        self.epochs = EpochLog(task)
        self.signals = StopSignals(self.team.request_stop)
        self.position = Position()
        self.tally = Tally()
        self.traffic = Traffic()
        self.goal = Goal(self.config.train.until)
        self.saved_at = -1
        self.losses = LossWatch()
        self.started = started

    @property
    def updates(self) -> int:
        """Updates of the whole training."""
        planned = self.config.train.epochs * self.feed.sampler.steps_per_epoch
        return min(planned, self.config.train.steps or planned)

    @property
    def rate_factor(self) -> float:
        """The current learning rate, relative to the one that was asked for."""
        settings = self.config.optimizer
        return batch_factor(settings, self.feed.sampler.batch_size) * schedule_factor(
            settings, update=self.position.update, updates=self.updates
        )

    def run(self) -> None:
        """All epochs that are left."""
        self.count_exchange()  # what went into start-up
        while self.position.update < self.updates:
            if reached := self.goal.reached():
                self.view.say(reached)
                return
            finished = self.run_epoch()
            if not finished:
                self.save()
                return

    def run_epoch(self) -> bool:
        """The rest of the current epoch; False when a signal ended it."""
        epoch, steps = self.position.epoch, self.feed.sampler.steps_per_epoch
        self.view.start_epoch(epoch + 1, self.config.train.epochs, steps, self.position.step)
        # Closed even when an update fails: the thread that reads ahead must not outlive it.
        with contextlib.closing(self.feed.epoch(epoch, self.position.step)) as batches:
            clock = time.perf_counter()
            for batch in batches:
                if self.team.is_behind(self.position.update):
                    self.leave_out(batch)
                else:
                    self.run_update(batch)
                now = time.perf_counter()
                self.tally.seconds += now - clock
                self.tally.durations.append(now - clock)
                clock = now
                if self.position.update >= self.updates or self.position.step == steps:
                    break
                if self.team.should_stop(self.position.update):
                    return False
                if self.checkpoint_due():
                    self.save()
                    clock = time.perf_counter()
        self.end_epoch()
        return not self.team.should_stop(self.position.update)

    def run_update(self, batch: Batch) -> None:
        """One update from one batch."""
        update, recorder = self.position.update, self.recorder
        self.team.enter("update", update)
        recorder.update = update
        recorder.add("read", time.perf_counter() - batch.wait_seconds, batch.wait_seconds)
        self.strategy.scale_rate(self.rate_factor)
        total = loss_total(self.task.plan, batch, self.shares, self.task.context.node)
        if self.job.exchange is not None:
            self.job.exchange.before_update(total)
            self.job.exchange.begin(
                update=update, rate=self.rate_factor, samples=len(batch.targets), total=batch.total
            )
        start, waited = time.perf_counter(), self.team.waited
        with recorder.span("compute"):
            result = self.strategy.update(batch.inputs, batch.targets, total, update)
        self.team.note_busy(time.perf_counter() - start - (self.team.waited - waited))
        self.count_exchange(update)
        self.team.note(result.loss_sum, result.correct, result.samples)
        self.tally.add(loss_sum=result.loss_sum, correct=result.correct, samples=result.samples)
        self.tally.read_seconds += batch.wait_seconds
        loss = result.loss_sum / result.samples if result.samples else None
        if loss is not None and self.losses.has_diverged(loss):
            raise DivergedError(self.describe_divergence(loss))
        self.position = self.position.after_update()
        slowest = self.team.slowest
        host = "" if slowest is None else self.task.plan.nodes[slowest].host
        self.view.advance(images=batch.total, loss=loss, slowest=host)
        self.say_news()

    def count_exchange(self, update: int | None = None) -> None:
        """Keep what went between nodes since the last call: for an update, or for none."""
        if self.task.network is not None:
            taken = self.task.network.take()
            self.traffic.add(taken)
            self.recorder.exchanged(update, taken)

    def say_news(self) -> None:
        """Tell the user about nodes that came and went."""
        for line in self.team.news():
            self.view.say(line)

    def leave_out(self, batch: Batch) -> None:
        """Go past an update that the others have done without this node."""
        update = self.position.update
        self.team.enter("left out", update)
        self.position = self.position.after_update()
        self.view.advance(images=batch.total, loss=None)

    def describe_divergence(self, loss: float) -> str:
        """What happened, what may help, and what is left."""
        rate = self.config.optimizer.learning_rate * self.rate_factor
        newest = self.checkpoints.newest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        return (
            f"the loss became {loss:g} at update {self.position.update + 1} (epoch"
            f" {self.position.epoch + 1}, learning rate {rate:g}): lower optimizer.learning_rate,"
            f" raise optimizer.warmup, or set optimizer.clip_norm; {kept}"
        )

    def end_epoch(self) -> None:
        """Evaluate, write the epoch's line, save."""
        if self.position.update >= self.updates:
            self.tally.seconds += self.team.wait_for_all()
            self.say_news()
        loss_sum, correct, samples = self.team.sum(
            [self.tally.loss_sum, self.tally.correct, self.tally.samples], "epoch"
        )
        epoch = self.position.epoch + 1
        last = self.position.update >= self.updates
        score = None
        if self.team.evaluates and (last or epoch % self.config.train.evaluate_every == 0):
            self.team.enter("evaluate", self.position.update)
            with self.recorder.span("evaluate"):
                make_whole(self.task, self.team, self.job, self.strategy)
                shares = self.team.evaluation_shares(
                    worker_shares(self.task.plan, self.shares, by_rank=True)
                )
                score = evaluate(self.strategy, self.job, self.dataset.test, self.team, shares)
        line = {
            "epoch": epoch,
            "train_loss": loss_sum / samples,
            "train_accuracy": correct / samples,
            "test_loss": score.loss if score else None,
            "test_accuracy": score.accuracy if score else None,
            "test_top5": score.top5 if score else None,
            "images_per_second": samples / self.tally.seconds,
            **self.tally.times(),
            "bytes_sent": 0,
            "memory_mb": node_memory_mb(self.task.board),
        }
        if self.task.context.nodes > 1:
            line |= self.balance() | self.team.epoch_line()
        improved = self.goal.note(score)
        self.epochs.add(line)
        self.position = dataclasses.replace(self.position, epoch=epoch, step=0)
        self.tally, self.traffic = Tally(), Traffic()
        self.save(best=improved)

    def balance(self) -> dict[str, Any]:
        """What the epoch cost between nodes; shares follow the speeds that were measured."""
        self.count_exchange()
        traffic, leads = self.traffic, self.task.network is not None
        busy = self.team.sum_by_node(
            max(1e-9, self.tally.seconds - traffic.waited) if leads else 0.0, "speeds"
        )
        samples = self.team.sum_by_node(float(self.tally.samples), "speeds")
        sent = self.team.sum_by_node(float(traffic.bytes_sent), "traffic")
        line = {
            **exchange_line(
                self.team.sum(exchange_counts(traffic), "traffic"),
                self.task.context.nodes - len(self.task.plan.servers),
            ),
            "bytes_sent_most": int(max(sent)),
            "shares": [round(share / sum(self.shares), 4) for share in self.shares],
        }
        if self.config.exchange.rebalance and self.team.is_steady:
            speeds = [count / time for count, time in zip(samples, busy, strict=True)]
            changed = rebalanced(self.shares, speeds)
            if changed is not None:
                self.shares = changed
                if self.job.partition is not None:
                    self.job.partition.reshare(changed)
                self.feed = dataclasses.replace(
                    self.feed, shares=worker_shares(self.task.plan, changed)
                )
                if self.team.is_first:
                    self.view.say(describe_shares(self.task.plan, changed))
                self.recorder.note("shares", describe_shares(self.task.plan, changed))
        return line

    def checkpoint_due(self) -> bool:
        every = self.config.train.checkpoint_every
        return every is not None and self.position.update % every == 0

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint; a failure is said and costs no older one."""
        with self.recorder.span("checkpoint"):
            self._save(best=best)
        self.count_exchange()

    def _save(self, *, best: bool) -> None:
        self.team.enter("checkpoint", self.position.update)
        make_whole(self.task, self.team, self.job, self.strategy)
        optimizer = whole_optimizer_state(self.job, self.strategy, first=self.team.is_first)
        tally = self.tally.saved()
        sums = self.team.sum([tally["loss_sum"], tally["correct"], tally["samples"]], "checkpoint")
        tally |= dict(zip(("loss_sum", "correct", "samples"), sums, strict=True))
        if self.team.is_first and self.position.update != self.saved_at:
            state = TrainState(
                position=self.position,
                batch_size=self.feed.sampler.batch_size,
                samples=self.feed.sampler.samples,
                tally=tally,
                seconds=time.perf_counter() - self.started,
                best_accuracy=self.goal.best,
                since_best=self.goal.since_best,
            )
            try:
                model = self.strategy.model.state_dict()
                self.checkpoints.save(state, model, optimizer, best=best)
                self.saved_at = self.position.update
            except StorageError as error:
                self.view.say(f"warning: {error}")
        self.team.barrier("checkpoint")

    def begin(self) -> None:
        """Meet the other nodes; one that joins a training goes on where that is."""
        if self.job.exchange is None:
            return
        update = self.job.exchange.start(self.position.update)
        if update != self.position.update:
            epoch, step = divmod(update, self.feed.sampler.steps_per_epoch)
            self.position = Position(epoch=epoch, step=step, update=update)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        newest = self.checkpoints.newest()
        if newest is None:
            return
        state, model, optimizer = self.checkpoints.load(newest)
        here = (self.feed.sampler.batch_size, self.feed.sampler.samples)
        if (state.batch_size, state.samples) != here:
            raise RunDirectoryError(
                f"{newest} was made with batch {state.batch_size} on {state.samples} samples, but"
                f" this run has batch {here[0]} on {here[1]}: a run is continued with what it began"
            )
        self.strategy.load_weights(model)
        self.strategy.load_optimizer_state(optimizer)
        self.position, self.saved_at = state.position, state.position.update
        self.started -= state.seconds
        self.goal.best, self.goal.since_best = state.best_accuracy, state.since_best
        if self.team.is_first:
            self.tally = Tally.restored(state.tally)
            self.epochs.restore(state.position.epoch)
            self.view.say(self.welcome_back())

    def welcome_back(self) -> str:
        """One line about what is continued."""
        update, path = self.position.update, self.task.run.path
        if update >= self.updates or self.goal.reached() is not None:
            return f"{path} is finished after {update} updates: there is nothing left to train"
        return f"continuing {path} from update {update} (epoch {self.position.epoch + 1})"

    def finish(self, *, open_seconds: float) -> Outcome:
        """The summary of the run, written to run.json."""
        self.team.close()
        self.count_exchange()
        lines = self.epochs.lines
        summary: dict[str, Any] = {
            "name": self.config.name,
            "finished": self.position.update >= self.updates or self.goal.reached() is not None,
            "epochs": self.position.epoch,
            "updates": self.position.update,
            **totals(lines, open_seconds=open_seconds),
            "best_accuracy": self.goal.best,
            "total_seconds": time.perf_counter() - self.started,
            "parameters": self.strategy.parameters,
        }
        summary |= comparison(self.config, self.task.plan, lines, self.position.update)
        interrupted = self.signals.received is not None and not summary["finished"]
        if self.team.is_first:
            try:
                write_json(self.task.run.summary, summary)
            except OSError as error:
                self.view.say(f"warning: run.json cannot be written: {error.strerror}")
            if self.saved_at != self.position.update and self.position.update > 0:
                raise StorageError(
                    f"training ended, but its last state could not be saved in"
                    f" {self.task.run.checkpoints}: free some room and run again with --resume"
                )
        return Outcome(summary=summary, exit_code=self.signals.exit_code if interrupted else 0)
