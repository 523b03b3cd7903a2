"""Builds a model from its name or from a reference to the user's own code."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline import references
from paceline.errors import ModelError, PacelineError, unknown_name
from paceline.models.registry import ModelSpec, spec


def build(
    name_or_reference: str,
    *,
    classes: int | None,
    channels: int,
    options: dict[str, object],
    image_size: int | None,
) -> nn.Module:
    sizes: dict[str, int | None] = {
        "classes": classes,
        "channels": channels,
        "image_size": image_size,
    }
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise ModelError(f"{key} = {value}: must be 1 or more")
    if references.is_reference(name_or_reference):
        given = {key: value for key, value in sizes.items() if value is not None}
        own = references.resolve_factory(name_or_reference, "model")
        return call_factory(own, name_or_reference, given, options)
    model = spec(name_or_reference)
    if classes is None:
        raise ModelError(f"{model.name} tells classes apart: say how many with workload.classes")
    _check_options(model, options)
    size = _checked_size(model, image_size, options)
    module_name, _, attribute = model.factory.partition(":")
    factory: Callable[..., nn.Module] = getattr(
        importlib.import_module(f"paceline.models.{module_name}"), attribute
    )
    sized = {"image_size": size} if model.sized else {}
    return factory(classes=classes, channels=channels, **sized, **options)


def _checked_size(model: ModelSpec, image_size: int | None, options: dict[str, object]) -> int:
    if image_size is None:
        return model.input_size
    minimum, remedy = model.minimum_size, ""
    if model.small_minimum is not None:
        if options.get("stem") == "small":
            minimum = model.small_minimum
        elif image_size >= model.small_minimum:
            remedy = ", or workload.model_options to { stem = 'small' }"
    if image_size < minimum:
        raise ModelError(
            f"image size {image_size} is too small for {model.name}, which needs at least"
            f" {minimum}: set data.image_size to {minimum} or more"
            f" ({model.input_size} is what it was made for){remedy}"
        )
    return image_size


def _check_options(model: ModelSpec, options: dict[str, object]) -> None:
    for key, value in options.items():
        if key not in model.options:
            if not model.options:
                raise ModelError(f"model {model.name} has no options: remove {key!r}")
            raise ModelError(unknown_name(f"option of {model.name}", key, model.options))
        if key == "dropout" and not _is_rate(value):
            raise ModelError(f"dropout = {value!r}: must be a number from 0 to below 1")
        if key == "stem" and value not in ("imagenet", "small"):
            raise ModelError(f"stem = {value!r}: must be 'imagenet' or 'small'")
        if key == "pool" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"pool = {value!r}: must be a whole number from 1")


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def call_factory(
    factory: Callable[..., Any], reference: str, given: dict[str, int], options: dict[str, object]
) -> nn.Module:
    """Call the user's own factory with what its signature takes; `reference` names it."""
    if isinstance(factory, nn.Module):
        return _copied(factory, reference, options)
    arguments = _accepted(factory, reference, given, options)
    try:
        module = factory(**arguments)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split()) or "no message"
        raise ModelError(
            f"model {reference!r}: calling it with {_listed(arguments)} raised"
            f" {type(error).__name__}: {reason}; correct it or its options"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model {reference!r} returned a {type(module).__name__}: it must return a"
            " torch.nn.Module"
        )
    return module


def _copied(module: nn.Module, reference: str, options: dict[str, object]) -> nn.Module:
    """A copy of a module that a program hands over: it begins with the weights which that has."""
    if not references.is_object(reference):
        raise ModelError(
            f"model {reference!r} is a finished module, which every process would draw anew; name a"
            " function or a class that makes one"
        )
    if options:
        raise ModelError(
            f"model {reference!r} is a finished module, which takes no options: leave"
            f" {next(iter(options))!r} out, or give a function or a class"
        )
    try:
        found = copy.deepcopy(module)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        raise ModelError(
            f"model {reference!r} cannot be copied ({type(error).__name__}: {reason}): give a"
            " function or a class that makes a new one, as lambda: Net(...)"
        ) from error
    found.zero_grad(set_to_none=True)
    return found


def initialise_lazy(
    module: nn.Module, reference: str, run_once: Callable[[nn.Module], object]
) -> None:
    """Give parameters that wait for a first input (nn.LazyLinear) their shapes and values.

    One sample passes through in evaluation mode, so that nothing else is changed by it.
    """
    if not any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        return
    was_training = module.training
    try:
        with torch.no_grad():
            run_once(module.eval())
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model {reference!r} has parameters that wait for a first input, and one sample did"
            f" not pass through it: {type(error).__name__}: {reason}; correct it or its data"
        ) from error
    module.train(was_training)
    waiting = [name for name, each in module.named_parameters() if is_lazy(each)]
    if waiting:
        raise ModelError(
            f"model {reference!r}: {waiting[0]} has no shape after one sample passed through the"
            " model: give it one, or leave the layer out"
        )


def _accepted(
    factory: Callable[..., Any],
    reference: str,
    given: dict[str, int],
    options: dict[str, object],
) -> dict[str, object]:
    """The arguments that the factory's signature takes."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {**given, **options}
    by_name = {
        each.name: each
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for key in options:
        if key not in by_name and not takes_any:
            raise ModelError(unknown_name(f"option of model {reference!r}:", key, by_name))
    offered = {key: value for key, value in given.items() if takes_any or key in by_name}
    arguments: dict[str, object] = {**offered, **options}
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in arguments
    ]
    if missing:
        remedy = "give it as an option of the model, or give it a default"
        if missing[0] == "classes":
            remedy = f"the data does not tell how many there are; set workload.classes, or {remedy}"
        raise ModelError(f"model {reference!r} needs an argument {missing[0]!r}: {remedy}")
    return arguments


def _listed(arguments: dict[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
