"""How far the clocks of two hosts are apart, from messages there and back.

The one who asks notes when it sent and when the answer came, the other when it received and
when it answered. Without knowing how the way there compares with the way back, the offset can
be told to within half of the round trip; the fastest of several round trips tells it best.

    asks      t1 ------.                .------> t4      offset = ((t1 - t2) + (t4 - t3)) / 2
                        `---> t2 ... t3'                 uncertainty = ((t4 - t1) - (t3 - t2)) / 2
    answers
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

ROUNDS = 24
_FORMAT = struct.Struct("<dd")
MESSAGE_BYTES = _FORMAT.size
"""Every message, in both directions, has this many bytes."""

Send = Callable[[bytes], None]
Receive = Callable[[], bytes]
Now = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The asking host's clock minus the answering host's."""

    seconds: float
    uncertainty: float


def offset_of(t1: float, t2: float, t3: float, t4: float) -> Offset:
    """What one round trip says.

    >>> offset_of(10.0, 7.5, 7.5, 11.0)
    Offset(seconds=3.0, uncertainty=0.5)
    """
    return Offset(
        seconds=((t1 - t2) + (t4 - t3)) / 2,
        uncertainty=max(((t4 - t1) - (t3 - t2)) / 2, 0.0),
    )


def ask(send: Send, receive: Receive, *, rounds: int = ROUNDS, now: Now = time.time) -> Offset:
    """The offset to a peer that calls `answer` with as many rounds."""
    found = []
    for _ in range(rounds):
        t1 = now()
        send(_FORMAT.pack(t1, 0.0))
        t2, t3 = _FORMAT.unpack(receive())
        found.append(offset_of(t1, t2, t3, now()))
    return min(found, key=lambda offset: offset.uncertainty)


def answer(send: Send, receive: Receive, *, rounds: int = ROUNDS, now: Now = time.time) -> None:
    """The other side of `ask`."""
    for _ in range(rounds):
        receive()
        t2 = now()
        send(_FORMAT.pack(t2, now()))


def offset_to_first(
    rank: int,
    nodes: Sequence[int],
    send: Callable[[int, bytes], None],
    receive: Callable[[int], bytes],
    *,
    now: Now = time.time,
) -> Offset:
    """This rank's offset to the first one; every rank calls it, at the same time.

    `nodes` is the node of every rank: ranks of the first node read the same clock, so they
    exchange nothing. `send(rank, data)` and `receive(rank)` carry `MESSAGE_BYTES` bytes.
    """
    others = [other for other, node in enumerate(nodes) if node != nodes[0]]
    if rank == 0:
        for other in others:
            answer(partial(send, other), partial(receive, other), now=now)
    elif rank in others:
        return ask(partial(send, 0), partial(receive, 0), now=now)
    return Offset(seconds=0.0, uncertainty=0.0)
