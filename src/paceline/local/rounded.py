"""Weights rounded to bf16 once per update of a node, instead of in every pass of every rank.

Autocast rounds the weights of a layer in the forward pass and turns their gradient back into
fp32 in the backward pass. With several ranks on a node each does so for the whole model, and
passes twice as many bytes to the others as the gradient has digits. Here the rounded
weights lie in shared memory, each rank rounds the pieces that it updates, layers compute with
them, and gradients stay as they were computed until they are summed, in fp32. The numbers
are the same, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.local.base import Job
from paceline.local.shared import SharedModel, shaped
from paceline.local.single_pixel import SinglePixelConv2d

LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    SinglePixelConv2d,
)
"""Whose weights and biases autocast rounds, all of them, and does nothing else with."""


def can_round(job: Job) -> bool:
    """Whether layers of this job compute with weights rounded to bf16 on the CPU."""
    return job.precision == "bf16" and job.device.type == "cpu" and not job.compile


class RoundedWeights:
    """A bf16 twin of each weight that layers round anyway, shared by the ranks of a node."""

    def __init__(self, shared: SharedModel, names: Sequence[str]) -> None:
        """`names`: the parameters that are trained."""
        self.twins: dict[str, torch.Tensor] = {}
        self._active = False
        self._hooks: list[Any] = []
        uses = Counter(id(p) for _, p in shared.model.named_parameters(remove_duplicate=False))
        layers: dict[nn.Module, list[tuple[str, nn.Parameter, torch.Tensor]]] = {}
        for name in names:
            parameter = shared.parameters[name]
            path, _, attribute = name.rpartition(".")
            layer = shared.model.get_submodule(path)
            plain = type(layer) in LAYERS and attribute in ("weight", "bias")
            if plain and uses[id(parameter)] == 1:
                place = shared.place(shared.rounded, name)
                self.twins[name] = shaped(place, parameter).detach().requires_grad_()
                layers.setdefault(layer, []).append((attribute, parameter, self.twins[name]))
        for layer, entries in layers.items():
            self._watch(layer, entries)

    def _watch(
        self, layer: nn.Module, entries: list[tuple[str, nn.Parameter, torch.Tensor]]
    ) -> None:
        """Exchange weights within the layer's own forward pass: code around it sees fp32."""
        held: dict[str, Any] = layer._parameters

        def enter(*_: object) -> None:
            if self._active:
                held.update({attribute: twin for attribute, _, twin in entries})

        def leave(*_: object) -> None:
            held.update({attribute: parameter for attribute, parameter, _ in entries})

        self._hooks.append(layer.register_forward_pre_hook(enter))
        # Inside of hooks of the user's own, which see the layer as it is.
        self._hooks.append(layer.register_forward_hook(leave, prepend=True, always_call=True))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Layers compute with the rounded weights."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def close(self) -> None:
        """Leave the layers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
