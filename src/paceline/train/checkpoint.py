"""Checkpoints: whole or not there at all.

    checkpoints/
      step-00000450/
        model.safetensors       weights and buffers
        optimizer.safetensors   tensors of the optimizer, "<parameter>|<entry>"
        state.json              where in the data we are, sums of the epoch, the rest
      latest -> step-00000450
      best   -> step-00000300

A checkpoint is written under a name that starts with a dot, flushed to the
disk, and renamed; only then are older ones removed. A full disk therefore
costs the new checkpoint and never an old one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError, RunDirectoryError, StorageError, shortened
from paceline.local.base import OptimizerState
from paceline.schema.codec import decode, encode
from paceline.schema.plain import read_json_file

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in the training we are."""

    epoch: int = 0
    """Whole epochs done."""
    step: int = 0
    """Updates done in the current epoch."""
    update: int = 0
    """Updates done in all."""

    def after_update(self) -> Position:
        """One update later."""
        return Position(epoch=self.epoch, step=self.step + 1, update=self.update + 1)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a checkpoint says besides tensors."""

    format: int = FORMAT
    position: Position = field(default_factory=Position)
    batch_size: int = 0
    samples: int = 0
    tally: dict[str, float] = field(default_factory=dict)
    """Sums over the current epoch, so that its metrics come out whole after a resume."""
    seconds: float = 0.0
    """Time spent on the run so far, in all sessions."""
    best_accuracy: float | None = None
    since_best: int = 0
    """Evaluations since the best one."""
    optimizer_numbers: dict[str, dict[str, object]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def save(
        self,
        state: TrainState,
        model: dict[str, torch.Tensor],
        optimizer: OptimizerState,
        *,
        best: bool = False,
    ) -> Path:
        """Write a checkpoint and remove the ones that are no longer needed."""
        final = self.folder / f"step-{state.position.update:08d}"
        partial = self.folder / f".partial-{state.position.update:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._write(partial, state, model, optimizer)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _flush(self.folder)
            _point(self.folder / "latest", final.name)
            if best:
                _point(self.folder / "best", final.name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            newest = self.newest()
            kept = f"the newest whole one is {newest}" if newest else "there is none before it"
            reason = getattr(error, "strerror", None) or str(error)
            raise StorageError(
                f"the checkpoint of update {state.position.update} could not be written to"
                f" {self.folder} ({reason}); {kept}: free some room"
            ) from None
        self._prune()
        return final

    def load(self, path: Path) -> tuple[TrainState, dict[str, torch.Tensor], OptimizerState]:
        """Read a checkpoint."""
        try:
            state = decode(TrainState, read_json_file(path / "state.json"))
            model = load_file(path / "model.safetensors")
            tensors = load_file(path / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError, ConfigError) as error:
            raise RunDirectoryError(
                f"the checkpoint {path} cannot be read ({shortened(str(error))}): remove it to"
                " continue from the one before"
            ) from None
        optimizer: OptimizerState = {k: dict(v) for k, v in state.optimizer_numbers.items()}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition("|")
            optimizer.setdefault(name, {})[entry] = tensor
        return state, model, optimizer

    def _write(
        self,
        folder: Path,
        state: TrainState,
        model: dict[str, torch.Tensor],
        optimizer: OptimizerState,
    ) -> None:
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, dict[str, object]] = {}
        for name, entries in optimizer.items():
            for entry, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}|{entry}"] = value
                else:
                    numbers.setdefault(name, {})[entry] = value
        data = encode(state) | {"optimizer_numbers": numbers}
        save_file(_saveable(model), folder / "model.safetensors")
        save_file(_saveable(tensors), folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(data, indent=2) + "\n")
        for file in folder.iterdir():
            _flush(file)
        _flush(folder)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [
            path
            for path in self.folder.iterdir()
            if re.fullmatch(r"step-\d{8,}", path.name) and (path / "state.json").is_file()
        ]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _prune(self) -> None:
        self._sweep()
        best = self.folder / "best"
        kept = {path.name for path in self._all()[-self.keep :]}
        if best.is_symlink():
            kept.add(best.readlink().name)
        for path in self._all():
            if path.name not in kept:
                # Out of sight first: a kill in the middle must not leave half a checkpoint.
                path.rename(path.with_name(f".partial-{path.name}"))
        self._sweep()

    def _sweep(self) -> None:
        """Remove what is being removed, or was left by a run killed while it wrote."""
        for path in self.folder.glob(".partial-*"):
            shutil.rmtree(path, ignore_errors=True)


def _saveable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous, on the CPU, and no two sharing memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain: Any = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link: Path, target: str) -> None:
    partial = link.with_name(f".{link.name}-{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(link)
