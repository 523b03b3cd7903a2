"""Wishes to a training that runs: a file each in RUN/requests, which is there while they are taken.

takes.json        which of the others are taken; written by the training
stop              save and stop
checkpoint        save at the next update that all ranks can agree on
settings.json     save, and go on with these settings changed
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from paceline.errors import ConfigError, shown
from paceline.run import RunDirectory, write_whole
from paceline.schema.codec import decode
from paceline.schema.config import Train, Until
from paceline.schema.plain import read_json_file

STOP: Final = "stop"
CHECKPOINT: Final = "checkpoint"
SETTINGS: Final = "settings"
TAKES: Final = "takes.json"
CHANGEABLE: Final = ("train.epochs", *(f"train.until.{field.name}" for field in fields(Until)))
"""What may be changed while a training runs: how long it is to be."""


def taken_by(run: RunDirectory) -> tuple[str, ...]:
    """What a training takes now; nothing where none runs."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json_file(run.requests / TAKES)
        if isinstance(found, list):
            return tuple(word for word in found if word in (STOP, CHECKPOINT, SETTINGS))
    return ()


def ask(run: RunDirectory, wish: str, settings: Mapping[str, Any] | None = None) -> None:
    """Leave a wish; ConfigError where it would not be taken."""
    if wish not in taken_by(run):
        raise ConfigError(
            f"{run.path.name} does not take `{wish}` now: it is asked of a training that runs, by"
            " the command that started it"
        )
    if wish != SETTINGS:
        write_whole(run.requests / wish, "")
        return
    write_whole(run.requests / "settings.json", json.dumps(checked_settings(settings or {})))


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that may change, each with a value that it may have; None takes a goal away."""
    if not settings:
        raise ConfigError(f"no setting is given: name one of {', '.join(CHANGEABLE)}")
    for key in settings:
        if key not in CHANGEABLE:
            raise ConfigError(
                f"{shown(key)} cannot change while a training runs: only {', '.join(CHANGEABLE)}"
            )
    prefix = "train.until."
    until = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    train: dict[str, Any] = {"until": {k: v for k, v in until.items() if v is not None}}
    if "train.epochs" in settings:
        train["epochs"] = settings["train.epochs"]
    decode(Train, train, "train")
    return dict(settings)


def with_settings(train: Train, settings: Mapping[str, Any]) -> Train:
    """How long a training is to be, with what was asked to change."""
    prefix = "train.until."
    until = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    return replace(
        train,
        epochs=settings.get("train.epochs", train.epochs),
        until=replace(train.until, **until),
    )


def wished_settings(run: RunDirectory) -> dict[str, Any]:
    """What is to change; ConfigError where the file is damaged or asks for something else."""
    try:
        found = read_json_file(run.requests / "settings.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.requests / 'settings.json'} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"settings.json is {shown(found)}, not a table of settings")
    return checked_settings(found)
