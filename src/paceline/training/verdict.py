"""What a proof found, in a sentence: what differs first, and why as far as that can be told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import torch

from paceline.local.steps import Supervised
from paceline.schema import Plan
from paceline.schema.proof import Cause, Proof
from paceline.schema.strategies import strategy_of
from paceline.training.assemble import Task, global_sampler
from paceline.training.compare import TOLERANCE, Difference, WeightComparison, compare
from paceline.training.loss_parts import loss_apart, step_apart, step_apart_in_float64
from paceline.training.parts import Parts
from paceline.training.proof_samples import division, following_samples
from paceline.training.reference import Drawn, Plainly, ReferenceResult

LOSS_BATCHES = 8
"""Real batches whose loss is held against that of its parts,"""
LOSS_ELEMENTS = 4_000_000
"""with at most so many numbers in their outputs,"""
LOSS_SAMPLES = 32
"""and with so many samples where targets come only with their inputs."""
STEP_BATCHES = 2
"""Such batches of a step of the user's own, which computes the model with the loss."""
NOT_A_MEAN = (
    "the loss is not a mean over samples (class weights, ignore_index, reduction='sum' or the like)"
)
NOT_BY_WEIGHT = (
    "the loss that the step returns for a batch is not the mean of its parts' losses by their"
    " weight (return as 'weight' how many tokens, or which sum of class weights, it is a mean by,"
    " or 'sum'; or the model looks across samples)"
)
CARRIES = (
    "the model carries state from one batch to the next (a hidden state that it keeps), which"
    " belongs to the batch as a whole (paceline.Pace trains columns with their state)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookedBack:
    """What is known of a model that is given one batch after another."""

    alike: int = 0
    """Samples that each batch of the proof must have, where their number must not change."""
    refusal: str = ""


def looked_back(task: Task, parts: Parts, plainly: Plainly, size: int) -> LookedBack:
    """Whether a model carries state between batches, of `size` samples or else whole ones."""
    whole = global_sampler(task, parts).batch_size
    divides = len(division(task.plan, task.plan.batch_size)) > 1
    who, remedy = name_of(task.plan), remedy_for(task)
    needed = 0
    try:
        carries = plainly.carries(*following_samples(task, parts, size))
    except Exception as error:  # the user's model: it may want whole batches
        try:
            carries = plainly.carries(*following_samples(task, parts, whole))
        except Exception:
            return LookedBack()  # it fails in any case, and says so where it is held against itself
        if divides and not carries:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return LookedBack(
                refusal=f"{who} divides batches, of which the model takes only those of {whole}"
                f" samples ({reason}); {remedy}"
            )
        needed = whole
    if carries and divides:
        return LookedBack(refusal=f"{who} divides batches, but {CARRIES}; {remedy}")
    return LookedBack(alike=needed or (size if carries else 0))


def judged(
    task: Task,
    plainly: Plainly,
    batches: list[Drawn],
    expected: ReferenceResult,
    comparison: WeightComparison,
    proof: Proof,
) -> Proof:
    """The proof with what was found, and the cause where something was."""
    proof = dataclasses.replace(proof, tensors=comparison.tensors, largest=comparison.largest)
    divides = len(division(task.plan, task.plan.batch_size)) > 1
    apart = _loss_of_real_batches(task, plainly, expected) if divides else 0.0
    if not comparison.differences and not apart:
        return dataclasses.replace(proof, passed=True)
    who, remedy = name_of(task.plan), remedy_for(task)
    if not comparison.differences:
        number = f" (its parts are {apart:.2g} off)" if math.isfinite(apart) else ""
        reason = f"{who} would give other weights: {_not_a_mean(plainly)}{number}; {remedy}"
        return dataclasses.replace(proof, reason=reason, cause="loss", error=_number(apart))
    found = comparison.differences[0]
    cause, why = _why(task, plainly, batches, expected, found, apart)
    return dataclasses.replace(
        proof,
        reason=f"{who} {found.sentence}: {why}; {remedy}",
        cause=cause,
        tensor=f"{found.name}|{found.entry}" if found.entry else found.name,
        error=_number(found.error),
    )


def _not_a_mean(plainly: Plainly) -> str:
    return NOT_A_MEAN if isinstance(plainly.parts.step, Supervised) else NOT_BY_WEIGHT


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _why(
    task: Task,
    plainly: Plainly,
    batches: list[Drawn],
    expected: ReferenceResult,
    found: Difference,
    apart: float,
) -> tuple[Cause, str]:
    """The cause of a difference, as far as plain trainings tell."""
    sizes, step = division(task.plan, batches[0].count), plainly.parts.step
    if apart:
        return "loss", _not_a_mean(plainly)
    if len(sizes) > 1 and expected.outputs is not None and isinstance(step, Supervised):
        targets = batches[0].whole().targets
        alike = len(expected.outputs) == len(targets)
        if alike and loss_apart(step, expected.outputs, targets, sizes):
            return "loss", NOT_A_MEAN
        if _looks_across(plainly, batches[0], sizes, expected.outputs):
            return "samples", "what the model gives for a sample depends on the rest of the batch"
    if found.name in expected.unused:
        return "parts", (
            "it takes no part in updates, which plain training leaves alone, but here weight decay"
            " or momentum moves it"
        )
    if len(sizes) > 1:
        divided = plainly.run(batches, expected.rate, divide=partial(division, task.plan))
        tolerance = TOLERANCE[task.plan.precision]
        if compare(divided.weights, divided.state, expected, tolerance=tolerance).differences:
            return "parts", "the model computes something else when a batch is divided"
    return "plan", f"the model computes something else {_when(task.plan)}"


def _when(plan: Plan) -> str:
    if plan.feature_layers:
        return "when its layers are split over hosts"
    if any(node.stages > 1 for node in plan.nodes):
        return "when it is cut into stages"
    if len(plan.nodes) > 1:
        return f"with exchange.kind = {plan.exchange!r}"
    if plan.memory_format != "contiguous":
        return f"in {plan.memory_format}, or with this strategy"
    return "with this strategy"


def _looks_across(
    plainly: Plainly, batch: Drawn, sizes: Sequence[int], whole: torch.Tensor
) -> bool:
    parts = plainly.outputs(batch, sizes)
    tolerance = TOLERANCE[plainly.precision]
    if parts.shape != whole.shape:
        return True
    apart = float(torch.linalg.vector_norm((parts - whole).float()))
    return not apart <= tolerance * float(torch.linalg.vector_norm(whole.float()))


def _loss_of_real_batches(task: Task, plainly: Plainly, expected: ReferenceResult) -> float:
    """How far, at most, the loss of a real batch is from the mean of its parts' losses.

    Labels that a loss leaves out or weighs differently may be rare: a few samples do not show them.
    The outputs are those of the first batch again and again, the targets are real.
    """
    outputs, source, step = expected.outputs, plainly.parts.dataset.train, plainly.parts.step
    if not isinstance(step, Supervised):
        return _loss_of_step(task, plainly)
    if outputs is None or outputs.dim() == 0 or len(outputs) == 0:
        return 0.0
    sampler = global_sampler(task, plainly.parts)
    most = max(2, LOSS_ELEMENTS // LOSS_BATCHES // max(1, outputs[0].numel()))
    known = source.targets is not None
    largest = 0.0
    for number in range(min(LOSS_BATCHES if known else 1, sampler.steps_per_epoch)):
        numbers = sampler.batch(0, number)[: most if known else LOSS_SAMPLES]
        if known:
            assert source.targets is not None
            targets = torch.from_numpy(source.targets[numbers])
        else:
            targets = source.fetch(numbers, epoch=0, augment=False)[1]
        targets = targets.to(outputs.device)
        rows = outputs[torch.arange(len(targets)) % len(outputs)]
        apart = loss_apart(step, rows, targets, division(task.plan, len(targets)))
        largest = max(largest, apart)
    return largest


def _loss_of_step(task: Task, plainly: Plainly) -> float:
    """The same of a step of the user's own, which computes the model too: on fewer samples."""
    sampler = global_sampler(task, plainly.parts)
    largest = 0.0
    for step in range(min(STEP_BATCHES, sampler.steps_per_epoch)):
        numbers = sampler.batch(0, step)[:LOSS_SAMPLES]
        sizes = division(task.plan, len(numbers))
        batch = Drawn(plainly.parts.dataset.train, numbers)
        largest = max(largest, step_apart(plainly, batch, sizes))
        if step == 0:
            few = dataclasses.replace(batch, numbers=numbers[: 2 * len(sizes) + 1])
            sizes = division(task.plan, few.count)
            largest = max(largest, step_apart_in_float64(plainly, few, sizes))
    return largest


def name_of(plan: Plan) -> str:
    """A plan in a word or two, as a sentence begins with it."""
    strategies = list(dict.fromkeys(n.strategy for n in plan.nodes if n.role == "worker"))
    name = " and ".join(f"`{strategy}`" for strategy in strategies)
    if plan.memory_format != "contiguous":
        name += f" in {plan.memory_format}"
    if plan.precision != "fp32":
        name += f" in {plan.precision}"
    if len(plan.nodes) > 1:
        name += f" on {len(plan.nodes)} nodes"
    return name


def remedy_for(task: Task) -> str:
    plan = task.plan
    if plan.feature_layers:
        return "set exchange.partition = 'none'"
    if len(plan.nodes) > 1:
        return "train on one host with local.strategy = 'threads'"
    if plan.memory_format != "contiguous" and strategy_of(plan.nodes[0]).is_plain:
        return "use numerics.memory_format = 'contiguous'"
    return "use local.strategy = 'threads'"
