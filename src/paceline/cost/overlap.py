"""How much of an exchange hides under backward: buckets on one network lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BUCKET = 8 * 2**20
"""Size of a bucket, in bytes: `exchange.bucket_mb` where nobody sets it."""
FIRST_BUCKET = 2**20
"""The first bucket leaves as soon as it has so many bytes, as DistributedDataParallel's does."""


@dataclass(frozen=True)
class BucketCost:
    """Gradients that are exchanged together."""

    size: float
    ready: float
    """Seconds after backward began at which the last of its gradients is there."""


def buckets(
    backward: Sequence[tuple[float, float]],
    *,
    size: float = BUCKET,
    first: float = FIRST_BUCKET,
) -> list[BucketCost]:
    """Gradients in the order in which backward gives them, filled into buckets.

    `backward` has (seconds, gradient bytes) per layer, the last layer first. A bucket holds
    at most its size, or one layer that is larger; the first one is closed as soon as it has
    `first` bytes, so that the network starts early. It is ready when its last layer is: at the
    sum of the seconds up to there.

    >>> buckets([(1.0, 10), (1.0, 10), (2.0, 10)], size=20, first=10)
    [BucketCost(size=10.0, ready=1.0), BucketCost(size=20.0, ready=4.0)]
    """
    found: list[BucketCost] = []
    elapsed = filled = ready = 0.0
    for seconds, gradient in backward:
        if filled and (filled + gradient > size or (not found and filled >= first)):
            found.append(BucketCost(filled, ready))
            filled = 0.0
        elapsed += seconds
        if gradient:
            filled, ready = filled + gradient, elapsed
    if filled:
        found.append(BucketCost(filled, ready))
    return found


def exposed_seconds(
    waiting: Sequence[BucketCost],
    backward_seconds: float,
    seconds: Callable[[float], float],
    *,
    slowdown: float = 1.0,
    taken: float = 0.0,
) -> float:
    """Communication that does not hide under backward.

    Backward and one network lane run side by side and hinder each other: while a bucket is
    under way and backward still computes, a second brings

        backward   1 - taken seconds further        the bucket   1 / slowdown seconds further

    and otherwise each its own second. exposed = when both have ended - backward alone.
    Without hindrance that is max(0, end of the lane - end of backward); with
    taken <= 1/slowdown it is at most the sum of all buckets' times.
    """
    now = done = 0.0
    for bucket in waiting:
        if bucket.ready > done:
            now, done = now + bucket.ready - done, bucket.ready
        left, computing = seconds(bucket.size), backward_seconds - done
        if computing > 0:
            both = left * slowdown
            if both * (1 - taken) > computing:
                both = computing / (1 - taken)
            done += both * (1 - taken)
            left = max(0.0, left - both / slowdown)
            now += both
        now += left
    return max(0.0, now + max(0.0, backward_seconds - done) - backward_seconds)
