"""Objects of a Python program on their way to ranks of the same machine.

What other processes cannot import (the script's own classes and functions, lambdas, what a notebook
has defined) is pickled by value, by cloudpickle; the rest by its name, and `sys.path` goes along.

    length of the header | header (JSON) | pickle | buffers of tensors and arrays

All of it lies in anonymous memory whose descriptor ranks inherit: it has no name, so that nobody
else can write what they unpickle. Tensors and arrays are not copied by the ranks: each sees the
same memory, and what it changes there it alone sees.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from paceline.errors import PacelineError, UnsupportedError
from paceline.schema.plain import parse_json

if TYPE_CHECKING:
    import torch

_LINE = 64
"""Buffers begin at multiples of so many bytes: a tensor of any type may begin there."""
_HEAD = 8
"""Bytes that say how long the header is."""


def send(parts: dict[str, Any]) -> int:
    """A descriptor of memory with these objects, for ranks to inherit; whoever asked closes it.

    UnsupportedError names the one that cannot be sent.
    """
    from paceline.local.board import anonymous_memory
    from paceline.local.memory import MEMORY_PART, available_mb

    data, buffers = _pickled(parts)
    views = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for view in (memoryview(data), *views):
        places.append((end, view.nbytes))
        end += -(-view.nbytes // _LINE) * _LINE
    free = MEMORY_PART * available_mb()
    if end / 1e6 > free:
        raise UnsupportedError(
            f"the objects of this Python program need {end / 1e6:,.0f} MB more for other processes,"
            f" of {free:,.0f} free"
        )
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    header = json.dumps({"path": path, "places": places}).encode()
    start = -(-(_HEAD + len(header)) // _LINE) * _LINE
    descriptor = anonymous_memory("objects")
    try:
        os.ftruncate(descriptor, start + max(end, 1))
        with mmap.mmap(descriptor, 0) as memory:
            memory[:_HEAD] = len(header).to_bytes(_HEAD, "little")
            memory[_HEAD : _HEAD + len(header)] = header
            for view, (at, size) in zip((memoryview(data), *views), places, strict=True):
                memory[start + at : start + at + size] = view
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def receive(descriptor: int) -> dict[str, Any]:
    """What `send` has put there; modules are looked for where the program looks for them."""
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(memory[:_HEAD], "little")
    header = parse_json(memory[_HEAD : _HEAD + length])
    start = -(-(_HEAD + length) // _LINE) * _LINE
    sys.path[:] = [*header["path"], *(e for e in sys.path if e not in header["path"])]
    importlib.invalidate_caches()
    whole = memoryview(memory)
    data, *buffers = (whole[start + at : start + at + size] for at, size in header["places"])
    try:
        found = pickle.loads(data, buffers=buffers)
    except PacelineError:
        raise
    except Exception as error:
        raise UnsupportedError(
            "the objects of this Python program cannot be opened in another process"
            f" ({_said(error)}): use local.strategy = 'threads' or 'replicas'"
        ) from error
    assert isinstance(found, dict)
    return found


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Tensors go beside the pickle, as arrays do by themselves."""

    def reducer_override(self, thing: Any) -> Any:
        import torch

        if type(thing) is torch.Tensor and _is_plain(thing):
            flat = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            kind = str(thing.dtype).removeprefix("torch.")
            buffer = pickle.PickleBuffer(flat.data)
            return _tensor, (buffer, kind, tuple(thing.shape))
        return super().reducer_override(thing)


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(buffer: Any, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    dtype = getattr(torch, kind)
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def _pickled(parts: dict[str, Any]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickle, and what lies beside it."""
    try:
        return _dumped(parts)
    except Exception as error:
        name, fault = next(_faults(parts), ("object", error))
        raise UnsupportedError(
            f"the {name} of this Python program cannot be sent to other processes ({_said(fault)}):"
            " put it, or a function that makes it, into a module that can be imported from the"
            " current folder, or use local.strategy = 'threads' or 'replicas'"
        ) from error


def _faults(parts: dict[str, Any]) -> Any:
    for name, part in parts.items():
        try:
            _dumped(part)
        except Exception as error:
            yield name, error


def _dumped(thing: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(thing)
    return stream.getvalue(), buffers


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
