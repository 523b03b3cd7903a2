"""Gradients that are compressed between hosts; between ranks of one machine nothing is.

The ranks of a host add up first, its first rank then agrees with those of the other hosts, and
gives the sum to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.config import config_from
from paceline.errors import DivergedError, UnsupportedError
from paceline.exchange.buckets import Waitable
from paceline.exchange.compression.by_parameter import ByParameter, by_parameter
from paceline.exchange.memory import gathered, of_node
from paceline.exchange.network import Network
from paceline.exchange.turns import Turn, Turns
from paceline.local.finite import bad_of, is_finite
from paceline.pace.ranks import Ranks
from paceline.schema import ExchangeSettings

DIVERGED = (
    "the training has diverged (lower the learning rate, warm it up, or clip gradients), or memory"
    " or processor are faulty"
)


def exchange_settings(compression: str, rank: int, *, legs: bool) -> ExchangeSettings:
    """As config.toml has them, checked as it is."""
    found = config_from({"exchange.compression": compression, "exchange.rank": rank}).exchange
    if found.compression != "none" and legs:
        raise UnsupportedError(
            f"compression = {compression!r} changes results, and legs give those of one process:"
            " use Pace(legs=False), or compression='none'"
        )
    return found


class Compressed:
    """This rank's part of sums between hosts, compressed where that was asked for."""

    def __init__(
        self,
        ranks: Ranks,
        settings: ExchangeSettings,
        updates: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        """`updates`: how many the training has done."""
        self._ranks, self._settings, self._updates, self._say = ranks, settings, updates, say
        self.is_open = False
        self._leaders: list[int] = []
        """The first rank of every host."""
        self._leader = 0
        """This host's."""
        self._inside: Any = None
        """The ranks of this host, where it has several."""
        self._way: ByParameter | None = None
        self._network: Network | None = None
        self._turns = Turns("compressed")
        self._numbers: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin, or go on, with what is trained, in the same order on every rank: each calls it."""
        if self._settings.compression == "none":
            return
        self._parameters = list(parameters)
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}
        if self._leaders:
            return
        hosts = self._ranks.hosts
        self._leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        if len(self._leaders) == 1:
            self._say(
                f"paceline: compression={self._settings.compression!r} has no effect: gradients"
                " are compressed between hosts, and there is one"
            )
            return
        self._join(hosts)
        self.is_open = True

    def _join(self, hosts: Sequence[str]) -> None:
        mine = self._ranks.rank
        self._leader = hosts.index(hosts[mine])
        for leader in self._leaders:
            here = [rank for rank in self._ranks.everyone if hosts[rank] == hosts[leader]]
            group = dist.new_group(here) if len(here) > 1 else None
            self._inside = group if mine in here else self._inside
        between = dist.new_group(self._leaders)
        if mine == self._leader:
            names = [hosts[leader] for leader in self._leaders]
            self._network = Network(between, names, backend=dist.get_backend())
            self._way = by_parameter(self._settings, self._network, self._updates)

    def begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> _Sum:
        """Begin to add up a bucket over all ranks, in place."""
        if not is_finite(flat):
            raise DivergedError(
                f"rank {self._ranks.rank} on {self._ranks.hosts[self._ranks.rank]} has a gradient"
                f" in update {self._updates() + 1} of which {bad_of(flat)} are not finite:"
                f" {DIVERGED}"
            )
        added = None
        if self._inside is not None:
            added = dist.reduce(flat, self._leader, group=self._inside, async_op=True)
        found = _Sum(flat, added, self._leader, self._inside)
        if self._network is not None:
            found.turn = self._turns.begin(
                self._network, lambda: found.go_on(lambda: self._between(flat, parameters))
            )
        return found

    def _between(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Waitable:
        assert self._network is not None
        assert self._way is not None
        self._network.place = f"update {self._updates() + 1}"
        if flat.dtype is not torch.float32:
            return self._network.sum(flat, "the sum of gradients")
        return self._way.begin(flat, [(self._numbers[id(each)], each) for each in parameters])

    def give_back(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """What was sent in vain: no rank had a gradient, and what was added up were errors."""
        if self._way is not None and self._ranks.is_first:
            self._way.give_back(self._numbers[id(parameter)], total)

    def memory(self) -> dict[str, torch.Tensor]:
        """On the first rank: what all hosts carry from update to update; every rank calls it."""
        if self._network is None or self._way is None:
            return {}
        return gathered(self._way.memory(), self._network)

    def restore(self, entries: dict[str, Any]) -> None:
        """What a checkpoint has of `memory`; nothing of it if there were other hosts then."""
        nodes = {key.partition("/")[0] for key in entries}
        if self._way is not None and len(nodes) == len(self._leaders):
            place = self._leaders.index(self._ranks.rank)
            self._way.restore(of_node(entries, place), self._parameters)

    def close(self) -> None:
        self._turns.close()


class _Sum:
    """One bucket on its way: inside of the host, between hosts, and back."""

    def __init__(self, flat: torch.Tensor, added: Any, leader: int, inside: Any) -> None:
        self._flat, self._added, self._leader, self._inside = flat, added, leader, inside
        self.turn: Turn | None = None
        self._pending: Waitable | None = None

    def go_on(self, between: Callable[[], Waitable]) -> None:
        """On the thread of a host's first rank."""
        if self._added is not None:
            self._added.wait()
        self._pending = between()

    def wait(self) -> None:
        """Return when the sum of all ranks is there."""
        if self.turn is not None:
            self.turn.wait()
            assert self._pending is not None
            self._pending.wait()
        elif self._added is not None:
            self._added.wait()
        if self._inside is not None:
            dist.broadcast(self._flat, self._leader, group=self._inside)
