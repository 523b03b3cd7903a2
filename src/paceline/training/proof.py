"""The proof of a plan: before it trains, it must give the weights of one process on a copy.

    first rank   plain updates ──> expected ──────────┐
    all ranks    the plan's own updates on a copy ──> compare ──> go on together, or refuse

Two updates from a few real samples, divided unequally, without chance (see `local.still`). It is
the plan's own strategy, exchange and partition that run, built like those that will train.
See docs/exactness.md.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline import exchange, local
from paceline.data.sampler import apportion
from paceline.errors import PacelineError, ProofError
from paceline.local.base import Job, LocalStrategy
from paceline.local.batch_norm import batch_norms, refuse_without_sums
from paceline.local.memory import give_back_memory
from paceline.local.steps import Loss, OwnStep, Supervised
from paceline.local.still import chance_kept, still
from paceline.observe.recorder import Recorder
from paceline.schema.plain import parse_json
from paceline.schema.proof import Proof
from paceline.schema.strategies import strategy_of
from paceline.schema.support import DDP, strategy_name
from paceline.training.assemble import (
    Task,
    beginning_of,
    has_local_batch_norm,
    make_job,
    make_whole,
    whole_optimizer_state,
)
from paceline.training.carried import RUNNING
from paceline.training.compare import TOLERANCE, compare
from paceline.training.device import choose_device
from paceline.training.outside import Outside
from paceline.training.parts import Parts, data_request
from paceline.training.proof_record import known, proof_key, record
from paceline.training.proof_samples import (
    division,
    drawn_samples,
    following_samples,
    normalised_size,
    update_sizes,
)
from paceline.training.reference import Drawn, Plainly, ReferenceResult, tensors_of
from paceline.training.serving import make_team
from paceline.training.shares import worker_shares
from paceline.training.team import Team
from paceline.training.verdict import judged, looked_back, name_of, remedy_for

PROOF = "the proof of the plan"
"""What ranks wait for together."""
NUDGES = 2
"""Plain trainings from slightly other weights, where a difference may be their noise."""


def prove(task: Task, parts: Parts, recorder: Recorder) -> None:
    """Raise ProofError where the plan would not train like one process; all ranks call it."""
    kind = provable(task)
    if kind == "nothing":
        return
    start = _OneStart(parts.build_model)
    parts = dataclasses.replace(parts, build_model=start)
    with recorder.span("proof"), chance_kept():
        outside = Outside(_users_functions(task, parts, start.look()))
        try:
            if kind == "division":
                _prove_division(task, parts, outside)
            else:
                _prove_plan(task, parts, outside)
        finally:
            outside.restore()


def _users_functions(task: Task, parts: Parts, model: nn.Module) -> list[Any]:
    """What a training calls again and again, of which a proof must leave no trace."""
    step = parts.step
    found = [getattr(type(layer), "forward", None) for layer in model.modules()]
    collate = data_request(task.config, task.given).collate_fn
    own = [step.function] if isinstance(step, OwnStep) else []
    if isinstance(step, Supervised):
        own = [step.loss, *step.metrics.values()]
    return [each for each in (*own, collate, *found) if each is not None]


class _OneStart:
    """Every model begins with the weights of the first one built: not every model is seeded."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build
        self._start: dict[str, Any] = {}
        self._seen: nn.Module | None = None

    def __call__(self) -> nn.Module:
        model = self._build() if self._seen is None else self._seen
        self._seen = None
        if self._start:
            model.load_state_dict(self._start)
        else:
            self._start.update(copy.deepcopy(model.state_dict()))
        return model

    def look(self) -> nn.Module:
        """The model that the next call gives."""
        if self._seen is None:
            self._seen = self()
        return self._seen


def _normalises(task: Task, parts: Parts) -> bool:
    """Whether the model has a layer that keeps statistics, which must see whole batches."""
    assert isinstance(parts.build_model, _OneStart)
    model = parts.build_model.look()
    keeps = any(
        isinstance(layer, _NormBase) and layer.running_mean is not None for layer in model.modules()
    )
    whole = not has_local_batch_norm(task.config, task.plan)
    return whole and (keeps or bool(batch_norms(model)))


def provable(task: Task) -> str:
    """What can be proved: "nothing", the whole "plan", or only the "division" of batches."""
    plan, options = task.plan, task.config.exchange
    workers = [node for node in plan.nodes if node.role == "worker"]
    if not all(local.strategy_class(node.strategy).synchronous for node in workers):
        return "nothing"
    if len(plan.nodes) > 1:
        if options.compression != "none" or not exchange.exchange_class(plan.exchange).synchronous:
            return "nothing"
        if plan.servers:
            return "division" if options.mode == "sync" else "nothing"
        return "plan"
    alone = strategy_of(workers[0]).is_plain
    plain = (plan.precision, plan.memory_format) == ("fp32", "contiguous")
    return "nothing" if alone and plain else "plan"


def _prove_plan(task: Task, parts: Parts, outside: Outside) -> None:
    started = time.perf_counter()
    first = task.context.is_first
    team = make_team(task)
    team.enter("proof", 0)
    sizes = update_sizes(task.plan, len(parts.dataset.train))
    key = proof_key(task, parts) if first else ""
    kept = known(task, key)
    order: dict[str, Any] = {"known": kept is not None, "rate": 1.0, "normalises": False}
    order |= {"alike": 0, "refusal": ""}
    expected: ReferenceResult | None = None
    plainly = _plainly(task, parts, outside)
    if kept is not None:
        record(task, kept)
    elif first:
        found = looked_back(task, parts, plainly, sizes[0])
        order |= {"alike": found.alike, "refusal": found.refusal, "cause": "carried"}
        if not found.refusal:
            order["normalises"] = _normalises(task, parts)
            expected = plainly.train(_batches(task, parts, sizes, found.alike))
            refusal = _kept_outside(task, plainly, expected.rate, outside)
            order |= {"rate": expected.rate, "refusal": refusal, "cause": "outside"}
    order = parse_json(team.from_first(json.dumps(order), PROOF))
    if order["known"]:
        return
    proof = Proof(key=key, samples=sizes, tolerance=TOLERANCE[task.plan.precision])
    if order["refusal"]:
        if first:
            took, reason = time.perf_counter() - started, order["refusal"]
            refused = dataclasses.replace(proof, reason=reason, cause=order["cause"], seconds=took)
            record(task, refused)
        raise ProofError(order["refusal"])
    batches = _batches(task, parts, sizes, order["alike"])
    sizes = (batches[0].count, batches[1].count)
    proof = dataclasses.replace(proof, samples=sizes)
    outside.restore()
    with _on_a_copy(task, parts, sizes[0], proof) as (job, strategy):
        _train(task, job, strategy, batches, order["rate"])
        make_whole(task, team, job, strategy)
        state = whole_optimizer_state(job, strategy, first=first)
        if expected is not None:
            comparison = compare(
                tensors_of(strategy.model),
                state,
                expected,
                tolerance=proof.tolerance,
                nudged=partial(_nudged, plainly, batches, expected.rate),
            )
            proof = judged(task, plainly, batches, expected, comparison, proof)
        refusal = team.from_first(proof.reason, PROOF)
    if not refusal and order["normalises"]:
        proof = _prove_statistics(
            task, team, parts, plainly, proof, order["rate"], alike=order["alike"]
        )
        refusal = team.from_first(proof.reason, PROOF)
    if first:
        record(task, dataclasses.replace(proof, seconds=time.perf_counter() - started))
    if refusal:
        raise ProofError(refusal)


def _batches(task: Task, parts: Parts, sizes: Sequence[int], alike: int) -> list[Drawn]:
    """Of the two updates; `alike`: of so many samples each, where the model needs it."""
    return following_samples(task, parts, alike) if alike else drawn_samples(task, parts, sizes)


def _prove_statistics(
    task: Task,
    team: Team,
    parts: Parts,
    plainly: Plainly,
    proof: Proof,
    rate: float,
    *,
    alike: int,
) -> Proof:
    """That BatchNorm sees the whole batch: its running statistics after one update.

    Weights are not compared: what BatchNorm makes of a few samples leads plain PyTorch itself apart
    by some percent when the last digit of the weights is changed.
    """
    size = alike or normalised_size(task.plan, len(parts.dataset.train))
    batches = drawn_samples(task, parts, [size])
    first = task.context.is_first
    plainly.outside.restore()
    with _on_a_copy(task, parts, size, proof, settled=False) as (job, strategy):
        _train(task, job, strategy, batches, rate)
        make_whole(task, team, job, strategy)
        if not first:
            return proof
        comparison = compare(
            tensors_of(strategy.model),
            {},
            _statistics(plainly.run(batches, rate, settled=False)),
            tolerance=proof.tolerance,
            nudged=lambda: [
                _statistics(plainly.run(batches, rate, nudge=seed, settled=False))
                for seed in range(NUDGES)
            ],
        )
    if not comparison.differences:
        return dataclasses.replace(proof, tensors=proof.tensors + comparison.tensors)
    found = comparison.differences[0]
    reason = (
        f"{name_of(task.plan)} gives other statistics for {found.name}: the layer does not see the"
        f" whole batch; {remedy_for(task)}"
    )
    return dataclasses.replace(
        proof, passed=False, reason=reason, cause="samples", tensor=found.name
    )


def _statistics(trained: ReferenceResult) -> ReferenceResult:
    """Of what was trained only running statistics."""
    names = [n for n in trained.weights if n.rpartition(".")[2] in RUNNING]
    return dataclasses.replace(
        trained, weights={name: trained.weights[name] for name in names}, state={}
    )


@contextlib.contextmanager
def _on_a_copy(
    task: Task, parts: Parts, total: int, proof: Proof, *, settled: bool = True
) -> Iterator[tuple[Job, LocalStrategy]]:
    """The plan's strategy for a while; what it raises puts the plan out.

    A rank that fails says so by itself: the others may stand anywhere, and are ended.
    """
    job = dataclasses.replace(_job(task, parts, total), settled=settled)
    strategy: LocalStrategy | None = None
    try:
        strategy = local.build(job)
        yield job, strategy
    except PacelineError:
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        reason = (
            f"{name_of(task.plan)} fails in two updates on a copy ({type(error).__name__}: {text});"
            f" {_remedy_for_failure(task)}"
        )
        record(task, dataclasses.replace(proof, key="", reason=reason, cause="plan"))
        raise ProofError(reason) from error
    finally:
        if strategy is not None:
            strategy.close()
        if job.exchange is not None:
            job.exchange.close()
    del strategy, job
    gc.collect()
    if task.arena is not None:
        task.arena.clear()
    give_back_memory()


def _remedy_for_failure(task: Task) -> str:
    if any(strategy_name(node) == DDP for node in task.plan.nodes):
        return "use local.sync = 'shared', which asks less of a model than DistributedDataParallel"
    return remedy_for(task)


def _kept_outside(task: Task, plainly: Plainly, rate: float, outside: Outside) -> str:
    """Why the plan does not do where the user's code keeps a state that no leg takes over.

    Threads share what is outside of the model; a leg in other copies or processes begins with
    another state. What is only built at the first call, or grows as a list of losses does, is none.
    """
    plan = task.plan
    shared = any(node.replicas > 1 and node.stages == 1 for node in plan.nodes)
    several = len(plan.nodes) > 1 or any(node.ranks > 1 for node in plan.nodes)
    legs = task.in_legs or task.config.local.strategy == "auto"
    if not (shared or (legs and several)):
        return ""
    again = Outside(outside.functions)  # with what the first calls have built
    try:
        plainly.run(drawn_samples(task, plainly.parts, [2]), rate, anew=False)
        name = again.changed(growing=False)
    finally:
        again.restore()
    if not name:
        return ""
    return (
        f"{name_of(plan)} may give other weights: {name} changes with every batch, but is no part"
        " of the model, so that it would not go along from one leg to the next, or be shared by"
        f" threads; keep it in the model, as a buffer, or {remedy_for(task)}"
    )


def _plainly(task: Task, parts: Parts, outside: Outside) -> Plainly:
    return Plainly(
        outside=outside,
        config=task.config,
        parts=parts,
        precision=task.plan.precision,
        device=choose_device(task.config.train.device, task.context.local_rank),
    )


def _job(task: Task, parts: Parts, total: int) -> Job:
    """As for training, but without chance and for few samples; what compiles is not proved."""
    shares = [node.share for node in task.plan.nodes]

    step = parts.step
    if isinstance(step, Supervised):  # whose loss stages compute by itself
        step = dataclasses.replace(step, loss=_stilled(step.loss))
    return dataclasses.replace(
        make_job(task, parts),
        step=step,
        compile=False,
        batch_size=max(1, apportion(total, shares)[task.context.node]),
        still=True,
    )


def _stilled(loss: Loss) -> Loss:
    def stilled(outputs: Any, targets: Any) -> Any:
        with still():
            return loss(outputs, targets)

    return stilled


def _train(
    task: Task, job: Job, strategy: LocalStrategy, batches: Sequence[Drawn], rate: float
) -> None:
    """The plan's own way through the batches."""
    strategy.spread_buffers()
    if job.exchange is not None:
        job.exchange.start(beginning_of(strategy, 0))
    strategy.scale_rate(rate)
    shares = worker_shares(task.plan, [node.share for node in task.plan.nodes])
    worker = job.first_worker + strategy.worker
    for update, batch in enumerate(batches):
        sizes = apportion(batch.count, shares)
        first, mine = sum(sizes[:worker]), sizes[worker]
        if job.exchange is not None:
            job.exchange.before_update(batch.count)
            job.exchange.begin(update=update, rate=rate, samples=mine, total=batch.count)
        samples = batch.part(first, mine, strategy.parts(mine))
        strategy.update(samples, batch.count, update)


def _nudged(plainly: Plainly, batches: Sequence[Drawn], rate: float) -> list[ReferenceResult]:
    if plainly.precision != "fp32":
        return []  # its tolerance is as wide already
    return [plainly.run(batches, rate, nudge=seed) for seed in range(NUDGES)]


def _prove_division(task: Task, parts: Parts, outside: Outside) -> None:
    """Where servers update the weights: that the parts of a batch add up, in one process.

    Every worker finds the same, so that all refuse or none.
    """
    started = time.perf_counter()
    first = task.context.is_first
    if not has_local_batch_norm(task.config, task.plan):
        assert isinstance(parts.build_model, _OneStart)
        refuse_without_sums(parts.build_model.look())
    key = proof_key(task, parts)
    if known(task, key) is not None:
        return
    sizes = update_sizes(task.plan, len(parts.dataset.train))
    batches, plainly = drawn_samples(task, parts, sizes), _plainly(task, parts, outside)
    if refusal := looked_back(task, parts, plainly, sizes[0]).refusal:
        if first:
            record(task, Proof(key=key, samples=sizes, reason=refusal, cause="carried"))
        raise ProofError(refusal)
    expected = plainly.train(batches)
    divided = plainly.run(batches, expected.rate, divide=partial(division, task.plan))
    tolerance = TOLERANCE[task.plan.precision]
    comparison = compare(
        divided.weights,
        divided.state,
        expected,
        tolerance=tolerance,
        nudged=partial(_nudged, plainly, batches, expected.rate),
    )
    proof = Proof(key=key, samples=sizes, tolerance=tolerance)
    proof = judged(task, plainly, batches, expected, comparison, proof)
    proof = dataclasses.replace(proof, seconds=time.perf_counter() - started)
    if first:
        record(task, proof)
    if not proof.passed:
        raise ProofError(proof.reason)
