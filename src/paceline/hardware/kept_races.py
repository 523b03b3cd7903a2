"""Races that were run before, kept by machine, model, batch and versions."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from paceline.config.cache import key_of
from paceline.config.environment import instruction_limit
from paceline.errors import PacelineError
from paceline.hardware.machine import processor_name
from paceline.local.cores import quota_cores, usable_cores
from paceline.references import is_reference
from paceline.schema import Config, Plan, Race, decode, encode, read_json

RULES = "legs"
"""How races are run: those of other rules do not count."""


def kept_race(stored: Path) -> Race | None:
    """A race of the cache; None where it is another version's, or damaged: race anew."""
    try:
        race = read_json(Race, stored)
        for chosen in (entry for entry in race.candidates if entry.chosen):
            numerics = {key: getattr(chosen, key) for key in ("precision", "memory_format")}
            decode(Plan, {**numerics, "batch_size": race.batch_size})  # what it will be trained by
            return race
    except PacelineError:
        pass
    return None


def fingerprint(config: Config, batch_size: int) -> str:
    """The same for the same machine, model, batch and versions."""
    work = encode(config.workload)
    for key in ("batch_size", "batch_per_worker"):
        work.pop(key)
    facts: dict[str, Any] = {
        "machine": [processor_name(), usable_cores(), quota_cores(), psutil.virtual_memory().total],
        "workload": work,
        "sources": [_source_hash(text) for text in config.workload.code.values()],
        "optimizer": [config.optimizer.name, config.optimizer.momentum, config.optimizer.clip_norm],
        "numerics": encode(config.numerics),
        "image_size": config.data.image_size,
        "data_options": config.data.options,
        "device": config.train.device,
        "instructions": instruction_limit(),
        "batch": batch_size,
        "rules": RULES,
        "versions": [metadata.version("paceline"), metadata.version("torch")],
    }
    return key_of(facts)


def _source_hash(reference: str) -> str:
    """The contents of the user's file, so that a changed model is raced again."""
    if not is_reference(reference):
        return ""
    place = Path(reference.rpartition(":")[0])
    if place.suffix == ".py" and place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    return ""
