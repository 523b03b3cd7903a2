"""Which linear layers may be replaced by their parts, and why the others must stay whole.

A split layer stands where an `nn.Linear` stood. Whatever else knew that layer or its weights (a
hook, a second name, a regulariser) would go on with what is no longer trained, so such a layer is
left whole. What a model does with its weights outside its layers is seen by running it once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, resolve_name

from paceline.errors import UnsupportedError
from paceline.local.single import backward_of_none

TRANSPARENT = frozenset(
    {"ReLU", "ReLU6", "GELU", "SiLU", "Sigmoid", "Tanh", "LeakyReLU", "Hardswish"}
    | {"Dropout", "Identity", "ELU", "Softplus"}
)
"""Layers that work on each feature alone, so that a split one passes through."""
SAMPLES = 2
"""Samples of a trial: the fewest that BatchNorm takes."""
_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_state_dict_hooks": "a state_dict hook",
    "_state_dict_pre_hooks": "a state_dict pre-hook",
    "_load_state_dict_pre_hooks": "a load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "a load_state_dict post-hook",
}
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_KNOWN = frozenset(vars(nn.Linear(1, 1, device="meta")))
_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "layout", "is_cuda", "requires_grad", "ndim")
) | {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.is_floating_point}
"""What may be asked of a weight: a part of it would answer the same."""


@dataclass(frozen=True, kw_only=True)
class SampleTrial:
    """A few samples, and the loss, with which a model is run that nobody trains afterwards."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    without_samples: bool = False
    """Whether a node may get none of a batch's samples, and runs the model all the same."""


@dataclass(kw_only=True)
class Seen:
    """What a model's layers are, and what a trial has shown of them."""

    obstacles: dict[str, str] = field(default_factory=dict)
    """Every linear layer that must stay whole, and why."""
    rows: dict[str, int] | None = None
    """Rows per sample of every linear layer that can be split; None without a trial."""
    order: tuple[str, ...] | None = None
    """The linear layers in the order in which an update calls them; None without a trial."""
    apart: set[str] = field(default_factory=set)
    """Containers whose layers the model calls one by one, and not the container as a whole."""


def look_at(model: nn.Module, trial: SampleTrial | None = None) -> Seen:
    """What may be split of a model; with a trial, from a forward and a backward pass too.

    The model's own code runs then, and may keep something of it: train another one.
    """
    seen = Seen()
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    holders = Counter(
        tensor.untyped_storage().data_ptr()
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.numel() and tensor.device.type != "meta"
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            why = _why_whole(module, names[id(module)], holders)
            if why:
                seen.obstacles.update(dict.fromkeys(names[id(module)], why))
    if trial is not None:
        _try(model, trial, seen)
    return seen


def is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class does, and nothing hooked onto it sees its values."""
    hooked = any(getattr(module, attribute, None) for attribute in _HOOKS)
    return not hooked and "forward" not in vars(module)


def is_elementwise(module: nn.Module) -> bool:
    """Whether a layer works on each feature alone, and nothing looks at what passes."""
    kind = type(module)
    return (
        kind.__name__ in TRANSPARENT
        and kind is getattr(nn, kind.__name__, None)
        and is_plain(module)
    )


def is_chain(module: nn.Module) -> bool:
    """Whether a container hands each layer's output to the next and to nobody else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def _why_whole(module: nn.Linear, names: list[str], holders: Counter[int]) -> str:
    """Why a layer must stay whole, as far as one sees without running it; "" if it need not."""
    if parametrize.is_parametrized(module):
        which = ", ".join(getattr(module, "parametrizations", {}))
        return f"its {which} is parametrized"
    for attribute, words in _HOOKS.items():
        if getattr(module, attribute, None):
            return f"it has {words}"
    if any(getattr(torch_module, attribute) for attribute in _GLOBAL_HOOKS):
        return "there is a hook on all modules"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not exactly an nn.Linear"
    if len(names) > 1:
        return f"the model holds it under two names, {names[0]} and {names[1]}"
    own = sorted(set(vars(module)) - _KNOWN)
    own += [*module._modules, *module._buffers]
    own += [entry for entry in module._parameters if entry not in ("weight", "bias")]
    if own:
        return f"it carries {own[0]!r}, which a part of it would not have"
    for entry, parameter in module._parameters.items():
        if parameter is not None and (why := _why_not_plain(parameter, holders)):
            return f"its {entry} {why}"
    return ""


def _why_not_plain(parameter: nn.Parameter, holders: Counter[int]) -> str:
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}, not exactly an nn.Parameter"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "has a gradient hook"
    if vars(parameter):
        return f"carries {next(iter(vars(parameter)))!r}, which a part of it would not have"
    if not parameter.requires_grad:
        return "is frozen"
    if parameter.dtype is not torch.float32:
        return f"is {parameter.dtype}, not torch.float32"
    if parameter.device.type != "meta" and holders[parameter.untyped_storage().data_ptr()] > 1:
        return "is shared with another layer"
    return ""


# --- running it -------------------------------------------------------------------


def _try(model: nn.Module, trial: SampleTrial, seen: Seen) -> None:
    """Run the model and its loss once, and see who calls the layers and who reads weights."""
    watch = _Watch(model, seen.obstacles)
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    failure, count = "", len(trial.inputs)
    try:
        with torch.random.fork_rng(devices=[]), watch.watching(), torch.enable_grad():
            torch.default_generator.manual_seed(0)  # every node sees the same
            loss = trial.loss(model.train()(trial.inputs), trial.targets)
            watch.trains = False
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                model.eval()(trial.inputs)
            if trial.without_samples:
                count = 0
                backward_of_none(model.train()(trial.inputs[:0]))
    except Exception as error:  # of the user's own code, whatever it may be
        lines = str(error).strip().splitlines()
        failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model.zero_grad(set_to_none=True)
    seen.rows = {}
    for name in watch.layers:
        calls = watch.calls.get(name, [])
        why = watch.reads.get(name, "")
        if failure:
            why = f"the model could not be tried on {count} samples ({failure})"
            why += "" if count else ", and a node may get none of a batch"
        elif not why and len(calls) != 1:
            why = f"the model calls it {len(calls)} times in a forward pass"
        elif not why and (len(calls[0]) < 2 or calls[0][0] != len(trial.inputs)):
            batch = len(trial.inputs)
            why = f"its input {list(calls[0])} has not the batch of {batch} as first dimension"
        if why:
            seen.obstacles[name] = why
        else:
            seen.rows[name] = torch.Size(calls[0][1:-1]).numel()
    seen.apart = watch.apart
    seen.order = tuple(watch.calls)


class _Watch(TorchFunctionMode):
    """Notes each use of a layer's weights outside the layer's own forward pass."""

    def __init__(self, model: nn.Module, obstacles: dict[str, str]) -> None:
        super().__init__()
        self._model = model
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name not in obstacles and name
        }
        self.reads: dict[str, str] = {}
        self.calls: dict[str, list[tuple[int, ...]]] = {}
        self.apart: set[str] = set()
        self.trains = True
        """The pass under way is that of an update; later ones only show who else reads."""
        self._owners = {
            parameter.untyped_storage().data_ptr(): name
            for name, module in self.layers.items()
            for parameter in module.parameters()
        }
        self._inside: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _HARMLESS:
            for tensor in _tensors((args, kwargs)):
                name = self._owner(tensor)
                if name is not None and name not in self._inside:
                    what = resolve_name(func) or getattr(func, "__name__", "a function")
                    self.reads.setdefault(
                        name,
                        "the model or its loss uses its weights outside the layer"
                        f" ({what.removesuffix('.__get__')})",
                    )
        return func(*args, **(kwargs or {}))

    def _owner(self, tensor: torch.Tensor) -> str | None:
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                return None
            try:
                return self._owners.get(tensor.untyped_storage().data_ptr())
            except RuntimeError:  # what a subclass of the user's own, or vmap, does not tell
                return None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let stand-ins take the layers' places: who calls a layer itself has it from elsewhere."""
        handles: list[Any] = []
        containers = {n: m for n, m in self._model.named_modules() if isinstance(m, nn.Sequential)}
        try:
            for name, module in containers.items():
                handles += self._hooked(module, name)
            for name, linear in self.layers.items():
                handles.append(
                    linear.register_forward_pre_hook(
                        lambda *_, name=name: self._called_elsewhere(name)
                    )
                )
                stand_in = _stand_in(linear)
                _put(self._model, name, stand_in)
                handles.append(
                    stand_in.register_forward_pre_hook(
                        lambda _, values, name=name: self._called(name, values)
                    )
                )
                handles += self._hooked(stand_in, name)
            with self:
                yield
        finally:
            for name, linear in self.layers.items():
                _put(self._model, name, linear)
            for handle in handles:
                handle.remove()

    def _hooked(self, module: nn.Module, name: str) -> list[Any]:
        return [
            module.register_forward_pre_hook(lambda *_: self._inside.append(name)),
            module.register_forward_hook(lambda *_: self._leave(), always_call=True),
        ]

    def _leave(self) -> None:
        self._inside.pop()

    def _called(self, name: str, values: tuple[Any, ...]) -> None:
        container = name.rpartition(".")[0]
        if container not in self._inside:
            self.apart.add(container)
        if self.trains:
            shape = tuple(values[0].shape) if values else ()
            self.calls.setdefault(name, []).append(shape)

    def _called_elsewhere(self, name: str) -> None:
        self.reads[name] = f"the model calls it by another reference than {name}"


def _stand_in(linear: nn.Linear) -> nn.Linear:
    """Another layer with the same weights."""
    copy = nn.Linear(linear.in_features, linear.out_features, device="meta")
    copy.weight, copy.bias = linear.weight, linear.bias
    return copy.train(linear.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


# --- after the split ----------------------------------------------------------------


class Retired(nn.Parameter):
    """What is left of a weight whose layer was split: whoever still computes with it is told so."""

    layer: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = [t.__dict__["layer"] for t in _tensors((args, kwargs)) if isinstance(t, cls)]
        raise UnsupportedError(
            f"the layer {names[0]!r} is split over nodes, but the model or its loss uses its"
            " weights outside the layer, or calls it by another reference: name other layers in"
            " exchange.layers, or use exchange.partition = 'none'"
        )


def retire(linear: nn.Linear, layer: str) -> dict[str, nn.Parameter]:
    """Take the weights out of a layer that was split; using what is left raises."""
    left = {entry: p for entry, p in linear._parameters.items() if p is not None}
    for parameter in left.values():
        parameter.data = parameter.data.new_empty(0)
        parameter.__class__ = Retired
        parameter.__dict__["layer"] = layer
    return left
