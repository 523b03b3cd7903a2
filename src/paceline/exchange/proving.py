"""Members of a Gloo group prove to each other that they belong to the run.

Gloo itself asks nobody who connects: what it is told first is these few bytes, over the very
connections that will carry tensors. A member that cannot prove itself ends the opening of the
group, before it was sent anything of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.errors import WorkerError
from paceline.secure.sealing import MAGIC, NONCE_BYTES, PROOF_BYTES, Sealing, UnknownPeerError

_TAG = 1902
"""Messages of the proof; other messages between nodes have other numbers."""
_STEPS = (len(MAGIC) + NONCE_BYTES,) * 2 + (PROOF_BYTES,) * 2


def prove_members(
    group: Any, rank: int, others: Iterable[int], secret: str, purpose: str
) -> dict[int, Sealing]:
    """Prove all pairs at once; every member calls it. What seals the messages of each pair."""
    sealings = {
        other: Sealing(
            secret, f"{purpose} {min(rank, other)}-{max(rank, other)}", asks=rank > other
        )
        for other in others
    }
    for number, size in enumerate(_STEPS):
        works, kept = [], []
        rooms: dict[int, torch.Tensor] = {}
        for other, sealing in sealings.items():
            if (rank > other) == (number % 2 == 0):
                kept.append(torch.frombuffer(bytearray(sealing.take_output()), dtype=torch.uint8))
                works.append(group.send([kept[-1]], other, _TAG))
            else:
                rooms[other] = torch.empty(size, dtype=torch.uint8)
                works.append(group.recv([rooms[other]], other, _TAG))
        for work in works:
            work.wait()
        for other, room in rooms.items():
            try:
                sealings[other].feed(bytes(room.tolist()))
            except UnknownPeerError as error:
                raise WorkerError(
                    f"member {other} of {purpose} does not belong to this run ({error}): somebody"
                    " else on the network has taken its place; keep strangers off that network"
                ) from None
    return sealings
