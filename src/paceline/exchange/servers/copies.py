"""Server groups that hold a copy of the weights each, and how the copies become one again.

Every server of a later group has a counterpart in the first group, which holds the same shard.
From time to time it sends what its own workers have changed since the last time, and gets the
first group's weights back:

    first group     w  <-  w + d               d: what the other group's workers have done
    other group     v  <-  w + (what came to v while the message was under way)

Nobody waits: workers push and pull while copies travel. The changes of all groups are added up,
so that the updates of all workers for one global batch are one synchronous update at the same
rate, as with one copy. With the changes travel the small things that the first server keeps for
all: losses, news, who still trains, the wish to stop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.exchange.servers.staleness import Staleness
from paceline.exchange.wire import (
    Answer,
    BadMessageError,
    Connection,
    Kind,
    Request,
    check_finite,
    check_word,
)
from paceline.schema.plain import ONE_LINE, checked, parse_json

if TYPE_CHECKING:
    from paceline.exchange.servers.server import ShardServer

_WORD = {"bytes_sent": int, "bytes_received": int, "news": [ONE_LINE], "told": [float]}
TELL_SECONDS = 0.2
"""Between two words of a server group to the first one."""


@dataclass(kw_only=True)
class Word:
    """What a server of a later group last said of itself."""

    training: int = 1
    """Workers that still train there; the group itself counts as one until it is done."""
    progress: int = 0
    updates: int = 0
    mixes: int = 0
    staleness: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    news: list[str] = field(default_factory=list)
    """Lines that were not told before."""
    told: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Losses, right answers and samples that were not told before."""
    stop: bool = False


class Words:
    """What all later groups have last said, as the first group's server knows it."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._words = {node: Word() for node in nodes}

    def hear(self, node: int, text: str) -> Word:
        """Remember the word of a server."""
        try:
            word = parse_json(text)
            check_word(word, ("training", "progress", "updates", "mixes"))
            heard = Word(**checked(word, _WORD))
            Staleness().merge(heard.staleness)
        except (TypeError, ValueError) as error:
            raise BadMessageError("sent a word that says nothing") from error
        self._words[node] = heard
        return heard

    def finish(self, node: int) -> None:
        """A group whose workers have all ended."""
        if node in self._words:
            self._words[node].training = 0

    def added_to(self, report: dict[str, Any]) -> dict[str, Any]:
        """A report of the first group's server with what the others have done."""
        words = list(self._words.values())
        if not words:
            return report
        staleness = Staleness()
        staleness.merge(report["staleness"])
        for word in words:
            staleness.merge(word.staleness)
        names = ("updates", "training", "progress", "bytes_sent", "bytes_received")
        sums = {n: report[n] + sum(getattr(word, n) for word in words) for n in names}
        mixes = sum(word.mixes for word in words)
        return report | sums | {"staleness": staleness.encoded(), "mixes": mixes}


class Copy:
    """A later group's shard, kept close to the first group's."""

    def __init__(
        self, holder: ShardServer, link: Connection, *, every: int, base: torch.Tensor
    ) -> None:
        """`base`: the weights that both groups have begun with."""
        self._holder, self._link, self._every = holder, link, every
        self._base = base
        self._mixed_at = self._mixes = 0
        self._told_at = 0.0

    def turn(self, updates: int, *, last: bool = False) -> None:
        """Called often: mixes and tells when it is time to; `last` does both for the last time."""
        due = last or updates - self._mixed_at >= self._every
        now = time.monotonic()
        if not due and now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        word = self._holder.tell_word()
        self._mixes += due
        word.mixes = self._mixes
        text = json.dumps(asdict(word))
        self._link.ask_with(Request(kind=Kind.MIX, sequence=int(due)), text)
        if due:
            self._mixed_at = updates
            sent = self._holder.copy_of_weights()
            self._link.send(sent - self._base)
        answer = self._link.answered()
        if due:
            self._base = self._link.receive(torch.empty_like(self._base))
            self._holder.add_to_weights(self._base - sent)
        self._holder.hear_stop(answer.stop)

    def close(self) -> None:
        """The last word, after which the group is no longer waited for."""
        self._link.ask(Request(kind=Kind.DONE))
        self._link.answered()
        self._link.close()


def take_copy(
    link: Connection,
    request: Request,
    hear: Callable[[str], Answer],
    change: Callable[[torch.Tensor], torch.Tensor],
    like: torch.Tensor,
) -> None:
    """The first group's end of `Copy.turn`: `change` adds to the weights and gives them."""
    answer = hear(link.text(request.length))
    if request.sequence:
        received = link.receive(torch.empty_like(like))
        check_finite(received, "a change of the weights")
        weights = change(received)
    link.answer(answer)
    if request.sequence:
        link.send(weights)
