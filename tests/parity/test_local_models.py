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


@pytest.mark.world_size(2)
@pytest.mark.timeout(300)
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
    for micro_batches, names in ((1, ("Tokens", "AccumulatedHook", "NoGrad")), (2, ())):
        for case in cases(pipeline | {"micro_batches": micro_batches}, *names):
            every.append((case, MODELS[case.model][1]))
    for name, words in ONLY_STAGES.items():
        every.append((Odd(model=name, node=pipeline | {"micro_batches": 2}), words))
    found = run_odd(tmp_path, [case for case, _ in every])
    failures = []
    for (case, refusal), result in zip(every, found, strict=True):
        try:
            check(case, result, refusal)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)
