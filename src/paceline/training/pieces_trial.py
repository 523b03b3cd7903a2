"""Whether an optimizer of the user's own treats every number by itself: tried, not asked.

Ranks that share memory, stages and split layers update pieces of parameters. That is right where an
optimizer does the same to a piece as to the whole (Adadelta, RMSprop, most that one writes), and
wrong where it looks at a parameter's shape, norm or neighbours (Muon, LARS, decay by shape).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from paceline.data.items import random_kept, seed_all
from paceline.local.base import OptimizerFactory
from paceline.local.pieces import COUNTER
from paceline.local.state import WHOLE, OwnOptimizer

SHAPES = ((6, 5), (5,), (3, 2, 3, 3), (4, 1), (), (2, 8))
UPDATES = 4
LATER = (10, 100, 1_000, 10_000, 100_000)
"""Updates of which one more is tried each, as if all before had been made: what an optimizer does
after a warm-up (a trust ratio, a projection) shows only then."""


def acts_on_pieces(build: OptimizerFactory) -> bool:
    """True where pieces of parameters end as the same pieces of whole ones, and nothing is kept
    that belongs to no number of a parameter."""
    with contextlib.suppress(Exception), random_kept():  # if it raises, it gets whole parameters
        seed_all(0)
        return _agree(build)
    return False


def _agree(build: OptimizerFactory) -> bool:
    whole = [nn.Parameter(torch.randn(shape) + 0.5) for shape in SHAPES]
    pieces = [[nn.Parameter(part.clone()) for part in _cut(each.detach())] for each in whole]
    flat = [part for parts in pieces for part in parts]
    first, second = build(whole), build(flat)
    kept = [
        OwnOptimizer(optimizer, [(str(n), p) for n, p in enumerate(parameters)])
        for optimizer, parameters in ((first, whole), (second, flat))
    ]
    begun = [each.read()[WHOLE] for each in kept]
    for update in range(UPDATES):
        _update(whole, pieces, without=update)  # a layer without a gradient now and then
        first.step()
        second.step()
    for count in LATER:
        _update(whole, pieces, without=None)
        for optimizer in (first, second):
            _pass_over(optimizer, count)
            optimizer.step()
    ends = [each.read() for each in kept]
    return (
        all(_same(each, parts) for each, parts in zip(whole, pieces, strict=True))
        and all(end.pop(WHOLE) == start for end, start in zip(ends, begun, strict=True))
        and _states_agree(first, second, whole, pieces)
    )


def _update(
    whole: list[nn.Parameter], pieces: list[list[nn.Parameter]], *, without: int | None
) -> None:
    """New gradients, of very different sizes."""
    for number, (each, parts) in enumerate(zip(whole, pieces, strict=True)):
        has_none = number == without
        each.grad = None if has_none else torch.randn(each.shape) * 10.0 ** (number - 2)
        for part, gradient in zip(parts, _cut(each.grad), strict=True):
            part.grad = None if gradient is None else gradient.clone()


def _pass_over(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Let the optimizer's counters say that so many updates have been made."""
    for state in optimizer.state.values():
        counter = state.get(COUNTER)
        if isinstance(counter, torch.Tensor):
            counter.fill_(count)
        elif counter is not None:
            state[COUNTER] = count


def _cut(tensor: torch.Tensor | None) -> list[Any]:
    """Two uneven pieces in memory order; one of a single number."""
    if tensor is None:
        return [None, None]
    numbers = tensor.reshape(-1)
    at = len(numbers) // 3
    return [numbers[:at], numbers[at:]] if at else [numbers, numbers[:0]]


def _same(whole: torch.Tensor, parts: list[Any]) -> bool:
    joined = torch.cat([part.detach() for part in parts])
    return torch.allclose(joined, whole.detach().reshape(-1), rtol=1e-6, atol=1e-8)


def _states_agree(
    first: torch.optim.Optimizer,
    second: torch.optim.Optimizer,
    whole: list[nn.Parameter],
    pieces: list[list[nn.Parameter]],
) -> bool:
    for each, parts in zip(whole, pieces, strict=True):
        state, states = first.state[each], [second.state[p] for p in parts if p.numel()]
        if any(other.keys() != state.keys() for other in states):
            return False
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or key == COUNTER:
                if key != COUNTER or any(float(o[key]) != float(value) for o in states):
                    return False
            elif value.shape != each.shape or not _same(value, [o[key] for o in states]):
                return False
    return True
