"""All nodes begin with the first node's weights and buffers, and with the same model.

A model that draws from NumPy, from the clock, or from a set's order is another one in every
process. What all nodes have in common is what the first one has built.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UnsupportedError, WorkerError, shown
from paceline.exchange.network import Network
from paceline.local.shared import model_digest
from paceline.schema.plain import ONE_LINE, checked, parse_json

_PLAIN_NAME = re.compile(r"\w[\w\-]*(\.\w[\w\-]*)*")

PIECE = 32 * 2**20
"""Bytes of one broadcast, about: large enough for a link's full rate, small beside a model."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as a vector of bytes: every backend can send those."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def take_bytes(tensors: Iterable[torch.Tensor], data: torch.Tensor) -> None:
    """Fill tensors, one after the other, from bytes that `as_bytes` made."""
    at = 0
    for tensor in tensors:
        own = data[at : at + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
        tensor.detach().copy_(own)
        at += tensor.nbytes


def rest_of(model: nn.Module) -> list[torch.Tensor]:
    """What a model holds besides the weights that are trained: frozen ones, and buffers."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return [*frozen, *model.buffers()]


def broadcast_tensors(network: Network, tensors: Iterable[torch.Tensor], name: str) -> None:
    """Give every node the first node's tensors, of any type, in place; all nodes call it."""
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        group.append(tensor)
        if sum(each.nbytes for each in group) >= PIECE:
            _broadcast(network, group, name)
            group = []
    if group:
        _broadcast(network, group, name)


def _broadcast(network: Network, group: Sequence[torch.Tensor], name: str) -> None:
    data = torch.cat([as_bytes(tensor) for tensor in group])
    network.broadcast(data, 0, name)
    if network.rank > 0:
        take_bytes(group, data)


def broadcast_text(network: Network, text: str, name: str) -> str:
    """The first node's text, on every node."""
    data = text.encode() if network.rank == 0 else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    network.broadcast(length, 0, name)
    if not int(length):
        return ""
    held = bytearray(data) if network.rank == 0 else bytearray(int(length))
    content = torch.frombuffer(held, dtype=torch.uint8)
    network.broadcast(content, 0, name)
    return bytes(content.tolist()).decode()


def agree_on_model(network: Network, model: nn.Module) -> None:
    """Give every node the first node's weights and buffers; refuse models that differ."""
    own = torch.tensor(list(bytes.fromhex(model_digest(model))), dtype=torch.uint8)
    first = own.clone()
    network.broadcast(first, 0, "the model's description")
    flags = [0.0] * network.size
    flags[network.rank] = float(not torch.equal(own, first))
    flags = network.total(flags, "the model's description")
    if others := [host for host, flag in zip(network.hosts, flags, strict=True) if flag]:
        raise UnsupportedError(other_model(others, network.hosts[0]))
    broadcast_tensors(network, (*model.parameters(), *model.buffers()), "the first weights")


def other_model(hosts: Sequence[str], first: str) -> str:
    """The sentence about hosts that have built another model than the first."""
    return (
        f"the model on {', '.join(hosts)} has other parameters or buffers than on {first}, or has"
        " them in another order: build it alike on every host (a set has no order, and sizes must"
        " not be drawn at random)"
    )


# --- checkpoints --------------------------------------------------------------------


def agree_on_files(network: Network, folder: Path | None, into: Path) -> Path | None:
    """The first node's folder of files, on every node: its own where it has the same, or a copy.

    `folder` is what this node would read, None if nothing; a copy is written into `into`. None
    where the first node has none. All nodes call it.
    """
    own = None if folder is None else _described(folder)
    note = _broadcast_json(network, own)
    flags = [0.0] * network.size
    flags[network.rank] = float(own != note)
    if not any(network.total(flags, "the checkpoint's description")):
        return folder
    if note is None:
        return None
    target = folder if own == note else into / note["name"]
    assert target is not None
    for name, size, _ in note["files"]:
        _broadcast_file(network, target / name, size, write=own != note)
    return target


def _described(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.append([path.name, path.stat().st_size, digest])
    return {"name": folder.name, "files": found}


def _broadcast_json(network: Network, value: Any) -> Any:
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)])
    network.broadcast(length, 0, "the checkpoint's description")
    data = torch.zeros(int(length), dtype=torch.uint8)
    if network.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    network.broadcast(data, 0, "the checkpoint's description")
    return read_description(bytes(data.tolist()))


def read_description(text: bytes) -> Any:
    """What the first node says of its files; nothing of it may lie outside of a folder."""
    try:
        note = parse_json(text)
        if note is None:
            return None
        checked(note, {"name": ONE_LINE, "files": [list]})
        for entry in note["files"]:
            name, size, digest = entry
            checked([name, note["name"], digest], [ONE_LINE])
            if checked(size, int) < 0 or _PLAIN_NAME.fullmatch(name) is None:
                raise ValueError(f"{shown(name)} of {size} bytes is no file of a checkpoint")
        if _PLAIN_NAME.fullmatch(note["name"]) is None:
            raise ValueError(f"{shown(note['name'])} is no checkpoint")
    except ValueError as error:
        raise WorkerError(f"the first node describes a checkpoint that is none: {error}") from None
    return note


def _broadcast_file(network: Network, path: Path, size: int, *, write: bool) -> None:
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for start in range(0, size, PIECE):
        length = min(PIECE, size - start)
        data = torch.empty(length, dtype=torch.uint8)
        if network.rank == 0:
            with path.open("rb") as file:
                file.seek(start)
                data = torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
        network.broadcast(data, 0, "the checkpoint")
        if write:
            with path.open("ab") as file:
                file.write(data.numpy().tobytes())
