"""How much memory a way to train needs, before it is tried."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.schema import NodePlan
from paceline.schema.strategies import strategy_of

BASE_MB = 260.0
"""A Python process with torch loaded and its kernels warm (measured: 230 to 280)."""
WORKSPACE = 2.0
"""Gradients of activations and the kernels' scratch, in units of what forward keeps."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a model takes, independent of how it is run."""

    parameter_mb: float
    activation_mb: float
    """What forward keeps for one sample, in fp32."""
    optimizer_slots: int
    """Numbers that the optimizer keeps per weight: 0 plain SGD, 1 momentum, 2 Adam."""
    batch_mb: float = 0.0
    """One global batch of inputs."""


def estimate_mb(footprint: Footprint, node: NodePlan, *, batch_size: int, precision: str) -> float:
    """Peak memory of all processes of a node together, in MB.

    processes x base + weights + optimizer slots x weights + copies of the gradient
    + activations of the samples in flight x (1 + workspace)

    Gradients: one copy in one process; one per replica; one private and one
    published per process; in a pipeline the stages' copies add up to one.
    """
    weights = footprint.parameter_mb
    strategy = strategy_of(node)
    copies = float(getattr(node, strategy.copies)) if strategy.copies else 1.0
    if strategy.shares_memory:
        copies *= 2.0
    if node.sync == "ddp":
        copies += (1.0 + footprint.optimizer_slots) * (node.processes - 1)
    kept = footprint.activation_mb * batch_size * (1.0 + WORKSPACE)
    if precision == "bf16":
        # Half-size activations, but a bf16 copy of the weights beside the fp32 ones.
        kept, copies = kept * 0.6, copies + 0.5 * node.workers
    return (
        node.ranks * BASE_MB
        + weights * (1.0 + footprint.optimizer_slots + copies)
        + kept
        + 2.0 * footprint.batch_mb
    )


def standby_mb(ranks: int, *, own_mb: float, weights_mb: float) -> float:
    """What ranks take while they train beside a process that keeps what it has, in MB.

    own_mb + ranks x (base + 2 x weights)

    Together they hold what the process that led the training until now holds (weights, optimizer,
    the activations of a batch), and each a process and two copies of the gradient.
    """
    return own_mb + ranks * (BASE_MB + 2.0 * weights_mb)


def spread_mb(
    footprint: Footprint,
    node: NodePlan,
    *,
    samples: int,
    precision: str = "fp32",
    held: float = 1.0,
    server_part: float = 0.0,
    bucket_mb: float = 8.0,
) -> float:
    """Peak memory of a node that trains together with others, in MB.

    estimate_mb with `held` of the weights and `samples` of the batch
    + two buckets on their way, at most the held weights
    + server_part x weights x (2 + optimizer slots)

    `held` is the part of the weights that the node has (less than 1 with a feature
    partition or a pipeline over nodes), `server_part` what a parameter server beside the
    worker holds: weights, a gradient being summed, and the optimizer's numbers.
    """
    weights = footprint.parameter_mb * held
    here = dataclasses.replace(footprint, parameter_mb=weights)
    own = estimate_mb(here, node, batch_size=samples, precision=precision)
    buffers = min(2 * bucket_mb, weights)
    server = server_part * footprint.parameter_mb * (2.0 + footprint.optimizer_slots)
    return own + buffers + server
