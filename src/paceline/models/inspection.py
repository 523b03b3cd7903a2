"""Looks at a model by running one sample of zeros through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ModelError
from paceline.models.summary import LayerSummary, ModelSummary


@dataclass
class _Call:
    """A layer that is running: operations before it, and those of layers inside it."""

    before: int
    inside: int = 0


class _Recorder:
    """Forward hooks on every layer that has no layers inside or parameters of its own."""

    def __init__(self, module: nn.Module, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.calls: list[_Call] = []
        # In the order of the first call; a layer called twice (a ReLU) is one row.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.flops: dict[str, int] = {}
        self.handles: list[Any] = []
        for name, layer in module.named_modules():
            if _is_layer(layer):
                self._watch(name, layer)

    def _watch(self, name: str, layer: nn.Module) -> None:
        def enter(*_: object) -> None:
            self.calls.append(_Call(self.counter.get_total_flops()))

        def leave(_: nn.Module, __: object, output: object) -> None:
            call = self.calls.pop()
            # FlopCounterMode counts a multiply-add as two.
            total = (self.counter.get_total_flops() - call.before) // 2
            if self.calls:
                self.calls[-1].inside += total
            self.shapes[name] = _shape(output)
            self.flops[name] = self.flops.get(name, 0) + total - call.inside

        self.handles.append(layer.register_forward_pre_hook(enter))
        self.handles.append(layer.register_forward_hook(leave))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def summarise(module: nn.Module, sample_shape: tuple[int, ...]) -> ModelSummary:
    """Layers, shapes, parameters and multiply-adds; see `paceline.models.summarise`."""
    first = next(module.parameters(), torch.empty(0))
    sample = torch.zeros((1, *sample_shape), dtype=first.dtype, device=first.device)
    counter = FlopCounterMode(display=False)
    recorder = _Recorder(module, counter)
    try:
        with torch.random.fork_rng(devices=[]), _evaluating(module), torch.no_grad(), counter:
            module(sample)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shape = "x".join(map(str, sample_shape))
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the model cannot take a sample of {shape} (channels x height x width): {reason};"
            " give the channels and the image size it was made for"
        ) from error
    finally:
        recorder.remove()
    return _collect(module, sample_shape, recorder, counter.get_total_flops() // 2)


def _collect(
    module: nn.Module, sample_shape: tuple[int, ...], recorder: _Recorder, flops: int
) -> ModelSummary:
    layers = dict(module.named_modules())
    counted: set[int] = set()
    rows = []
    for name, shape in recorder.shapes.items():
        own = [p for p in layers[name].parameters(recurse=False) if id(p) not in counted]
        counted.update(map(id, own))
        rows.append(
            LayerSummary(
                name=name,
                kind=type(layers[name]).__name__,
                output_shape=shape,
                parameters=sum(p.numel() for p in own),
                flops=recorder.flops[name],
            )
        )
    parameters = list(module.parameters())
    return ModelSummary(
        sample_shape=sample_shape,
        layers=tuple(rows),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        flops=flops,
    )


def _is_layer(module: nn.Module) -> bool:
    has_layers = next(module.children(), None) is not None
    return not has_layers or next(module.parameters(recurse=False), None) is not None


def _shape(output: object) -> tuple[int, ...]:
    """The shape without the batch of the first tensor in what a layer returned."""
    if isinstance(output, Tensor):
        return tuple(output.shape[1:])
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        for part in output:
            if isinstance(part, Tensor):
                return tuple(part.shape[1:])
    return ()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, then each layer's own mode again (they may differ)."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
