"""How much of an update's data one core writes and another reads."""

from __future__ import annotations

from paceline.cost.memory import Footprint
from paceline.schema import NodePlan


def crossing_mb(footprint: Footprint, node: NodePlan, *, batch_size: int) -> float | None:
    """MB between the cores of a node in every update, in fp32; None where this cannot tell.

    2 x activations x (T - 1) / T   threads divide a layer now by samples, now by channels:
                                    forward and backward, most of it is read by another core
    + 2 x (C - 1) x weights         copies of the gradient to who sums them, weights back

    >>> small = Footprint(parameter_mb=2.8, activation_mb=0.3, optimizer_slots=1)
    >>> crossing_mb(small, NodePlan(strategy="threads", threads=2), batch_size=128)
    38.4
    >>> crossing_mb(small, NodePlan(strategy="processes", processes=2), batch_size=128)
    5.6
    """
    if node.strategy not in ("sequential", "threads", "replicas", "processes"):
        return None
    within = 2 * footprint.activation_mb * batch_size * (node.threads - 1) / node.threads
    copies = node.replicas * node.processes
    return within + 2 * (copies - 1) * footprint.parameter_mb
