"""Learning rates by one of torch's schedulers, as a function of how far the training is.

A scheduler counts its own steps. Legs, ranks and resumed runs begin in the middle, so nobody keeps
one: it is made anew over an optimizer that trains nothing, and stepped to where the training is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError, PacelineError, UnsupportedError
from paceline.local.base import OptimizerFactory

Scheduler = Callable[[torch.optim.Optimizer], Any]


class OwnSchedule:
    """The rate of every epoch (or update), relative to the one the optimizer was made with."""

    def __init__(
        self, make: Scheduler, build: OptimizerFactory, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._make, self._build = make, build
        self._shapes = [(tuple(p.shape), p.dtype) for p in parameters]
        self._begin()

    def factor(self, count: int) -> float:
        """After so many steps of the scheduler."""
        if count < self._count:
            self._begin()
        while self._count < count:
            self._optimizer.step()  # there are no gradients: it does nothing
            self._scheduler.step()
            self._count += 1
        if self._others() != self._before:
            raise UnsupportedError(
                f"{self._name} moves more than the learning rate (as momentum), which Paceline does"
                " not follow: tell it not to, as with cycle_momentum=False"
            )
        factors = sorted(
            group["lr"] / rate if rate else 1.0
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True)
        )
        if factors[-1] - factors[0] > 1e-9:
            raise UnsupportedError(
                f"{self._name} moves the rates of the optimizer's groups by different factors"
                f" ({', '.join(f'{each:g}' for each in factors)}), and Paceline moves all by one:"
                " let it treat them alike"
            )
        return float(factors[-1])

    def _begin(self) -> None:
        # One number each that stands for all of a parameter's.
        stand_ins = [
            nn.Parameter(torch.zeros((), dtype=kind).expand(shape), requires_grad=False)
            for shape, kind in self._shapes
        ]
        self._optimizer = self._build(stand_ins)
        self._count, self._before = 0, self._others()
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        made = getattr(self._make, "__qualname__", type(self._make).__qualname__)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._scheduler = self._make(self._optimizer)
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"scheduler {made}: calling it with the optimizer raised {type(error).__name__}:"
                f" {' '.join(str(error).split())}; correct it"
            ) from error
        self._name = type(self._scheduler).__name__
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise UnsupportedError(
                "ReduceLROnPlateau decides by losses, which legs and resumed runs do not hear of:"
                " use a scheduler that counts, as StepLR, or a loop of your own (paceline.Pace)"
            )
        if not isinstance(self._scheduler, LRScheduler):
            raise ConfigError(
                f"scheduler {made} gave {self._name}: it must give one of"
                " torch.optim.lr_scheduler, made for the optimizer that it is called with"
            )

    def _others(self) -> list[dict[str, Any]]:
        own = ("params", "lr", "initial_lr", "max_lr", "min_lr")
        return [
            {key: value for key, value in group.items() if key not in own}
            for group in self._optimizer.param_groups
        ]
