"""`Pace`: a training loop of one's own on all cores and hosts, with the weights of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.config.environment import given_shares
from paceline.errors import ConfigError, RunDirectoryError, UserError
from paceline.exchange.memory import ENTRY
from paceline.integrations.shares import Shares, span_of
from paceline.local.steps import SUM, measured, sum_and_count
from paceline.observe.recorder import make_recorder
from paceline.pace.across import Across
from paceline.pace.batches import Batches
from paceline.pace.carrying import Following
from paceline.pace.compressed import Compressed, exchange_settings
from paceline.pace.counted import refuse_unweighed
from paceline.pace.keeping import (
    OWN,
    Keeper,
    described,
    found_seats,
    of_this_loop,
    open_keeper,
    own_state,
    planned,
    random_state,
    script_name,
    set_random_state,
    spread_checkpoint,
)
from paceline.pace.legs import Legs
from paceline.pace.meter import Meter
from paceline.pace.prepared import Prepared
from paceline.pace.ranks import Ranks
from paceline.pace.sameness import Sameness
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.schema.config import Train


class Pace:
    """A loop of one's own, alone or on every rank that a launcher starts.

    >>> pace = paceline.Pace()                                               # doctest: +SKIP
    >>> model, optimizer, loader = pace.prepare(model, optimizer, loader)    # doctest: +SKIP
    >>> for epoch in pace.epochs(14):                                        # doctest: +SKIP
    ...     for inputs, targets in loader:
    ...         optimizer.zero_grad()
    ...         loss = cross_entropy(model(inputs), targets)
    ...         pace.backward(loss)
    ...         optimizer.step()
    ...         pace.log(loss=loss)
    """

    def __init__(
        self,
        *,
        run: str | Path | None = None,
        resume: bool | None = None,
        shares: Sequence[float] | None = None,
        exact: bool = True,
        legs: bool = False,
        compression: str = "none",
        compression_rank: int = 2,
        monitor: str = "auto",
    ) -> None:
        """`run`: the run directory, which is continued where it has a checkpoint; a new one under
        runs/ when left out. `resume`: True insists on a checkpoint (of runs/latest, without
        `run`), False on a new run. `shares`: one number per rank; by speed when left out.
        `exact`: BatchNorm over the whole batch, and no loss that looks across samples. `legs`:
        ranks may stand by while that is faster, since the loop keeps nothing from batch to batch
        but what was prepared. `compression`: "bf16" or "powersgd" (of rank `compression_rank`)
        sends fewer bytes between hosts, and changes results. `monitor`: what makes an epoch
        the best, as "loss:min"."""
        Train(monitor=monitor)  # refuses what is no name of anything
        self._exchange = exchange_settings(compression, compression_rank, legs=legs)
        self._ranks = Ranks()
        self._where, self._resume = Path(run) if run is not None else None, resume
        self._exact, self._monitor = exact, monitor
        self._follows_speed = shares is None and given_shares() is None
        self._shares = Shares(shares).numbers()
        self._prepared = Prepared(self._ranks)
        self._sameness = Sameness(self._ranks, self._prepared)
        self._sameness.checks_buffers = exact
        self._across = Across(self._prepared.gradients.named) if exact else None
        self._meter = Meter(self._ranks)
        self._working = self._meter.working
        self._compressed = Compressed(
            self._ranks, self._exchange, lambda: self._meter.updates, self.print
        )
        self._prepared.gradients.compressed = self._compressed
        self._loaders: list[Batches] = []
        self._following = Following(self._ranks, self._meter, self.print)
        self._legs: Legs | None = None
        if legs and self.ranks > 1:
            self._legs = Legs(
                self._ranks, self._meter, self._prepared.hand_over, self._shares, self.print,
                self._following.carrying, follow=self._follows_speed,
            )  # fmt: skip
        self._keeper: Keeper | None = None
        self._stopped = False
        self._done = 0

    # --- who we are -----------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        return self._ranks.size

    @property
    def is_first(self) -> bool:
        """True on the one rank that should print and write."""
        return self._ranks.is_first

    def print(self, *words: Any, **options: Any) -> None:
        """On the first rank."""
        if self.is_first:
            print(*words, **{"flush": True, **options})

    # --- before the loop --------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, DataLoaders and whatever has a state_dict (schedulers), in any order.

        Models and optimizers are the same objects afterwards, with the first rank's weights;
        DataLoaders give this rank's part of every batch.
        """
        if self._keeper is not None:
            raise UserError("pace.prepare comes before pace.epochs: hand everything over there")
        for model in (each for each in things if isinstance(each, nn.Module)):
            self._prepared.add_model(model, exact=self._exact)
            if self.ranks > 1 and (self._follows_speed or self._legs is not None):
                self._following.carrying.watch(model)
        prepared = [self._prepare(each) for each in things]
        self._prepared.check_same()
        self._ranks.open_background(self._ranks.gather(os.uname().nodename))
        self._compressed.open(self._prepared.gradients.named.values())
        self._prepared.spread()
        if self.rank:  # noise and dropout of another part of the batch are other numbers
            torch.manual_seed((torch.initial_seed() + self.rank) % 2**63)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return thing
        if isinstance(thing, torch.optim.Optimizer):
            self._add_optimizer(thing)
            return thing
        if isinstance(thing, DataLoader):
            found = Batches(
                thing, self._ranks, self._shares, self._working, self._legs,
                self._following.carrying.following,
            )  # fmt: skip
            self._loaders.append(found)
            return found
        if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self._prepared.others.append(thing)
            return thing
        raise ConfigError(
            f"pace.prepare was given a {type(thing).__name__}: it takes models, optimizers,"
            " DataLoaders, and what has a state_dict"
        )

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        number = len(self._prepared.optimizers)
        self._prepared.add_optimizer(optimizer)
        if not number:
            optimizer.register_step_post_hook(lambda *_: self._meter.updated())
        if self._legs is not None:
            bodies = self._legs.bodies
            optimizer.register_step_pre_hook(lambda which, *_: bodies.updates(number, which))

    def _together(self, what: str) -> None:
        """Something begins that every rank does."""
        if self._legs is not None:
            self._legs.settle()
            self._legs.agree(what)
            self._legs.bodies.note(what)

    def part(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part of a tensor that every rank has whole: rows, or columns with dim=1.

        Where ranks have different numbers (each drew its own) the first one's count. Every rank
        calls it.
        """
        if self._legs is not None:
            raise ConfigError(
                "pace.part gives each rank a part of its own, which a rank that stands by would"
                " leave behind: use Pace(legs=False)"
            )
        self._following.carrying.reason = "pace.part has given ranks rows of their own"
        self._sameness.checks_buffers = False  # a model may keep the state of these columns
        whole = self._ranks.of_first(whole)
        begin, end = span_of(whole.shape[dim], self._shares, self.rank)
        if self._across is not None:
            self._across.rows = end - begin
        found = whole.narrow(dim, begin, end - begin)
        # `view`, which loops over columns call, wants what it had of the whole.
        return found.contiguous() if whole.is_contiguous() else found

    def save(self, thing: Any, path: str | Path) -> None:
        """As torch.save, by the first rank, while the others wait: then the file is there.

        Every rank calls it.
        """
        self._together("save")
        place = Path(path)

        def write() -> None:
            partial = place.with_name(f".{place.name}.partial")
            try:
                torch.save(thing, partial)
                partial.replace(place)
            except OSError as error:
                raise RunDirectoryError(f"cannot write {place}: {error.strerror}") from None

        self._ranks.by_first(write)

    # --- in the loop --------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: Any = None, **options: Any) -> None:
        """As loss.backward(), over all ranks: gradients are those of the whole batch.

        `weight`: by what the loss is a mean, if not by the samples of the loader's batch (tokens,
        the sum of class weights), or "sum" for a loss that is a sum.
        """
        if self._legs is not None:
            self._legs.settle()
            self._legs.agree("backward")
        found = measured({"loss": loss, "weight": weight}, "the loop")
        part = self._working.part() if found.weight is None else None
        self._meter.trained_on(part)
        if self.ranks == 1:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            self._meter.computed(time.perf_counter() - self._working.since)
        else:
            if part is not None:
                refuse_unweighed(loss, part[0])
            if self._across is not None and len(self._ranks.members) > 1:
                sizes = self._working.parts.values()
                self._across.refuse(loss, sizes)
                if self._legs is None:
                    self._across.refuse_factors(loss, sizes, self._ranks.gather)
            self._backward(loss, self._factor(found.weight, part), options)
        self._working.since = self._meter.last = time.perf_counter()
        if not self._prepared.optimizers:
            self._meter.updated()

    def _factor(self, weight: Any, part: Any) -> float:
        """What this rank's loss is multiplied with."""
        self._meter.computed(time.perf_counter() - self._working.since)
        if weight == SUM:
            return 1.0
        if weight is None:
            if part is None:
                raise ConfigError(
                    "no loader has handed out a batch whose samples the loss could be the mean"
                    " over: say by what it is, as pace.backward(loss, weight=len(inputs))"
                )
            return float(part[0] / part[1])
        (total,) = self._ranks.sum([weight])
        return float(weight) / total if total else 0.0

    def _backward(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        if self._legs is None:
            self._sameness.before_pass()
        began, gradients = time.perf_counter(), self._prepared.gradients
        if self._legs is not None:
            self._legs.bodies.takes_gradients(gradients.named.values())
        gradients.backward(loss, factor, **options)
        self._meter.computed(time.perf_counter() - began)
        with self._meter.recorder.span("exchange", update=self._meter.updates, detail="gradients"):
            gradients.add_up()

    def log(self, *, weight: Any = None, **values: Any) -> None:
        """Into this epoch's line of metrics.jsonl, as exact means over all batches and ranks.

        A number is a mean (by `weight`, or the samples of the batch); a tensor counts by its
        elements; a pair is (sum, count). Names without test_ or train_ before them get train_.
        """
        for name, value in values.items():
            key = name if name.startswith(("test_", "train_")) else f"train_{name}"
            total, count = self._sum_and_count(value, name, weight)
            self._meter.log(key, total, count)

    def mean(self, value: Any, weight: Any = None) -> float:
        """The mean over all ranks, now: of a number (by `weight`), a tensor or a pair (sum, count).

        Every rank calls it.
        """
        self._together("mean")
        total, count = self._ranks.sum(self._sum_and_count(value, "mean", weight))
        return total / count if count else float("nan")

    def sum(self, *values: Any) -> Any:
        """A number, or several, added up over all ranks, now; whole numbers stay whole.

        Every rank calls it.
        """
        self._together("sum")
        sums = self._ranks.sum(float(value) for value in values)
        found = [
            int(total) if _is_whole(value) else total
            for value, total in zip(values, sums, strict=True)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def _sum_and_count(self, value: Any, name: str, weight: Any) -> tuple[float, float]:
        if weight is None:
            part = self._working.part() if self._working.parts else None
            weight = part[0] if part is not None else 1.0
        if not float(weight):  # a mean over nothing is 0 / 0
            return 0.0, 0.0
        return sum_and_count(value, name, float(weight), is_mean=True)

    # --- epochs -------------------------------------------------------------------

    def epochs(self, *arguments: int) -> Iterator[int]:
        """As range(...): an epoch after the other, each logged and saved at its end.

        A run that has a checkpoint goes on after the epochs that it has.
        """
        numbers = range(*arguments)
        done = self._begin(len(numbers))
        for number in numbers[done:]:
            self._done = done
            self._meter.begin_epoch()
            try:
                yield number
            except GeneratorExit:
                self.print("paceline: the loop was left before the end of an epoch, which is not"
                           " saved; with pace.stop() it is")  # fmt: skip
                raise
            done += 1
            self._together("epoch")
            self._end_epoch(done)
            if self._ranks.sum([float(self._stopped)])[0]:
                break
        self._finish(done, finished=done == len(numbers) or self._stopped)

    def stop(self) -> None:
        """No more epochs after this one, which is saved."""
        self._stopped = True

    def _begin(self, epochs: int) -> int:
        """Make or open the run; how many epochs it has already."""
        if self._keeper is not None or self._stopped:
            raise UserError("pace.epochs is for one loop: use another Pace for another training")
        batch = next((each.batch_size for each in self._loaders if each.batch_size), None)
        seats = found_seats(self._ranks)
        plan = planned(seats, self._ranks.everyone, self._shares, batch)
        config = described(
            script_name(), self._prepared.models, self._prepared.optimizers, self._loaders, epochs,
            self._monitor, self._exchange,
        )  # fmt: skip
        opened: list[tuple[Keeper, Path | None]] = []

        def open_first() -> list[str]:
            opened.append(open_keeper(self._where, self._resume, config, plan))
            return [str(opened[0][0].run.path.resolve()), plan.nodes[0].host]

        place, host = self._ranks.by_first(open_first)
        keeper, checkpoint = opened[0] if opened else (_elsewhere(place, config, plan), None)
        self._keeper = keeper
        found = spread_checkpoint(self._ranks, checkpoint)
        if os.uname().nodename == host:  # others share no files with the first
            context = RankContext(rank=self.rank, world_size=self.ranks)
            folder = RunDirectory(Path(place)).rank(self.rank)
            self._meter.recorder = make_recorder(folder, context)
            self._meter.recorder.ready()
        if self._legs is not None:
            self._legs.planned = lambda members, shares: planned(seats, members, shares, batch)
            self._legs.kept = keeper.note_legs
            self._legs.batches_left = lambda batches: batches * (epochs - self._done - 1)
        if found is None:
            return 0
        state, model, optimizer = found
        self._restore(model, optimizer)
        self._meter.updates = state.position.update
        if self._legs is not None:
            self._legs.position = state.position.update
        self.print(f"paceline: continuing {place} after epoch {state.position.epoch}")
        return state.position.epoch

    def _restore(self, model: dict[str, Any], optimizer: dict[str, dict[str, Any]]) -> None:
        generators = [each for loader in self._loaders for each in loader.generators]
        own = own_state(optimizer.pop(OWN, None), len(self._prepared.others), len(generators))
        self._compressed.restore(optimizer.pop(ENTRY, {}))
        self._prepared.load(model, optimizer, own["others"])
        with of_this_loop():
            for generator, state in zip(generators, own["generators"], strict=True):
                generator.set_state(torch.tensor(state, dtype=torch.uint8))
            if self.rank < len(own["random"]):
                set_random_state(own["random"][self.rank])
        if len(own["shares"]) == self.ranks and self._follows_speed:
            self._divide(own["shares"])

    def _end_epoch(self, done: int) -> None:
        """Log and save; every rank calls it."""
        keeper = self._keeper
        assert keeper is not None
        self._sameness.check()
        if not self._exact:  # statistics of each rank's own part: the first one's are kept
            self._ranks.spread(self._prepared.buffers())
        shares = [round(share / sum(self._shares), 4) for share in self._shares]
        line = {"epoch": done, **self._meter.line(), "shares": shares}
        self._follow_speeds()
        randoms = self._ranks.gather(random_state())
        memory = self._compressed.memory()
        if not self.is_first:
            return
        generators = [each for loader in self._loaders for each in loader.generators]
        own = {
            "others": [thing.state_dict() for thing in self._prepared.others],
            "generators": [each.get_state().tolist() for each in generators],
            "random": randoms,
            "shares": list(self._shares),
        }
        with self._meter.recorder.span("checkpoint"):
            best = keeper.note(line)
            state = self._prepared.optimizer_state() | {OWN: own}
            state |= {ENTRY: memory} if memory else {}
            keeper.save(done, self._meter.updates, self._prepared.model_state(), state, best=best)
            parameters = self._prepared.parameters
            keeper.summarize(done, self._meter.updates, parameters, finished=False)

    def _finish(self, done: int, *, finished: bool) -> None:
        self._compressed.close()
        self._meter.recorder.close()
        if self.is_first and self._keeper is not None:
            parameters = self._prepared.parameters
            self._keeper.summarize(done, self._meter.updates, parameters, finished=finished)
            self._keeper.run.unlock()
            self.print(f"paceline: {done} epochs, {self._keeper.run.path}")

    def _follow_speeds(self) -> None:
        """Give slower ranks less of every batch of the next epoch, where that is worth it."""
        if self._legs is not None:
            self._divide(self._legs.shares)
            return
        if not self._follows_speed:
            return
        fairer = self._following.fairer(self._shares)
        if fairer is not None:
            self._divide(fairer)

    def _divide(self, shares: list[float]) -> None:
        self._shares = list(shares)
        for loader in self._loaders:
            loader.divide(self._shares)


def _is_whole(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


def _elsewhere(place: str, config: Any, plan: Any) -> Keeper:
    """On ranks that write nothing."""
    return Keeper(RunDirectory(Path(place)), config, plan)
