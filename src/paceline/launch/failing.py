"""A session that fails: who is to blame, and what is said of it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from paceline.errors import LostError, RunError
from paceline.launch import failures
from paceline.launch.channel import Message
from paceline.launch.control import Control, Lost
from paceline.launch.ssh import is_here
from paceline.text import printable

if TYPE_CHECKING:
    from paceline.launch.collect import Collecting
    from paceline.launch.session import HostOrder
    from paceline.schema.hosts import NodePlace
    from paceline.signals import Received

GRACE_SECONDS = 2.0
"""After a failure, how long others have to say what they know: the cause may come second."""
RECENT_SECONDS = 30.0
"""A loss that was survived is not the cause of what fails later than so."""
STACK_SECONDS = 1.5
"""How long a rank that hangs has to print where it stands."""


class Failing:
    """That part of a session that finds the cause of its end."""

    order: HostOrder
    control: Control
    collecting: Collecting
    signals: Received
    places: tuple[NodePlace, ...]
    first_ranks: list[int]
    failures: list[tuple[int, Message | Lost]]
    forgiven: dict[int, tuple[Message | Lost, float]]
    """How and when nodes were lost that the exchange survives, as long as they are not back."""
    unheard: set[str]
    """Hosts that were silent when the session failed: there is no use in asking them again."""
    said_cut_off = False
    """That no other host is heard any more was said."""

    def fail(self) -> None:
        """Raise the cause: what a rank says of itself, then a lost host, then what others say."""
        silent = any(isinstance(f, Lost) and f.silent_seconds for _, f in self.failures)
        # Who was silent for so long has given the others time enough to speak.
        deadline = time.monotonic() + (0.0 if silent else GRACE_SECONDS)
        while time.monotonic() < deadline and not self.has_cause():
            messages, lost = self.control.turn(0.05)
            known = {node for node, _ in self.failures}
            self.failures += [(each.node, each) for each in lost if each.node not in known]
            for node, message in messages:
                if message["kind"] == "line":
                    self.show(node, message)
                elif message["kind"] == "error":
                    self.failures.append((node, message))
                else:
                    self.collecting.hear(node, message)
        self.unheard = self.silent_hosts()
        # The first node may only say that it has lost another, just now.
        recent = time.monotonic() - RECENT_SECONDS
        causes = list(self.failures)
        causes += [(node, how) for node, (how, when) in self.forgiven.items() if when > recent]
        node, cause = min(causes, key=lambda failure: failures.order(failure[1]))
        if isinstance(cause, Lost):
            raise LostError(self.lost_sentence(cause))
        if cause["report"]["kind"] == "DeadlineError":
            self.ask_where()
        if self.signals.numbers and node == 0:  # it had not yet begun to train
            self.interrupt(self.signals.numbers[0])
        try:
            failures.raise_report(cause["report"], self.places[node].host.name)
        except RunError as error:
            raise (LostError(str(error)) if failures.may_pass(cause) else error) from None

    def ask_where(self) -> None:
        """Let nodes print where they stand that others have waited for in vain."""
        spoken = {node for node, _ in self.failures}
        asked = self.control.connected - spoken
        for node in asked:
            self.control.send(node, "stack")
        deadline = time.monotonic() + (STACK_SECONDS if asked else 0.0)
        while time.monotonic() < deadline:
            for node, message in self.control.turn(0.05)[0]:
                if message["kind"] == "line":
                    self.show(node, message)

    def has_cause(self) -> bool:
        return any(failures.order(failure) <= 1 for _, failure in self.failures)

    def silent_hosts(self) -> set[str]:
        """Hosts that have said nothing for too long."""
        every = [*(how for _, how in self.failures), *(how for how, _ in self.forgiven.values())]
        lost = [each for each in every if isinstance(each, Lost)]
        found = {each.node for each in lost if each.silent_seconds is not None}
        quiet = self.cut_off() if found else []
        return {self.places[node].host.name for node in (*found, *quiet)}

    def reached(self, node: int) -> int:
        """The update that a node was in when it was last heard of."""
        peer = self.control.peers.get(node)
        return max((int(place["update"]) for place in peer.places), default=0) if peer else 0

    def cut_off(self) -> list[int]:
        """Nodes of other machines, if none of them is heard: the link that is down is our own."""
        places = [p for p in self.places if not is_here(p.host.network_address)]
        nodes = [place.node for place in places if place.node in self.control.connected]
        alone = len({place.host.name for place in places}) > 1
        return nodes if alone and nodes and all(map(self.control.quiet, nodes)) else []

    def say_loss(self, lost: Lost) -> None:
        """Of a node that the others can do without: a line, or one for all where we are cut off."""
        if lost.silent_seconds is None or not self.cut_off():
            self.order.say(f"{self.lost_sentence(lost)}; the others go on")
        elif not self.said_cut_off:  # whether anything goes on here, what else is lost will tell
            self.said_cut_off = True
            self.order.say(self.lost_sentence(lost))

    def lost_sentence(self, lost: Lost) -> str:
        if lost.silent_seconds is not None and (nodes := self.cut_off()):
            return (
                f"the launcher has not heard of any other host ({self.names(nodes)}) for"
                f" {lost.silent_seconds:.0f} s: the link of this machine is down"
            )
        host = self.places[lost.node].host.name
        place = self.control.peers[lost.node].place
        return failures.lost_sentence(lost, host, self.first_ranks[lost.node], place)

    def names(self, nodes: list[int]) -> str:
        """Hosts in words.

        One host of several nodes is named once.
        """
        names = list(dict.fromkeys(self.places[node].host.name for node in nodes))
        return f"host {names[0]}" if len(names) == 1 else f"hosts {', '.join(names)}"

    def show(self, node: int, message: Message) -> None:
        host = self.places[node].host.name
        self.order.show(f"[{host} rank {message['rank']}] {printable(message['text'])}")

    def interrupt(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
