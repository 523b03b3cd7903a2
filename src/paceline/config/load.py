"""Read and write configurations."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import tomli_w

from paceline.errors import ConfigError, shown
from paceline.schema.codec import decode, encode
from paceline.schema.config import LOSSES, OPTIMIZERS, Config
from paceline.schema.plain import DEEPEST, parse_toml, parse_value, read_toml


def load_config(path: Path | None = None, changes: Iterable[str] = ()) -> Config:
    """The configuration of a TOML file (the embedded default without one), with changes.

    >>> load_config(None, ["train.epochs=2"]).train.epochs
    2
    """
    data = _read_toml(path)
    for change in changes:
        _apply_change(data, change)
    return config_from(data)


def config_from(data: Mapping[str, Any]) -> Config:
    """The configuration that plain data means: tables of keys, or dotted keys.

    >>> config_from({"train.epochs": 2, "optimizer": {"name": "sgd"}}).train.epochs
    2
    """
    tables: dict[str, Any] = {}
    for key, value in data.items():
        plain = dict(value) if isinstance(value, Mapping) else value
        _put(tables, key.split("."), plain, f"the key {shown(key)}")
    config = decode(Config, tables)
    _check_names(config)
    return config


def dump_config(config: Config) -> str:
    """TOML that `load_config` reads back to an equal configuration."""
    return tomli_w.dumps(encode(config, keep_none=False))


def with_versions(config: Config) -> Config:
    """The configuration with the versions of what will run it."""
    versions = {"python": platform.python_version()}
    for package in ("paceline", "torch", "numpy"):
        versions[package] = metadata.version(package)
    return dataclasses.replace(config, versions=versions)


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return parse_toml(resources.files("paceline.config").joinpath("default.toml").read_text())
    if path.is_dir():
        path = path / "config.toml"
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}: give the path of a TOML file") from None


def _apply_change(data: dict[str, Any], change: str) -> None:
    key, separator, text = change.partition("=")
    parts = [part.strip() for part in key.split(".")]
    said = f"--set {shown(change)}"
    if not separator or not all(parts):
        raise ConfigError(f"{said} must have the form key=value, as train.epochs=3")
    _put(data, parts, parse_value(text.strip(), f"--set {key.strip()} ="), said)
    _drop_rival(data, ".".join(parts))


def _put(tables: dict[str, Any], parts: list[str], value: Any, said: str) -> None:
    """Set a value by the parts of its dotted key; `said` is what messages call that."""
    if len(parts) > DEEPEST:
        raise ConfigError(f"{said} has a key of {len(parts)} parts: it must have {DEEPEST} at most")
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{said}: {shown(part)} is a value, not a table of keys")
    table[parts[-1]] = value


def _drop_rival(data: dict[str, Any], key: str) -> None:
    """A batch given on the line replaces the other kind of batch in the file."""
    rivals = {"workload.batch_size": "batch_per_worker", "workload.batch_per_worker": "batch_size"}
    if key in rivals:
        data["workload"].pop(rivals[key], None)


def _check_names(config: Config) -> None:
    name = config.optimizer.name
    if name not in OPTIMIZERS and ":" not in name:
        raise ConfigError(
            f"optimizer.name = {shown(name)} is not one of {', '.join(OPTIMIZERS)},"
            ' nor a reference as "module:callable"'
        )
    for key in ("step", "collate_fn"):
        named = getattr(config.workload, key)
        if named and ":" not in named:
            raise ConfigError(
                f"workload.{key} = {shown(named)} is no reference: write 'module:callable'"
            )
    for metric, named in config.workload.metrics.items():
        if ":" not in named:
            raise ConfigError(
                f"workload.metrics.{metric} = {shown(named)} is no reference: write"
                " 'module:callable'"
            )
    loss = config.workload.loss
    if loss not in LOSSES and ":" not in loss:
        raise ConfigError(
            f"workload.loss = {shown(loss)} is not one of {', '.join(LOSSES)}, nor a reference as"
            ' "module:callable"'
        )
