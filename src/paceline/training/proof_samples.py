"""Which samples a plan is proved with, and into which parts it divides them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.sampler import apportion
from paceline.local.cutting import micro_batch_count
from paceline.schema import Plan
from paceline.training.assemble import Task, global_sampler
from paceline.training.parts import Parts
from paceline.training.reference import Drawn
from paceline.training.shares import worker_shares

LEAST = 2
"""Samples that every part should have: some models fail on a single one."""
MOST = 8
"""So many samples per part at most, to reach that."""
NORMALISED = 16
"""Samples whose statistics BatchNorm is proved with, if a batch has as many: those of fewer are
hardly more than rounding."""


def division(plan: Plan, total: int) -> list[int]:
    """Samples of every part of a batch whose loss is computed by itself."""
    found: list[int] = []
    counts = iter(apportion(total, worker_shares(plan, [node.share for node in plan.nodes])))
    for node in plan.nodes:
        for count in (next(counts) for _ in range(node.workers)):
            if node.stages > 1 and count:
                pieces = micro_batch_count(count, node.micro_batches)
                found += [count // pieces] * pieces
            elif node.stages == 1:
                found += apportion(count, [1.0] * node.replicas)
    return [count for count in found if count]


def update_sizes(plan: Plan, samples: int) -> tuple[int, int]:
    """Samples of the two updates: few, in unequal parts, the second smaller."""
    limit = max(1, min(plan.batch_size, samples))
    shares = worker_shares(plan, [node.share for node in plan.nodes])
    units = [node.replicas if node.stages == 1 else 1 for node in plan.nodes]
    needs = [n for node, n in zip(plan.nodes, units, strict=True) for _ in range(node.workers)]

    if len(needs) == 1 and plan.nodes[0].stages > 1:
        return min(6, limit), min(4, limit)  # both are divided into micro-batches, unequally

    def enough(total: int, least: int) -> bool:
        parts = apportion(total, shares)
        return all(
            part >= least * need
            for part, share, need in zip(parts, shares, needs, strict=True)
            if share > 0
        )

    most = min(limit, MOST * sum(needs))
    totals = [total for total in range(1, most + 1) if enough(total, LEAST)]
    totals = totals or [total for total in range(1, limit + 1) if enough(total, 1)] or [most]
    first = totals[0]
    if first < limit and len(set(apportion(first, shares))) == 1:
        first += 1
    return first, first - 1 if enough(first - 1, 1) and first > 1 else first


def normalised_size(plan: Plan, samples: int) -> int:
    """Samples of the update that BatchNorm's statistics are proved with."""
    limit = min(plan.batch_size, samples)
    return min(limit, max(NORMALISED + 1, update_sizes(plan, samples)[0]))


def drawn_samples(task: Task, parts: Parts, sizes: Sequence[int]) -> list[Drawn]:
    """Real samples, the first of the first epoch, without augmentation."""
    sampler = global_sampler(task, parts)
    order = np.resize(sampler.order(0), sum(sizes))
    ends = np.cumsum(sizes)
    return [
        Drawn(parts.dataset.train, order[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]


def following_samples(task: Task, parts: Parts, size: int) -> list[Drawn]:
    """The first samples of two batches, one after the other: what a state is carried between.

    Where an epoch has one batch only, the second are samples of that one, turned around.
    """
    sampler = global_sampler(task, parts)
    first, second = sampler.batch(0, 0), sampler.batch(0, 1)
    if len(second) < size:
        second = first[::-1]
    return [Drawn(parts.dataset.train, numbers[:size]) for numbers in (first, second)]
