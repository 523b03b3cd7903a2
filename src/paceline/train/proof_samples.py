"""Which samples a plan is proved with, and into which parts it divides them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.data.sampler import GlobalSampler, apportion
from paceline.local.cutting import micro_batch_count
from paceline.schema import Plan
from paceline.train.assemble import Task
from paceline.train.parts import Parts
from paceline.train.reference import Samples
from paceline.train.shares import worker_shares

LEAST = 2
"""Samples that every part should have: some models fail on a single one."""
MOST = 8
"""So many samples per part at most, to reach that."""
NORMALISED = 16
"""Samples of an update where BatchNorm normalises by them, if a batch has as many: what fewer have in
common is large, and rounding with it."""


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


def update_sizes(plan: Plan, samples: int, *, normalised: bool = False) -> tuple[int, int]:
    """Samples of the two updates: few, in unequal parts, the second smaller.

    `normalised`: the model has layers that normalise by all of them.
    """
    limit = max(1, min(plan.batch_size, samples))
    fewest = min(limit, NORMALISED) if normalised else 1
    shares = worker_shares(plan, [node.share for node in plan.nodes])
    units = [node.replicas if node.stages == 1 else 1 for node in plan.nodes]
    needs = [n for node, n in zip(plan.nodes, units, strict=True) for _ in range(node.workers)]

    if len(needs) == 1 and plan.nodes[0].stages > 1:
        # Both are divided into micro-batches, unequally.
        return min(max(6, fewest), limit), min(max(4, fewest - 4), limit)

    def enough(total: int, least: int) -> bool:
        parts = apportion(total, shares)
        return total >= fewest and all(
            part >= least * need
            for part, share, need in zip(parts, shares, needs, strict=True)
            if share > 0
        )

    most = min(limit, max(fewest, MOST * sum(needs)))
    totals = [total for total in range(1, most + 1) if enough(total, LEAST)]
    totals = totals or [total for total in range(1, limit + 1) if enough(total, 1)] or [most]
    first = totals[0]
    if first < limit and len(set(apportion(first, shares))) == 1:
        first += 1
    fewest = min(2, fewest)
    return first, first - 1 if enough(first - 1, 1) and first > 1 else first


def read_samples(task: Task, parts: Parts, sizes: Sequence[int]) -> list[Samples]:
    """Real samples, the first of the first epoch, without augmentation."""
    source = parts.dataset.train
    sampler = global_sampler(task, parts)
    order = np.resize(sampler.order(0), sum(sizes))
    inputs, targets = source.fetch(order, epoch=0, augment=False)
    return list(
        zip(torch.split(inputs, list(sizes)), torch.split(targets, list(sizes)), strict=True)
    )


def global_sampler(task: Task, parts: Parts) -> GlobalSampler:
    return GlobalSampler(
        samples=len(parts.dataset.train),
        batch_size=task.plan.batch_size,
        seed=task.config.seed,
    )
