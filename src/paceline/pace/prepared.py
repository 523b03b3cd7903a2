"""What a loop of one's own has handed to `pace.prepare`: all that ranks must have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.errors import UnsupportedError, UserError
from paceline.local.base import OptimizerState
from paceline.local.state import OwnOptimizer
from paceline.pace.gradients import Gradients, check_trainable, share_statistics
from paceline.pace.keeping import (
    OWN,
    load_models,
    load_optimizers,
    model_state,
    of_this_loop,
    optimizer_states,
)
from paceline.pace.ranks import Ranks
from paceline.training.checkpoint import check_model, pack_state, unpack_state
from paceline.training.optimizers import needs_closure


class Prepared:
    """Models, optimizers, and what else has a state_dict."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.gradients = Gradients(ranks)
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.others: list[Any] = []
        self._states: list[OwnOptimizer] = []
        self._more: dict[str, torch.Tensor] = {}
        """Parameters that belong to no model."""

    def add_model(self, model: nn.Module, *, exact: bool) -> None:
        """`exact`: BatchNorm over the whole batch."""
        check_trainable(model)
        check_model(model)
        before = f"{len(self.models)}."
        self.models.append(model)
        for name, parameter in model.named_parameters():
            self.gradients.add(f"{before}{name}", parameter)
        if exact:
            share_statistics(model, self._ranks)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._ranks.size > 1 and needs_closure(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} decides by each rank's own loss what to do next (its"
                " step() needs a closure): use one whose step() takes gradients, or one rank"
            )
        # What belongs to no model (a learned temperature) is trained all the same.
        for place, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = f"optimizer{len(self.optimizers)}.{place}.{number}"
                if self.gradients.add(name, parameter):
                    self._more[name] = parameter
        self.optimizers.append(optimizer)
        self._states.append(OwnOptimizer(optimizer, self.gradients.named.items()))

    def check_same(self) -> None:
        """Refuse ranks that train different things."""
        mine = [f"{name} {list(p.shape)} {p.dtype}" for name, p in self.gradients.named.items()]
        if any(other != mine for other in self._ranks.gather(mine)):
            raise UserError(
                "the ranks have prepared different models: build them from the same arguments on"
                " every rank"
            )

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.gradients.named.values())

    def buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for model in self.models for buffer in model.buffers())

    def spread(self) -> None:
        """The first rank's weights and buffers on every rank."""
        self._ranks.spread([*self.gradients.named.values(), *self.buffers()])

    def hand_over(self) -> None:
        """All that the first rank has, on every rank that works now."""
        self.gradients.forget()
        self.spread()
        if len(self._ranks.members) == 1:
            return
        own = {"others": [each.state_dict() for each in self.others]}
        numbers, tensors = pack_state(self.optimizer_state() | {OWN: own})
        places = [
            [k, str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()
        ]
        text = json.dumps([numbers, places]).encode() if self._ranks.is_first else b""
        numbers, places = json.loads(self._ranks.spread_bytes(text))
        if not self._ranks.is_first:
            tensors = {k: torch.empty(shape, dtype=getattr(torch, d)) for k, d, shape in places}
        self._ranks.spread(tensors.values())
        if not self._ranks.is_first:
            state = unpack_state(numbers, tensors)
            self._load_others(state.pop(OWN)["others"])
            load_optimizers(self._states, state)

    def model_state(self) -> dict[str, Any]:
        return model_state(self.models, self._more)

    def optimizer_state(self) -> OptimizerState:
        return optimizer_states(self._states)

    def load(self, model: dict[str, Any], optimizer: OptimizerState, others: list[Any]) -> None:
        """What a checkpoint has."""
        load_models(self.models, self._more, model)
        load_optimizers(self._states, optimizer)
        self._load_others(others)

    def _load_others(self, states: list[Any]) -> None:
        with of_this_loop():
            for thing, state in zip(self.others, states, strict=True):
                thing.load_state_dict(state)
