"""The training loop. One rank and many ranks run the same lines."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.feed import Batch
from paceline.errors import DivergedError, ModelError
from paceline.exchange.network import Traffic
from paceline.local.base import StepResult
from paceline.local.memory import keep_freed_memory
from paceline.observe.metrics import Tally, exchange_counts, exchange_line, totals
from paceline.observe.recorder import Recorder
from paceline.schema import write_json
from paceline.schema.schedule import length_at, schedule_factor
from paceline.training.assemble import (
    Task,
    agreed_checkpoint,
    loss_total,
    make_whole,
)
from paceline.training.comparison import comparison, node_memory_mb
from paceline.training.continuing import Continuing
from paceline.training.device import use_deterministic
from paceline.training.evaluate import evaluate, existing
from paceline.training.optimizers import batch_factor, decides_rate
from paceline.training.parts import make_parts, own_optimizer
from paceline.training.proof import prove
from paceline.training.shares import describe_shares, fairer_shares, rebalanced, worker_shares
from paceline.training.team import means_of
from paceline.training.watching import observed

UNIT = "images"
"""What rates count where nobody says otherwise: samples, by the name that most have."""
FEWEST = 3
"""Updates after which a leg that takes too long may end."""


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
    if parts.dataset.left_out and task.context.is_first:
        task.view.say(parts.dataset.left_out)
    task = dataclasses.replace(task, checkpoint=agreed_checkpoint(task))
    try:
        prove(task, parts, recorder)
    except BaseException:
        task.view.close()
        if task.given is None or task.given.data is None:  # else the next plan trains on it
            parts.dataset.close()
        raise
    trainer = Trainer(task, parts, recorder, started=start)
    try:
        trainer.check_goal()
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


class Trainer(Continuing):
    """One training on one rank: the steps it is made of."""

    @property
    def rate_factor(self) -> float:
        """The current learning rate, relative to the one that was asked for."""
        settings, update = self.config.optimizer, self.position.update
        if self.schedule is not None:
            by_epoch = settings.scheduler_steps == "epoch"
            steps = self.position.epoch if by_epoch else update
            return batch_factor(settings, self.feed.sampler.batch_size) * self.schedule.factor(
                steps
            )
        updates = length_at(update, self.updates, self.config.train.lengths)
        return batch_factor(settings, self.feed.sampler.batch_size) * schedule_factor(
            settings, update=update, updates=updates
        )

    def run_leg(self, until: int, patience: float | None = None) -> list[float]:
        """Up to update `until`, or until `patience` seconds are over; what each update took."""
        self.until, self.patience, self.times = until, patience, []
        self.is_wanted = False
        self.team.begin_leg(self.position.update)
        self.run()
        return self.times

    def ends_leg(self) -> bool:
        """Whether the leg ends after this update; all ranks ask after every update."""
        board, late = self.task.board, False
        if self.patience is not None and self.team.is_first:
            late = len(self.times) >= FEWEST and sum(self.times[1:]) > self.patience
        late = late or (self.is_wanted and self.team.is_first)
        if self.task.context.nodes > 1:
            if late or self.is_unbalanced():
                self.team.end_leg_soon()
            return self.position.update in (self.until, self.team.leg_end)
        if board is None:
            return late or self.position.update == self.until
        if late and (board.leg_end or 0) < self.position.update:
            board.shorten_leg()
        return self.position.update in (self.until, board.leg_end)

    def is_unbalanced(self) -> bool:
        """Whether nodes wait for the slowest so long that other shares are worth a new leg."""
        if not (self.task.in_legs and self.config.exchange.rebalance and self.team.is_first):
            return False
        return fairer_shares(self.shares, self.team.took) is not None

    def run(self) -> None:
        """All updates that are left, of the training or of the leg."""
        self.count_exchange()  # what went into start-up
        self.carried.begin()
        first = self.position.update
        if self.unclosed:
            self.end_epoch()
        while self.position.update < min(self.updates, self.until or self.updates):
            if self.position.update > first and self.ends_leg():
                return
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
                self.times.append(now - clock)
                clock = now
                if self.position.update >= self.updates or self.position.step == steps:
                    break
                if self.ends_leg():
                    return True
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
        self.begin_interruptible()
        total = loss_total(
            self.task.plan, batch, self.shares, self.task.context.node, self.feed.least
        )
        if self.job.exchange is not None:
            self.job.exchange.before_update(total)
            self.job.exchange.begin(
                update=update, rate=self.rate_factor, samples=batch.count, total=batch.total
            )
        start, waited = time.perf_counter(), self.team.waited
        with recorder.span("compute"):
            result = self.strategy.update(batch.samples, total, update)
        self.team.note_busy(time.perf_counter() - start - (self.team.waited - waited))
        self.count_exchange(update)
        self.team.note(result.loss_sum, result.correct, result.samples)
        self.tally.add(
            loss_sum=result.loss_sum,
            correct=result.correct,
            samples=result.samples,
            weight=result.weight,
            sums=result.sums,
        )
        self.tally.read_seconds += batch.wait_seconds
        loss = result.loss_sum / result.weight if result.weight else None
        if loss is not None and self.losses.has_diverged(loss):
            raise DivergedError(self.describe_divergence(loss))
        self.refuse_other_weights()
        self.position = self.position.after_update()
        self.end_interruptible()
        if self.team.is_first and not self.task.rehearsal:
            done, epoch = self.position.update, self.position.epoch
            recorder.progress(done, self.updates, epoch, batch.total, loss)
        slowest = self.team.slowest
        host = "" if slowest is None else self.task.plan.nodes[slowest].host
        self.view.advance(images=self.units_of(batch, result), loss=loss, slowest=host)
        self.say_news()

    def refuse_other_weights(self) -> None:
        """Optimizers and exchanges have the weights that were to be trained in the beginning."""
        for name, parameter in self.strategy.model.named_parameters():
            before, now = self.trained.get(name, False), parameter.requires_grad
            if now == before or (before and self.task.context.nodes == 1):
                continue  # one machine leaves out what has no gradient, as plain PyTorch does
            raise ModelError(
                f"the model {'freezes' if before else 'begins to train'} {name} in update"
                f" {self.position.update + 1}, but which weights are trained is fixed when a"
                " training begins: train in two runs, the second with workload.weights of the"
                " first, or keep a loop of your own"
            )

    def units_of(self, batch: Batch, result: StepResult) -> int:
        """Of the global batch, in what rates count; from this rank's part of it."""
        if self.config.workload.unit == UNIT or not result.samples:
            return batch.total
        return round(result.weight / result.samples * batch.total)

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
        at, lower = f", learning rate {rate:g}", "lower optimizer.learning_rate"
        if decides_rate(own_optimizer(self.config, self.task.given)):
            at, lower = "", "lower the learning rate that your optimizer sets"
        newest = self.checkpoints.newest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        where = ""
        if self.task.context.nodes > 1:  # every node computes the loss of its own samples
            where = f" on {self.task.plan.nodes[self.task.context.node].host}"
        return (
            f"the loss{where} became {loss:g} at update {self.position.update + 1} (epoch"
            f" {self.position.epoch + 1}{at}): {lower},"
            f" raise optimizer.warmup, or set optimizer.clip_norm; {kept}"
        )

    def end_epoch(self) -> None:
        """Evaluate, write the epoch's line, save."""
        self.begin_interruptible(ends_epoch=True)
        self._end_epoch()
        self.end_interruptible()
        self.unclosed = False

    def _end_epoch(self) -> None:
        if self.task.rehearsal:
            self.position = dataclasses.replace(
                self.position, epoch=self.position.epoch + 1, step=0
            )
            self.tally = Tally()
            return
        if self.position.update >= self.updates:
            self.tally.seconds += self.team.wait_for_all()
            self.say_news()
        loss_sum, correct, samples = self.team.sum(
            [self.tally.loss_sum, self.tally.correct, self.tally.samples], "epoch"
        )
        weight, sums = self.reported(samples)
        means = means_of(sums)
        epoch = self.position.epoch + 1
        last = self.position.update >= self.updates
        whole = self.position.step == self.feed.sampler.steps_per_epoch
        due = epoch % self.config.train.evaluate_every == 0
        score = None
        if self.team.evaluates and (last or due):
            self.team.enter("evaluate", self.position.update)
            with self.recorder.span("evaluate"):
                make_whole(self.task, self.team, self.job, self.strategy)
                shares = worker_shares(self.task.plan, self.shares, by_rank=True)
                score = evaluate(
                    self.strategy, self.job, self.dataset.test, self.team, shares, self.carried
                )
        line = {
            "epoch": epoch,
            "train_loss": loss_sum / weight if weight else None,
            "train_accuracy": existing(correct / samples),
            **{f"train_{name}": mean for name, mean in means.items()},
            "test_loss": score.loss if score else None,
            "test_accuracy": score.accuracy if score else None,
            "test_top5": score.top5 if score else None,
            **{f"test_{name}": mean for name, mean in (score.metrics if score else {}).items()},
            "images_per_second": samples / self.tally.seconds,
            **self.unit_rate(weight),
            **self.tally.times(),
            "bytes_sent": 0,
            "memory_mb": node_memory_mb(self.task.board),
        }
        if self.task.context.nodes > 1:
            line |= self.balance() | self.team.epoch_line()
        # A longer training would not evaluate here, and goes on as if this one had not.
        self.kept_goal = self.goal if whole and due else copy.copy(self.goal)
        improved = self.goal.note(score)
        self.epochs.add(line)
        if whole:
            self.position = dataclasses.replace(self.position, epoch=epoch, step=0)
            self.tally = Tally()
        self.traffic = Traffic()
        self.save(best=improved)

    def unit_rate(self, weight: float) -> dict[str, Any]:
        """The rate in what the step's weight counts, where that has a name."""
        unit = self.config.workload.unit
        if unit == UNIT:
            return {}
        return {"unit": unit, "units_per_second": weight / self.tally.seconds}

    def monitored(self) -> dict[str, Any]:
        """What decides which weights are the best, where it is named."""
        monitor = self.config.train.monitor
        return {} if monitor == "auto" else {"monitor": monitor, "best_value": self.goal.best_value}

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
        if self.config.exchange.rebalance and self.team.is_steady and not self.task.in_legs:
            speeds = [count / time for count, time in zip(samples, busy, strict=True)]
            changed = rebalanced(self.shares, speeds)
            if changed is not None:
                self.divide(changed)
                if self.team.is_first:
                    self.view.say(describe_shares(self.task.plan, changed))
                self.recorder.note("shares", describe_shares(self.task.plan, changed))
        return line

    def divide(self, shares: list[float]) -> None:
        """Divide batches like this from now on; every rank calls it."""
        self.shares = shares
        if self.job.partition is not None:
            self.job.partition.reshare(shares)
        self.feed = dataclasses.replace(self.feed, shares=worker_shares(self.task.plan, shares))

    def end(self, open_seconds: float, more: Mapping[str, Any], received: int | None) -> Outcome:
        """Finish a training in legs, which the signal `received` may have ended."""
        self.signals.received = received
        if received is not None:
            self.save()
        return self.finish(open_seconds=open_seconds, more=more)

    def finish(self, *, open_seconds: float, more: Mapping[str, Any] | None = None) -> Outcome:
        """The summary of the run, written to run.json; `more` is what others know of it."""
        self.team.close()
        self.count_exchange()
        lines = self.epochs.lines
        finished = self.is_finished
        summary: dict[str, Any] = {
            "name": self.config.name,
            "finished": finished,
            "epochs": self.position.epoch + (self.position.step > 0 and finished),
            "updates": self.position.update,
            **totals(lines, open_seconds=open_seconds),
            "best_accuracy": self.goal.best_accuracy,
            "best_loss": self.goal.best_loss,
            **self.monitored(),
            "total_seconds": time.perf_counter() - self.started,
            "parameters": self.strategy.parameters,
        }
        summary |= more or {}
        summary |= comparison(self.config, self.task.plan, lines, self.position.update)
        interrupted = self.signals.received is not None and not finished
        if self.team.is_first:
            try:
                write_json(self.task.run.summary, summary)
            except OSError as error:
                self.view.say(f"warning: run.json cannot be written: {error.strerror}")
        return Outcome(summary=summary, exit_code=self.signals.exit_code if interrupted else 0)
