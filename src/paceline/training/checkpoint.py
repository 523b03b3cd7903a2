"""Checkpoints: whole or not there at all.

    checkpoints/
      step-00000450/
        model.safetensors       weights and buffers
        optimizer.safetensors   tensors of the optimizer, "<parameter>|<entry>"
        state.json              where in the data we are, sums of the epoch, SHA-256 of the rest
      latest -> step-00000450
      best   -> step-00000300

A checkpoint is written under a name that starts with a dot, flushed to the
disk, and renamed; only then are older ones removed. A full disk therefore
costs the new checkpoint and never an old one. What state.json says, and how a
damaged checkpoint shows, is in `schema.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.errors import RunDirectoryError, StorageError, UnsupportedError, shortened
from paceline.local.base import OptimizerState
from paceline.local.packing import NESTED, CannotPackError, pack, unpack
from paceline.models.extra_state import load_model, separate
from paceline.run import flush, point
from paceline.schema.checkpoint import (
    Position,
    TrainState,
    checkpoints_in,
    digest_of,
    read_state,
    sum_of,
)
from paceline.schema.codec import encode

__all__ = ["Checkpoints", "Position", "TrainState", "check_model"]

FILES = ("model.safetensors", "optimizer.safetensors")
_DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
"""What packed values raise that were not packed so."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def newest(self) -> Path | None:
        found = checkpoints_in(self.folder)
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
            flush(self.folder)
            point(self.folder / "latest", final.name)
            if best:
                point(self.folder / "best", final.name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            newest = self.newest()
            kept, then = f"the newest whole one is {newest}", "go on with --resume"
            if newest is None:
                kept, then = "there is none before it", "start again"
            reason = getattr(error, "strerror", None) or str(error)
            raise StorageError(
                f"the checkpoint of update {state.position.update} could not be written to"
                f" {self.folder} ({reason}); {kept}: free some room, or make it writable, and"
                f" {then}"
            ) from None
        self._prune()
        return final

    def load(self, path: Path) -> tuple[TrainState, dict[str, torch.Tensor], OptimizerState]:
        try:
            state = read_state(path)
            model, tensors = load_model(path / FILES[0]), load_file(path / FILES[1])
            optimizer = unpack_state(state.optimizer_numbers, tensors)
        except (*_DAMAGES, SafetensorError, RunDirectoryError) as error:
            reason = str(error)
            if not isinstance(error, RunDirectoryError):
                reason = f"the checkpoint {path} is damaged ({shortened(str(error))})"
            raise RunDirectoryError(
                f"{reason}: `paceline train --resume` goes on from the newest one that is not"
            ) from None
        return state, model, optimizer

    def _write(
        self,
        folder: Path,
        state: TrainState,
        model: dict[str, torch.Tensor],
        optimizer: OptimizerState,
    ) -> None:
        numbers, tensors = pack_state(optimizer)
        weights, rest = separate(model)
        save_file(_saveable(weights), folder / FILES[0], metadata=rest)
        save_file(_saveable(tensors), folder / FILES[1])
        state = dataclasses.replace(
            state,
            optimizer_numbers=numbers,
            files={name: sum_of(folder / name) for name in FILES},
        )
        data = json.loads(json.dumps(encode(state)))
        text = json.dumps(data | {"digest": digest_of(data)}, indent=2) + "\n"
        (folder / "state.json").write_text(text)
        for file in folder.iterdir():
            flush(file)
        flush(folder)

    def _prune(self) -> None:
        self._sweep()
        best = self.folder / "best"
        kept = {path.name for path in checkpoints_in(self.folder)[-self.keep :]}
        if best.is_symlink():
            kept.add(best.readlink().name)
        for path in checkpoints_in(self.folder):
            if path.name not in kept:
                # Out of sight first: a kill in the middle must not leave half a checkpoint.
                path.rename(path.with_name(f".partial-{path.name}"))
        self._sweep()

    def _sweep(self) -> None:
        """Remove what is being removed, or was left by a run killed while it wrote."""
        for path in self.folder.glob(".partial-*"):
            shutil.rmtree(path, ignore_errors=True)


def pack_state(
    optimizer: OptimizerState,
) -> tuple[dict[str, dict[str, object]], dict[str, torch.Tensor]]:
    """What of a state goes into JSON, and its tensors by name."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, object]] = {}
    for name, entries in optimizer.items():
        for entry, value in entries.items():
            plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
            if plain and value.dtype is not torch.complex128 and "|" not in entry:
                tensors[f"{name}|{entry}"] = value
                continue
            try:
                numbers.setdefault(name, {})[entry] = pack(value, tensors)
            except CannotPackError as error:
                raise UnsupportedError(
                    f"the optimizer keeps {entry!r} of {name} as {error}, which cannot be saved:"
                    " use one whose state is tensors, numbers, and lists and tables of them"
                ) from None
    return numbers, tensors


def unpack_state(
    numbers: dict[str, dict[str, object]], tensors: dict[str, torch.Tensor]
) -> OptimizerState:
    """What `pack_state` was given."""
    optimizer: OptimizerState = {
        name: {entry: unpack(value, tensors) for entry, value in entries.items()}
        for name, entries in numbers.items()
    }
    for key, tensor in tensors.items():
        if not key.startswith(NESTED):
            name, _, entry = key.rpartition("|")
            optimizer.setdefault(name, {})[entry] = tensor
    return optimizer


def check_model(model: nn.Module) -> None:
    """Refuse at the start what could not be saved at the end of an epoch."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.complex128:
            raise UnsupportedError(
                f"{name} of the model is complex128, which safetensors cannot hold: use complex64"
            )


def _saveable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous, on the CPU, and no two sharing memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain: Any = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result
