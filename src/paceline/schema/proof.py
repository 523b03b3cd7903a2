"""What the proof of a plan found: `proof.json` of a run, and its entry in the cache; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FORMAT = 3

Cause = Literal["", "loss", "samples", "carried", "parts", "plan", "outside"]
"""Why a plan gives other weights:

- loss: the loss of a batch is not the mean over its samples, so that its parts do not add up;
- samples: what the model gives for a sample depends on the others of the batch;
- carried: what the model gives for a batch depends on the batch before;
- parts: what the plan does to a batch's parts, whatever the reason;
- plan: something else in the plan;
- outside: the user's functions keep a state outside of the model, which the plan would not share.
"""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A few updates on a copy, with a plan and plainly, and how far they were apart."""

    format: int = FORMAT
    key: str = ""
    """The same for the same plan, workload, data, code and versions; empty: not to be kept."""
    passed: bool = False
    reason: str = ""
    """One sentence, where it did not pass."""
    cause: Cause = ""
    tensor: str = ""
    """What differed first."""
    error: float | None = None
    """Relative to how far the tensor moved; None where there is no number."""
    tolerance: float = 0.0
    largest: float = 0.0
    """The largest relative error of all tensors, where it passed."""
    tensors: int = 0
    """How many were compared: weights, buffers and entries of the optimizer."""
    samples: tuple[int, ...] = ()
    """Of each update."""
    seconds: float = 0.0
