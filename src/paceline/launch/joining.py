"""Hosts that come to a training under way, and how the others hear of one that has gone.

While a training takes new nodes, the run directory has a file that only its owner can read: where
the launcher listens, and the run's secret. `paceline join` asks there; the launcher starts an agent
on the host, gives it the number of a node that was lost (or a new one) and lets it train. The
servers, or the node that leads the legs, do the rest. A host that was lost from a training in legs
is asked again by itself until it answers. Who asks may say what the host is called and where it is,
and no more: which Python is started there the launcher knows itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.environment import passed_variables
from paceline.errors import ConfigError, PacelineError, RunDirectoryError, WorkerError
from paceline.launch.agent import DOOR, MARKER
from paceline.launch.channel import Channel, Message, connect
from paceline.launch.control import addresses_towards
from paceline.launch.engines import Launch, StartedProcesses
from paceline.launch.ssh import SshEngine
from paceline.plan.together import plain_node
from paceline.schema import Plan, decode, encode
from paceline.schema.codec import rule
from paceline.schema.hosts import Host, NodePlace
from paceline.schema.legs import LegsOrder
from paceline.schema.plain import ONE_LINE, checked, parse_json
from paceline.secure.files import read_private, write_private

if TYPE_CHECKING:
    from paceline.launch.session import Session

_NOTE = {"addresses": [ONE_LINE], "port": int, "secret": ONE_LINE}
ANSWER_SECONDS = 150.0
AGAIN_SECONDS = 5.0
"""After which a host that was lost is asked whether it is back, ..."""
MOST_PAUSE_SECONDS = 60.0
"""... and at most between two times, ..."""
PAUSE_PART = 0.1
"""... which is this part of how long it has been away: it stays out so much longer at most."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """What may be said of a host that is to join."""

    name: str
    address: str = ""
    cores: int | None = rule(default=None, minimum=1)


@dataclass
class Newcomer:
    """A host on its way into the training."""

    place: NodePlace
    running: StartedProcesses
    guest: Channel | None
    """Who asked for it, and is to be answered; None: it was lost, and is asked again."""
    deadline: float
    is_welcome: bool = False


@dataclass(frozen=True)
class Missed:
    """A host that was lost."""

    host: Host
    since: float
    """When it was lost (monotonic)."""
    next_try: float
    """When it is asked again."""

    @staticmethod
    def now(host: Host) -> Missed:
        """A host that was lost just now."""
        since = time.monotonic()
        return Missed(host, since, since + AGAIN_SECONDS)

    def asked(self, now: float) -> Missed:
        """The same, asked now.

        >>> missed = Missed(Host(name="a"), 0.0, 5.0)
        >>> [missed.asked(now).next_try for now in (5.0, 100.0, 6000.0)]
        [10.0, 110.0, 6060.0]
        """
        pause = max(AGAIN_SECONDS, min(MOST_PAUSE_SECONDS, PAUSE_PART * (now - self.since)))
        return Missed(self.host, self.since, now + pause)


class Joining:
    """Everything about hosts that come later, from the launcher's side."""

    def __init__(self, session: Session, plan: Plan, start: Message) -> None:
        self.session, self.plan, self.start = session, plan, start
        self.coming: dict[int, Newcomer] = {}
        self.started: list[StartedProcesses] = []
        self._door = session.order.run.path / DOOR
        self.missed: dict[str, Missed] = {}
        """Hosts that were lost, and are asked again."""
        self._is_open = (bool(plan.servers) or session.in_legs) and session.engine.backend == "gloo"
        self._keep_open()
        if session.in_legs:
            self.missed = {host.name: Missed.now(host) for host in session.order.absent}

    def tell_of_loss(self, node: int, why: str = "") -> None:
        """Spare the others the wait for a host that is silent, whose connection stays open."""
        session = self.session
        told = range(len(session.places)) if session.in_legs else self.plan.servers or (0,)
        for other in told:
            if other != node:
                session.control.send(other, "lost", lost=node, why=why)
        host = session.places[node].host
        # Of several nodes on one host, each would have to be given its part of the cores again.
        if session.in_legs and host.slots == 1 and not session.engine.places_nodes:
            self.missed[host.name] = Missed.now(host)

    def _keep_open(self) -> None:
        """Put back what an agent that was cut off has removed: it took the launcher for dead."""
        marker = self.session.order.run.path / MARKER
        if self._is_open and not marker.exists():
            marker.write_text(self.session.marker)
        if self._is_open and not self._door.exists():
            self._open()

    def _open(self) -> None:
        control = self.session.control
        note = {
            "addresses": self.session.addresses,
            "port": control.port,
            "secret": control.secret,
        }
        write_private(self._door, json.dumps(note))

    def close(self) -> None:
        """Nobody can come any more; end what was started."""
        self._is_open = False
        self._door.unlink(missing_ok=True)
        for newcomer in list(self.coming.values()):
            self._refuse(newcomer, "the training has ended")
        for running in self.started:
            running.end()

    # --- every turn ---------------------------------------------------------------

    def turn(self) -> None:
        """Let those in who ask, and see how far the others are."""
        control = self.session.control
        self._keep_open()
        while control.guests:
            guest, message = control.guests.pop(0)
            try:
                self._ask(guest, self._known(decode(JoinRequest, message["host"])))
            except (PacelineError, OSError) as error:  # a guest's mistake must not end the training
                _answer(guest, False, str(error))
        self._ask_missed()
        for node, newcomer in list(self.coming.items()):
            if node in control.peers and not newcomer.is_welcome:
                newcomer.is_welcome = True
                self.session.welcome(newcomer.place)
            failure = newcomer.running.failure()
            if failure is not None and node not in control.peers:
                self._refuse(newcomer, f"host {newcomer.place.host.name} did not start: {failure}")
            elif time.monotonic() > newcomer.deadline:
                self._refuse(newcomer, f"host {newcomer.place.host.name} did not start in time")

    def _ask_missed(self) -> None:
        """Ask hosts again that were lost, one at a time, less often the longer they are away."""
        now = time.monotonic()
        missed = min(self.missed.values(), key=lambda each: each.next_try, default=None)
        if missed is None or self.coming or now < missed.next_try:
            return
        self.missed[missed.host.name] = missed.asked(now)
        with contextlib.suppress(PacelineError, OSError):
            self._ask(None, missed.host)

    def _known(self, asked: JoinRequest) -> Host:
        """The host that is meant, started as the hosts of this training are."""
        hosts = self.session.order.hosts
        mine = next((host for host in hosts.host if host.name == asked.name), None)
        how = mine or hosts.defaults
        ssh = {"user": how.user, "port": how.port, "key": how.key}
        if "@" in asked.address:
            ssh["user"] = None
        words = {"address": asked.address, "cores": asked.cores, "python": how.python, **ssh}
        return decode(Host, {"name": asked.name, **words})

    def _ask(self, guest: Channel | None, host: Host) -> None:
        session = self.session
        names = [p.host.name for p in session.places if p.node not in session.gone]
        names += [newcomer.place.host.name for newcomer in self.coming.values()]
        if not self._is_open:
            _answer(guest, False, "this training takes no workers that come later")
            return
        if host.name in names:
            _answer(guest, False, f"host {host.name} takes part already: name another one")
            return
        if self.coming:
            _answer(guest, False, "another host is joining: ask again when it has")
            return
        place = NodePlace(node=self._free_number(host), host=host)
        session.control.expect(place.node)
        addresses = addresses_towards([host.network_address])
        launch = Launch(
            places=(place,),
            addresses=tuple(addresses),
            port=session.control.listen(addresses[0]),
            secret=session.control.secret,
            run=session.order.run.path.resolve(),
        )
        engine = session.engine if session.engine.finds_hosts else SshEngine()
        running = StartedProcesses(engine.command_lines(launch), launch.run)
        self.started.append(running)
        deadline = time.monotonic() + session.order.start_seconds
        self.coming[place.node] = Newcomer(place, running, guest, deadline)
        if guest is not None:
            session.order.say(f"host {host.name} is asked to join as node {place.node}")

    def _free_number(self, host: Host) -> int:
        """The number of a worker that was lost, its own host's first; else one more."""
        session = self.session
        free = sorted(session.gone)
        own = [node for node in free if session.places[node].host.name == host.name]
        return next(iter(own + free), len(session.places))

    def hear(self, node: int, message: Message) -> bool:
        """A message of a node that is on its way; False: it is none."""
        newcomer = self.coming.get(node)
        if newcomer is None:
            return False
        if message["kind"] == "ready":
            self.missed.pop(newcomer.place.host.name, None)
            self._begin(newcomer, message)
        elif message["kind"] == "error":
            self._refuse(newcomer, str(message["report"]["message"]))
        return True

    def lose(self, node: int) -> bool:
        """A node on its way was lost; False: it is none."""
        newcomer = self.coming.get(node)
        if newcomer is not None:
            self._refuse(newcomer, f"host {newcomer.place.host.name} has gone while it started")
        return newcomer is not None

    def _begin(self, newcomer: Newcomer, ready: Message) -> None:
        """Let a node train, now that its agent is there."""
        session, place = self.session, newcomer.place
        node, start = place.node, self.start
        if session.in_legs:
            plan = self._with_node(place, min(int(ready["usable"]), len(ready["cores"])))
            order = LegsOrder(joins=True, writers=(node,) if ready["shared"] else ())
            start = start | {"legs": encode(order)}
            self.plan = plan  # the next one may have the number after it
        else:
            plan = self.plan.with_servers(len(self.plan.servers), joining=node)
            nodes = list(plan.nodes)
            nodes[node] = dataclasses.replace(nodes[node], host=place.host.name, cores=())
            plan = dataclasses.replace(plan, nodes=tuple(nodes))
        session.take_in(place, rank=sum(other.ranks for other in plan.nodes[:node]))
        session.control.send(node, "start", **(start | {"plan": encode(plan), "joins": True}))
        del self.coming[node]
        _answer(newcomer.guest, True, f"host {place.host.name} joins as node {node}")

    def _with_node(self, place: NodePlace, usable: int) -> Plan:
        """All nodes, with one that has come in the place of one that was lost, or as one more."""
        node = plain_node(place.host.name, usable)
        nodes = list(self.plan.nodes)
        nodes[place.node :] = [node, *nodes[place.node + 1 :]]
        return dataclasses.replace(self.plan, nodes=tuple(nodes))

    def _refuse(self, newcomer: Newcomer, why: str) -> None:
        self.coming.pop(newcomer.place.node, None)
        newcomer.running.end()
        if newcomer.guest is not None:
            self.session.order.say(f"no host joins: {why}")
        _answer(newcomer.guest, False, why)


def _answer(guest: Channel | None, is_in: bool, text: str) -> None:
    if guest is not None:
        guest.send("answer", joined=is_in, text=text)
        guest.close()


def ask_to_join(run: Path, host: Host) -> str:
    """Ask the launcher of a run to take a host in; its answer, or an error."""
    try:
        note = checked(parse_json(read_private(run / DOOR)), _NOTE)
        if not 0 < note["port"] < 2**16 or not note["secret"]:
            raise ValueError("no port, or no secret")
    except PermissionError:
        raise RunDirectoryError(
            f"{run / DOOR} is not yours: only who trains can let hosts join"
        ) from None
    except (OSError, ValueError):
        raise RunDirectoryError(
            f"{run} takes no workers now: a host can join a training while it runs, over Gloo"
            " (--engine ssh), in legs or with exchange.kind = 'parameter_server'"
        ) from None
    if host.python not in (None, sys.executable):
        raise ConfigError(
            f"host {host.name} has python = {host.python!r}, which a training does not take from"
            " who asks: set it in the hosts.toml that the training is started with, for this host"
            " or in [defaults]"
        )
    try:
        places = [(address, note["port"]) for address in note["addresses"]]
        channel = connect(places, note["secret"])
    except ConnectionError as error:
        raise RunDirectoryError(f"{run} is not being trained any more: {error}") from None
    asked = JoinRequest(name=host.name, address=host.address, cores=host.cores)
    channel.send("join", host=encode(asked))
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        channel.wait(0.5)
        messages, is_open = channel.receive()
        for message in messages:
            if message["kind"] != "answer":
                continue
            channel.close()
            if message["joined"]:
                return str(message["text"])
            raise WorkerError(f"host {host.name} cannot join: {message['text']}")
        if not is_open:
            channel.close()
            raise WorkerError("the training ended before the host could join")
    channel.close()
    raise WorkerError(f"the launcher did not answer within {ANSWER_SECONDS:.0f} s")


def welcome_fields(session: Session, place: NodePlace) -> Message:
    """What an agent is told first: where the run is, and which cores are its own."""
    return {
        "run": str(session.order.run.path.resolve()),
        "marker": session.marker,
        "identity": session.identity,
        "config": session.order.config,
        "folder": str(Path.cwd()),
        "variables": passed_variables(),
        "slots": place.host.slots,
        "slot": place.slot,
        "cores": place.host.cores,
        "silence": session.order.silence,
    }


def one_host(hosts: tuple[Host, ...], text: str) -> Host:
    """The one host that `--host` means."""
    if len(hosts) != 1 or hosts[0].slots != 1:
        raise ConfigError(f"--host {text!r} must name one host with one slot: ask once for each")
    return hosts[0]
