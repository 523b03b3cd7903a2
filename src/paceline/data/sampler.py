"""Which samples each worker takes in each update: pure arithmetic on one seed.

Nothing is kept between calls but a cache, so a position in the middle of an
epoch is just the pair (epoch, step), and any worker can be asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.errors import ConfigError


def apportion(count: int, shares: Sequence[float], least: int = 1) -> list[int]:
    """Split `count` samples in proportion to shares, by largest remainder.

    The parts add up to `count`; a share of 0 gets nothing; equal shares differ
    by at most one, the first ones getting the odd samples. A part that would have fewer
    than `least` samples gets none, the smallest share first, the others then divide the
    samples; a `count` below `least` stays in one piece.

    >>> apportion(10, [2, 1])
    [7, 3]
    >>> apportion(128, [20, 1])
    [122, 6]
    >>> apportion(5, [1, 1, 1, 1], least=2)
    [3, 2, 0, 0]
    """
    total = math.fsum(shares)
    if not shares or total <= 0 or any(share < 0 or not math.isfinite(share) for share in shares):
        raise ConfigError(
            f"shares {list(shares)} must be numbers of at least 0, one of them above 0"
        )
    shares = list(shares)
    while True:
        parts = _largest_remainder(count, shares)
        small = [i for i, part in enumerate(parts) if 0 < part < least]
        if not small or sum(share > 0 for share in shares) == 1:
            return parts
        shares[min(small, key=lambda i: (shares[i], -i))] = 0.0


def _largest_remainder(count: int, shares: Sequence[float]) -> list[int]:
    total = math.fsum(shares)
    exact = [count * share / total for share in shares]
    parts = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return parts


class GlobalSampler:
    """The global shuffle: one permutation per epoch, cut into global batches.

    >>> sampler = GlobalSampler(samples=5, batch_size=2, seed=0)
    >>> sampler.steps_per_epoch
    3
    >>> sorted(i for step in range(3) for i in sampler.batch(0, step).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, samples: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if samples < 1:
            raise ConfigError(f"{samples} samples cannot be trained on: at least 1 is needed")
        self.samples, self.shuffle = samples, shuffle
        self.batch_size = min(batch_size, samples)
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        """Updates per epoch; the last one may have fewer samples."""
        return -(-self.samples // self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """All samples in the order of this epoch."""
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            numbers = np.arange(self.samples)
            self._order = generator.permutation(self.samples) if self.shuffle else numbers
            self._epoch = epoch
        return self._order

    def batch(self, epoch: int, step: int) -> np.ndarray:
        start = step * self.batch_size
        return self.order(epoch)[start : start + self.batch_size]

    def part(
        self, epoch: int, step: int, shares: Sequence[float], worker: int, least: int = 1
    ) -> np.ndarray:
        """The samples of one global batch that one worker takes: none, or at least `least`."""
        batch = self.batch(epoch, step)
        sizes = apportion(len(batch), shares, least)
        start = sum(sizes[:worker])
        return batch[start : start + sizes[worker]]
