"""One copy of the weights for all ranks of a node, in shared memory.

Layout of the arena (every part starts on a cache line):

    weights | gradients of rank 0 | ... | gradients of rank R-1 | rounded weights | counts |
    marks | buffers | notes

Every rank has the whole module, and its parameters are views of `weights`, so
that an update by one rank is seen by all, evaluation and checkpoints need no
gathering, and no byte crosses a socket. There are rounded weights only where they
are asked for (see `rounded`); a mark tells for every rank and parameter what it published, a
count what all of its gradients count for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import StrategyError, WorkerError
from paceline.local.base import Job
from paceline.local.board import Board
from paceline.local.gradient_hooks import refuse_shared_memory
from paceline.schema.plain import parse_json

ABSENT, FULL, HALF = range(3)
"""What a rank publishes of a parameter: nothing, or a tensor in fp32 or in bf16."""
LINE = 64
_NOTE_BYTES = 8192


def memory_view(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` as a vector, in the order in which `like` lies in memory.

    A view where `tensor` has that layout already, which gradients have.
    """
    if like.is_contiguous():
        return tensor.contiguous().view(-1)
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return tensor.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).reshape(-1)
    raise StrategyError(
        f"a parameter of shape {tuple(like.shape)} and strides {like.stride()} has no plain memory"
        " order: make it contiguous, or use local.strategy = 'threads'"
    )


def divided(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor, and its part of a vector in which all of them lie end to end."""
    return zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True)


def model_digest(model: nn.Module) -> str:
    """What two processes compare to know that they have built the same model, in the same order."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    rows = [[name, list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


class SharedModel:
    """The whole model on one rank, its weights shared with the other ranks of the node."""

    def __init__(self, model: nn.Module, job: Job, *, rounded: bool = False) -> None:
        assert job.board is not None
        assert job.arena is not None
        self.model = model
        self.board: Board = job.board
        self.parameters = dict(model.named_parameters())
        self.offsets: dict[str, int] = {}
        refuse_shared_memory(model, "ranks that share their weights")
        elements = 0
        for name, parameter in self.parameters.items():
            if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
                raise StrategyError(
                    f"the parameter {name} is {parameter.dtype} on {parameter.device}, but ranks of"
                    " one node share fp32 weights on the CPU: use local.strategy = 'threads'"
                )
            self.offsets[name] = elements
            elements += _padded(parameter.numel(), LINE // 4)
        self._elements = elements
        buffer_bytes = sum(_padded(b.nbytes, LINE) for b in model.buffers())
        floats = elements * (1 + self.board.ranks)
        notes = _NOTE_BYTES * self.board.ranks
        halves = elements if rounded else 0
        counts = _padded(8 * self.board.ranks, LINE)
        marks = _padded(self.board.ranks * len(self.parameters), LINE)
        memory = job.arena.allocate(floats * 4 + halves * 2 + counts + marks + buffer_bytes + notes)
        every = torch.frombuffer(memory, dtype=torch.float32, count=floats)
        self.weights = every[:elements]
        self._gradients = every[elements:].view(self.board.ranks, elements)
        after = torch.frombuffer(memory, dtype=torch.uint8, offset=floats * 4)
        self.rounded = after[: halves * 2].view(torch.bfloat16)
        after = after[halves * 2 :]
        self.counts = after[: 8 * self.board.ranks].view(torch.float64)
        """What every rank's gradients count for (see `steps`)."""
        self._marks = after[counts : counts + marks].numpy()
        self._bytes = after[counts + marks :]
        self._notes_at = buffer_bytes
        self.indices = {name: index for index, name in enumerate(self.parameters)}
        self._adopt()

    def _adopt(self) -> None:
        """Make the parameters views of shared memory, with the first rank's values."""
        digests = self.exchange_notes(model_digest(self.model))
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise StrategyError(
                f"the model of rank {others[0]} has other parameters or buffers than that of rank"
                " 0, or has them in another order: build it alike in every process (a set has no"
                " order, and sizes must not be drawn at random)"
            )
        for name, parameter in self.parameters.items():
            place = self.place(self.weights, name)
            if self.board.rank == 0:
                place.copy_(memory_view(parameter.detach(), parameter))
            parameter.data = shaped(place, parameter)
        self.board.barrier("weights")

    def place(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Where a parameter's elements lie in a vector laid out like the weights."""
        start = self.offsets[name]
        return flat[start : start + self.parameters[name].numel()]

    def gradients(self, rank: int) -> torch.Tensor:
        """The region in which a rank publishes gradients, laid out like the weights."""
        return self._gradients[rank]

    def published(self, rank: int, name: str) -> int:
        """In what form a rank has published its gradient of a parameter, if at all."""
        return int(self._marks[rank * len(self.parameters) + self.indices[name]])

    def say_published(self, name: str, form: int) -> None:
        """Tell the other ranks in what form this one publishes a gradient."""
        self._marks[self.board.rank * len(self.parameters) + self.indices[name]] = form

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over saved weights (the first rank writes) and buffers (each rank its own)."""
        if self.board.rank == 0:
            self.model.load_state_dict(tensors)
        else:
            buffers = dict(self.model.named_buffers())
            for name, buffer in buffers.items():
                if name in tensors:
                    buffer.copy_(tensors[name])
        self.board.barrier("load")

    def share_buffers(self, owner: Callable[[str], int]) -> None:
        """Give every rank the buffers (running statistics) of the rank that owns each."""
        start = 0
        places = {}
        for name, buffer in self.model.named_buffers():
            places[name] = self._bytes[start : start + buffer.nbytes]
            start += _padded(buffer.nbytes, LINE)
        if not places:
            return
        for name, buffer in self.model.named_buffers():
            if owner(name) == self.board.rank:
                places[name].copy_(buffer.contiguous().view(-1).view(torch.uint8))
        self.board.barrier("buffers")
        for name, buffer in self.model.named_buffers():
            if owner(name) != self.board.rank:
                buffer.copy_(places[name].view(buffer.dtype).view(buffer.shape))
        self.board.barrier("buffers")

    def exchange_notes(self, note: Any) -> list[Any]:
        """Small JSON data of every rank, on every rank."""
        text = json.dumps(note).encode()
        if len(text) >= _NOTE_BYTES:
            raise ValueError(f"a note of {len(text)} bytes does not fit into {_NOTE_BYTES}")
        row = self._note(self.board.rank)
        row.zero_()
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.board.barrier("notes")
        notes = [
            read_note(bytes(self._note(rank).tolist()), rank) for rank in range(self.board.ranks)
        ]
        self.board.barrier("notes")
        return notes

    def _note(self, rank: int) -> torch.Tensor:
        start = self._notes_at + rank * _NOTE_BYTES
        return self._bytes[start : start + _NOTE_BYTES]


def read_note(row: bytes, rank: int) -> Any:
    """What a rank has left in its row of the shared memory."""
    try:
        return parse_json(row.rstrip(b"\0"))
    except ValueError as error:
        raise WorkerError(f"the note of rank {rank} cannot be read: {error}") from None


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of `flat` with the shape and memory order of `like`."""
    if like.is_contiguous():
        return flat.view(like.shape)
    count, channels, height, width = like.shape
    return flat.view(count, height, width, channels).permute(0, 3, 1, 2)
