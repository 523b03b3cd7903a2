"""Other people's models by every local strategy: the weights of plain PyTorch, or a refusal.

Never a crash, and never other weights. Plain PyTorch is a loop that knows nothing of Paceline;
weights, buffers and optimizer state are compared (rtol 1e-4, atol 1e-5; Adam: atol 1e-4).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_cases import Odd, alone, plain, run_odd

# isort: split
from runs import assert_same

from paceline import local
from paceline.data.samples import Stacked

EXACT = ""
"""The expected words of a refusal that does not come."""
HOOK = "cannot keep"
MEMORY = "lies in the memory of the parameter"

# model: what `replicas`, and what `pipeline`, says of it; every other strategy trains it exactly
MODELS: dict[str, tuple[str, str]] = {
    "Plain": (EXACT, EXACT),
    "OwnFunction": (EXACT, "autograd function ClampGradient"),
    "OwnFunctionAtRest": (EXACT, "autograd function ClampGradient"),
    "NoGrad": (EXACT, EXACT),
    "ActivationHook": (EXACT, "registers the gradient hook"),
    "QuietActivationHook": (EXACT, "registers the gradient hook"),
    "MaskedParameter": (EXACT, EXACT),
    "ClampedParameter": (EXACT, EXACT),
    "AccumulatedHook": (EXACT, EXACT),
    "BackwardHook": (f"the layer second has a backward hook.*{HOOK}",) * 2,
    "ForwardHook": (f"the layer second has a forward hook.*{HOOK}",) * 2,
    "Counter": (EXACT, "changes calls"),
    "Reassigned": (EXACT, "changes the buffer seen"),
    "Overwritten": (EXACT, "changes the buffer seen"),
    "HistoryInObject": (EXACT, "changes log"),
    "Unused": (EXACT, EXACT),
    "SometimesUsed": (EXACT, "changes calls"),
    "Tokens": (EXACT, EXACT),
    "EitherType": (EXACT, EXACT),
    "TwoParametersOneMemory": (f"{MEMORY} second.weight",) * 2,
    "ViewOfWeight": (f"view {MEMORY} second.weight",) * 2,
    "Lazy": ("second.weight is not known before the model has run",) * 2,
    "Parametrized": (EXACT, EXACT),
    "OldSpectralNorm": (f"the layer second has a forward pre-hook.*{HOOK}",) * 2,
    "OnePixel": (EXACT, EXACT),
}
ONLY_STAGES = {
    "PythonDepth": "draws random numbers",
    "SizeBranch": "by other operations than",
    "SizeFactor": "by other operations than",
    "InitialisedByData": "changes the parameter shift|changes fresh",
}
"""Models that several workers would train otherwise than one: what `pipeline` says of them."""
EVERYWHERE = {"Lazy"}
"""Models that no strategy takes."""
NOT_IN_RANKS = {"TwoParametersOneMemory", "ViewOfWeight"}
"""Models that ranks which share weights do not take."""
DDP = ("Plain", "ClampedParameter", "AccumulatedHook", "Unused", "SometimesUsed", "ViewOfWeight")
ADAM = ("SometimesUsed", "Unused", "ClampedParameter")


def cases(node: dict[str, Any], *names: str) -> list[Odd]:
    """Every model, and some again with Adam and clipping."""
    every = [Odd(model=name, node=node) for name in names or MODELS]
    return every + [
        Odd(model=name, node=node, optimizer="adam", clip_norm=0.5)
        for name in ADAM
        if not names or name in names
    ]


def check(case: Odd, found: dict[str, torch.Tensor] | str, refusal: str) -> None:
    if refusal:
        assert isinstance(found, str), f"{case} was trained"
        assert re.search(refusal, found), f"{case}: {found}"
        assert "\n" not in found
        return
    assert not isinstance(found, str), f"{case}: {found}"
    try:
        assert_same(found, plain(case), atol=1e-4 if case.optimizer == "adam" else 1e-5)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("case", cases({"strategy": "threads", "threads": 2}), ids=str)
def test_threads(case: Odd) -> None:
    check(case, alone(case), MODELS[case.model][0] if case.model in EVERYWHERE else EXACT)


@pytest.mark.parametrize("case", cases({"strategy": "replicas", "replicas": 2}), ids=str)
def test_replicas(case: Odd) -> None:
    check(case, alone(case), MODELS[case.model][0])


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_ranks(tmp_path: Path) -> None:
    """`processes` both ways and `pipeline` with one and two micro-batches, in one set of ranks."""
    processes = {"strategy": "processes", "processes": 2}
    pipeline = {"strategy": "pipeline", "stages": 2}
    every: list[tuple[Odd, str]] = []
    for node in (processes, processes | {"sync": "ddp"}):
        for case in cases(node, *(DDP if "sync" in node else ())):
            shares = "sync" not in node
            refused = case.model in EVERYWHERE or (shares and case.model in NOT_IN_RANKS)
            every.append((case, MODELS[case.model][0] if refused else EXACT))
    for micro_batches, names in ((1, ("Tokens", "AccumulatedHook")), (2, ())):
        for case in cases(pipeline | {"micro_batches": micro_batches}, *names):
            every.append((case, MODELS[case.model][1]))
    # Wherever it is cut: what lies before the block gets no gradient, not one of zeros.
    for cut in ("tanh", "tanh_1", "third", "head"):
        every.append((Odd(model="NoGrad", node=pipeline | {"split_at": (cut,)}), EXACT))
    for name, words in ONLY_STAGES.items():
        every.append((Odd(model=name, node=pipeline | {"micro_batches": 2}), words))
    rounded = Odd(model="MaskedParameter", node=processes, precision="bf16")
    chance = [
        Odd(model=name, node=pipeline | {"micro_batches": 2})
        for name in ("FunctionalDropout", "HeldDropout", "TorchDepth")
    ]
    found = run_odd(tmp_path, [*(case for case, _ in every), *chance, rounded])
    # What draws in every pass is kept by its trace, and has nothing to be compared with.
    for case, drawn in zip(chance, found[len(every) :], strict=False):
        assert not isinstance(drawn, str), f"{case}: {drawn}"
    masked = found[-1]
    # With weights rounded once per node, a twin computes in the parameter's place.
    assert not isinstance(masked, str)
    assert_same(masked, plain(rounded), rtol=1e-2, atol=1e-3)
    failures = []
    for (case, refusal), result in zip(every, found, strict=False):
        try:
            check(case, result, refusal)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("model", ["FunctionalDropout", "MonteCarlo", "PythonDepth", "TorchDepth"])
def test_replicas_refuse_random_numbers_that_would_not_repeat(model: str) -> None:
    found = alone(Odd(model=model, node={"strategy": "replicas", "replicas": 2}))
    assert isinstance(found, str)
    assert re.search(f"{model} draws random numbers other than those of nn.Dropout", found)


def test_replicas_change_dropout_in_its_place() -> None:
    """Also for whoever else holds the layer: the list that it is used from."""
    case = Odd(model="HeldDropout", node={"strategy": "replicas", "replicas": 2})
    first, second = alone(case), alone(case)
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dropout_of_everything_is_zero_in_replicas() -> None:
    case = Odd(model="AllDropped", node={"strategy": "replicas", "replicas": 2})
    check(case, alone(case), EXACT)


def test_state_that_replicas_have_reached_is_the_models() -> None:
    """A counter of the first replica is the model's that is evaluated and saved."""
    case = Odd(model="Counter", node={"strategy": "replicas", "replicas": 2})
    strategy = local.build(case.job())
    for step, (inputs, targets) in enumerate(case.batches()):
        strategy.update(Stacked(inputs, targets), len(targets), step)
    strategy.prepare_evaluation()
    assert strategy.model.calls == len(case.sizes)
    strategy.close()


NARROW = (8, 3, 2, 5)
"""Batches that leave a worker a single sample, which BatchNorm normalises by all samples."""


@pytest.mark.parametrize("strategy", ["threads", "replicas"])
def test_a_single_sample_cannot_be_normalised_by_anyone(strategy: str) -> None:
    node = {"strategy": strategy, **({"replicas": 2} if strategy == "replicas" else {})}
    found = alone(Odd(model="Normalised", node=node, sizes=(8, 1)))
    assert isinstance(found, str)
    assert re.match("DataError: a batch of 1 sample .* workload.batch_size that leaves no", found)


def test_batch_norm_in_replicas_with_parts_of_one_sample_and_none() -> None:
    for replicas in (2, 3):
        node = {"strategy": "replicas", "replicas": replicas}
        found = alone(Odd(model="Normalised", node=node, sizes=NARROW))
        assert not isinstance(found, str), found


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_four_ranks(tmp_path: Path) -> None:
    """Rows of stages, and parts that are too small for a BatchNorm of their own."""
    hybrid = {"strategy": "hybrid", "replicas": 2, "stages": 2, "micro_batches": 2}
    processes = {"strategy": "processes", "processes": 4}
    exact = [
        *cases(hybrid, "Plain", "AccumulatedHook", "Unused", "Tokens"),
        *cases(processes, "ClampedParameter", "SometimesUsed"),
    ]
    narrow = [
        Odd(model="Normalised", node=node, sizes=NARROW)
        for node in (hybrid | {"micro_batches": 1}, processes, processes | {"sync": "ddp"})
    ]
    found = run_odd(tmp_path, [*exact, *narrow])
    for case, result in zip(exact, found, strict=False):
        check(case, result, EXACT)
    for case, result in zip(narrow, found[len(exact) :], strict=True):
        assert not isinstance(result, str), f"{case}: {result}"
        assert all(bool(tensor.isfinite().all()) for tensor in result.values()), case
