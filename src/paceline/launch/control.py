"""The launcher's end of all control connections: who is there, who was heard of, who is lost."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import UserError
from paceline.launch.channel import (
    BEAT_SECONDS,
    PURPOSE,
    SILENCE_SECONDS,
    SLACK_SECONDS,
    Channel,
    Message,
)
from paceline.launch.ssh import is_here
from paceline.secure.addresses import LOOPBACK, is_loopback
from paceline.secure.door import Door
from paceline.secure.sealing import new_secret
from paceline.text import place_name

GREETING_SECONDS = 10.0
"""A connection that has not said who it is by then is closed."""
_PORT_TRIES = 20
"""Ports that are tried until one is free at all of this machine's addresses that are needed."""


@dataclass
class Peer:
    """An agent, as the launcher knows it."""

    node: int
    channel: Channel
    host: str = ""
    address: str = ""
    """Where it called from."""
    cores: tuple[int, ...] = ()
    heard: float = field(default_factory=time.monotonic)
    places: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def place(self) -> str:
        """Where its ranks were when they were last heard of."""
        if not self.places:
            return "start-up"
        least = min(self.places, key=lambda place: int(place["update"]))
        return place_name(least["phase"], int(least["update"]))


@dataclass(frozen=True)
class Lost:
    """An agent that has gone without a goodbye."""

    node: int
    silent_seconds: float | None
    """How long nothing was heard; None: its connection was closed."""
    fault: str = ""
    """What was wrong with its last message, if that is why the connection was closed."""


class Control:
    """Listens for agents, and talks with those that know the run's secret."""

    def __init__(
        self,
        nodes: int,
        addresses: Sequence[str] = (LOOPBACK,),
        *,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """`addresses`: of this machine, where the hosts can reach it, and nowhere else."""
        self.silence = silence
        self.patience: dict[int, float] = {}
        """Seconds after which a silent node is lost already, where that is sooner."""
        self.weighs = False
        """A loss costs no more than a leg: how long a silent node is waited for is weighed."""
        self.nodes = nodes
        self.secret = new_secret()
        self.peers: dict[int, Peer] = {}
        self.guests: list[tuple[Channel, Message]] = []
        """Who asks for another host to join, and has not been answered."""
        self._selector = selectors.DefaultSelector()
        self._door = self._open(addresses)
        self.port = self._door.listen(addresses[0])
        self._nameless: dict[Channel, float] = {}
        """Who knows the secret and has not said who it is."""
        self._beat = 0.0
        self._looked = time.monotonic()

    def _open(self, addresses: Sequence[str]) -> Door[Channel]:
        """A door at one port of all addresses."""
        for _ in range(_PORT_TRIES):
            door = Door(self.secret, PURPOSE, self._selector, Channel)
            try:
                port = door.listen(addresses[0])
                if all(door.listen(address, port) == port for address in addresses):
                    return door
            except OSError as error:
                door.close()
                raise UserError(
                    f"the launcher cannot listen at {', '.join(addresses)}: {error.strerror}"
                ) from None
            door.close()
        raise UserError(f"no port is free at all of {', '.join(addresses)}")

    def listen(self, address: str) -> int:
        """Listen at another address of this machine, for a host that comes later; its port."""
        return self._door.listen(address, self.port)

    @property
    def strangers(self) -> int:
        """Connections that have not proved anything."""
        return self._door.strangers

    @property
    def missing(self) -> list[int]:
        """Nodes whose agent has not come yet."""
        return [node for node in range(self.nodes) if node not in self.peers]

    @property
    def connected(self) -> set[int]:
        """Nodes whose agent has not closed its connection."""
        return {node for node, peer in self.peers.items() if peer.channel.fileno() >= 0}

    def expect(self, node: int) -> None:
        """Let an agent come for a node that is new, or whose agent was lost."""
        self.nodes = max(self.nodes, node + 1)
        self.cut(node)
        self.peers.pop(node, None)

    def cut(self, node: int) -> None:
        """Close the connection of a node that is lost: should it wake up, it ends by itself."""
        peer = self.peers.get(node)
        if peer is not None and peer.channel.fileno() >= 0:
            self._selector.unregister(peer.channel)
            peer.channel.close()

    def send(self, node: int, kind: str, **fields: Any) -> None:
        """Tell one agent something."""
        if node in self.connected:
            self.peers[node].channel.send(kind, **fields)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell all agents the same."""
        for node in self.peers:
            self.send(node, kind, **fields)

    def turn(self, seconds: float) -> tuple[list[tuple[int, Message]], list[Lost]]:
        """Wait a little; what agents have said since, and whom we have lost."""
        messages: list[tuple[int, Message]] = []
        lost: list[Lost] = []
        self._send_beats()
        self._door.look()
        for key, mask in self._selector.select(seconds):
            if key.data is self._door:
                known = self._door.attend(key.fileobj)
                if known is not None:
                    self._nameless[known] = time.monotonic()
                    self._selector.register(known, selectors.EVENT_READ, known)
                continue
            channel: Channel = key.data
            if mask & selectors.EVENT_WRITE:
                channel.flush()
            arrived, is_open = channel.receive()
            if channel in self._nameless:
                arrived, is_open = self._greet(channel, arrived, is_open)
            peer = next((p for p in self.peers.values() if p.channel is channel), None)
            if peer is None:
                continue
            messages += self._hear(peer, arrived)
            if not is_open:
                self._selector.unregister(channel)
                channel.close()
                del self.peers[peer.node]
                if not peer.ended:
                    self.peers[peer.node] = peer  # remembered for the message
                    lost.append(Lost(peer.node, None, channel.fault))
        lost += self._find_silent()
        return messages, lost

    def _hear(self, peer: Peer, arrived: list[Message]) -> list[tuple[int, Message]]:
        kept = []
        for message in arrived:
            peer.heard = time.monotonic()
            if message["kind"] == "beat":
                peer.places = list(message["ranks"])
                continue
            if message["kind"] == "patience":
                if self.weighs and peer.node == 0:
                    told = message["seconds"].items()
                    self.patience = {
                        int(node): s for node, s in told if node.isdecimal() and len(node) < 9
                    }
                continue
            if message["kind"] in ("end", "error"):
                peer.ended = True
            kept.append((peer.node, message))
        return kept

    def _send_beats(self) -> None:
        now = time.monotonic()
        if now >= self._beat:
            self._beat = now + BEAT_SECONDS
            late = [c for c, since in self._nameless.items() if now - since > GREETING_SECONDS]
            for channel in late:
                self._drop(channel)
        for peer in self.peers.values():
            if peer.channel.fileno() >= 0:
                waiting = selectors.EVENT_WRITE if peer.channel.is_waiting else 0
                self._selector.modify(peer.channel, selectors.EVENT_READ | waiting, peer.channel)

    def _find_silent(self) -> list[Lost]:
        now = time.monotonic()
        if now - self._looked > 2.0:  # we were stopped ourselves: nobody's silence
            for peer in self.peers.values():
                peer.heard += now - self._looked
        self._looked = now
        return [
            Lost(peer.node, now - peer.heard)
            for peer in self.peers.values()
            if not peer.ended
            and peer.channel.fileno() >= 0
            and now - peer.heard > self._limit(peer.node)
        ]

    def _limit(self, node: int) -> float:
        """Seconds without a word after which a node is lost."""
        return min(self.silence, self.patience.get(node, self.silence))

    def quiet(self, node: int) -> bool:
        """Whether a node that is connected has missed several of its beats."""
        least = min(map(self._limit, self.peers))  # who is lost first finds the others so
        return time.monotonic() - self.peers[node].heard > least / 2

    def _greet(
        self, channel: Channel, arrived: list[Message], is_open: bool
    ) -> tuple[list[Message], bool]:
        """Make who knows the secret a peer or a guest, by its first message."""
        if not arrived and is_open:
            return [], True
        hello: Message = arrived[0] if arrived else {"kind": ""}
        if hello["kind"] == "join":
            del self._nameless[channel]
            self._selector.unregister(channel)
            self.guests.append((channel, hello))
            return [], True
        node, cores = hello.get("node"), hello.get("cores") or []
        if hello["kind"] != "hello" or type(node) is not int or node not in self.missing:
            self._drop(channel)
            return [], False
        try:
            address = str(channel.connection.getpeername()[0])
        except OSError:  # it has gone already
            self._drop(channel)
            return [], False
        del self._nameless[channel]
        channel.allow_silence(self.silence + SLACK_SECONDS)
        self.peers[node] = Peer(
            node=node,
            channel=channel,
            host=hello.get("host") or "",
            address=address,
            cores=tuple(cores),
        )
        return arrived[1:], is_open

    def _drop(self, channel: Channel) -> None:
        self._nameless.pop(channel, None)
        self._selector.unregister(channel)
        channel.close()

    def close(self) -> None:
        """Close every connection; agents that are still there end what they have started."""
        self._door.close()
        for peer in self.peers.values():
            if peer.channel.fileno() >= 0:
                peer.channel.close()
        for channel in (*self._nameless, *(guest for guest, _ in self.guests)):
            channel.close()
        self._selector.close()


def addresses_towards(hosts: Sequence[str]) -> list[str]:
    """This machine's addresses on the ways to the hosts, so that they can reach it.

    The loopback alone when all hosts are this machine, and never otherwise.
    """
    if all(is_here(host) for host in hosts):
        return [LOOPBACK]
    found = [address for address in (_own_address_towards(host) for host in hosts) if address]
    outside = [address for address in found if not is_loopback(address)]
    return list(dict.fromkeys(outside or found or [LOOPBACK]))


def _own_address_towards(host: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None
