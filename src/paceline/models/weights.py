"""Weights from files, and transfer learning: a new head on a frozen body."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import ModelError, shortened
from paceline.models.extra_state import load_model


def head_name(module: nn.Module) -> str:
    """The name of the last dense layer; see `paceline.models.head_name`."""
    found: list[str] = [
        name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    ]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no torch.nn.Linear layer that could be its head:"
            " switch off replacing the head and freezing the body"
        )
    return found[-1]


def load_weights(module: nn.Module, path: Path, *, replace_head: bool) -> list[str]:
    """Copy the tensors of a file into `module`; see `paceline.models.load_weights`."""
    tensors = _read(path)
    expected = module.state_dict()
    head = _tensor_names_of_head(module) if replace_head else set()
    if replace_head and _only_classes_differ(tensors, expected, head_name(module)):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in head}
    # Files written before BatchNorm counted its batches lack these; torch starts at zero.
    optional = head | {name for name in expected if name.endswith("num_batches_tracked")}
    missing = [name for name in expected if name not in tensors]
    _check_fit(path, tensors, expected, [name for name in missing if name not in optional])
    module.load_state_dict(tensors, strict=False)
    return missing


def freeze_body(module: nn.Module) -> None:
    """Leave only the head trainable; see `paceline.models.freeze_body`."""
    head = module.get_submodule(head_name(module))
    trainable = {id(parameter) for parameter in head.parameters()}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trainable)
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            layer.eval()
            layer.__dict__["frozen"] = True
            # A partial of a module-level function: it can be copied and pickled
            # together with the layer, which a bound method of ours cannot.
            layer.__dict__["train"] = functools.partial(_stay_in_evaluation, layer)


def _stay_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"there is no weights file {str(path)!r}: give the path of one")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        # Safetensors begins with a length of 8 bytes and a JSON object.
        if path.suffix == ".safetensors" or start[8:9] == b"{":
            return load_model(path)
        return _tensors_of(path, torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"weights file {str(path)!r} is not a plain file of tensors, and code in weights is"
            " never executed: save the state_dict of the model, best as safetensors"
        ) from error
    except ModelError:
        raise
    except Exception as error:  # what torch raises for a damaged file can be nearly anything
        reason = shortened(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise ModelError(
            f"weights file {str(path)!r} cannot be read ({reason}): it is damaged or neither"
            " safetensors nor a torch file; fetch it again"
        ) from error


def _tensors_of(path: Path, content: Any) -> dict[str, Tensor]:
    """The state dict in what a torch file holds, as the common training scripts save it."""
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise ModelError(
            f"weights file {str(path)!r} holds no state_dict: save model.state_dict() in it"
        )
    prefix = "module."
    if content and all(name.startswith(prefix) for name in content):
        # Saved from inside DistributedDataParallel.
        content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    return dict(content)


def _tensor_names_of_head(module: nn.Module) -> set[str]:
    head = head_name(module)
    prefix = f"{head}." if head else ""
    return {prefix + name for name in module.get_submodule(head).state_dict()}


def _only_classes_differ(
    tensors: dict[str, Tensor], expected: dict[str, Tensor], head: str
) -> bool:
    """Whether the head in the file differs from ours in its number of classes alone."""
    name = f"{head}.weight" if head else "weight"
    theirs, ours = tensors.get(name), expected[name]
    return theirs is not None and theirs.shape != ours.shape and theirs.shape[1:] == ours.shape[1:]


def _check_fit(
    path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor], missing: list[str]
) -> None:
    unexpected = [name for name in tensors if name not in expected]
    other_shape = [
        f"{name} is {_shape(tensor)} in the file and {_shape(expected[name])} in the model"
        for name, tensor in tensors.items()
        if name in expected
        and getattr(tensor, "shape", None) != getattr(expected[name], "shape", None)
    ]
    faults = [
        f"{kind} {', '.join(found[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''}"
        for kind, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape:", other_shape),
        )
        if found
    ]
    if faults:
        raise ModelError(
            f"weights file {str(path)!r} does not fit the model: {'; '.join(faults)} (use weights"
            " of the same model, channels and options; replace the head if only the number of"
            " classes differs)"
        )


def _shape(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):  # what a module saves by get_extra_state
        return f"a {type(tensor).__name__}"
    return "x".join(map(str, tensor.shape)) or "a single number"
