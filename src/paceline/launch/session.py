"""A training on several hosts, from the launcher's side: gather, start, watch, end."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import WorkerError
from paceline.launch import failures
from paceline.launch.agent import MARKER, SAVE_SECONDS
from paceline.launch.carry import to_go_on_from
from paceline.launch.channel import SILENCE_SECONDS, Message
from paceline.launch.collect import Collecting, run_identity
from paceline.launch.control import Control, Lost, addresses_towards
from paceline.launch.engines import Engine, Launch, Running
from paceline.launch.failing import Failing
from paceline.launch.joining import Joining, welcome_fields
from paceline.run import RunDirectory
from paceline.schema import Plan, decode, encode, write_json
from paceline.schema.hosts import Host, Hosts, NodePlace
from paceline.schema.legs import LegsOrder
from paceline.schema.machines import Machines
from paceline.schema.plain import parse_toml
from paceline.secure.addresses import own_addresses
from paceline.secure.sealing import new_secret
from paceline.signals import Received, handled

START_SECONDS = 120.0
"""Every agent must have come by then, counted from when the engine could start them."""
LAST_SECONDS = 20.0
"""How long the others have to end once the first node has."""
END_SECONDS = 4.0
"""How long agents have to end when they are told to."""


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """What is to be done on the hosts."""

    run: RunDirectory
    hosts: Hosts
    config: str
    """config.toml, as text."""
    plan: Callable[[Session], tuple[Plan, LegsOrder | None]]
    """Makes the plan when every agent is there; for a training in legs, also what leads it."""
    program: str = "paceline.launch.member"
    """The module that trains one node by a plan."""
    legs_program: str = "paceline.workflow.hosts_member"
    """The module that trains one node in legs."""
    absent: tuple[Host, ...] = ()
    """Hosts that do not answer yet: a training in legs asks them again."""
    silence: float = SILENCE_SECONDS
    """Seconds without a word after which a host counts as lost."""
    continues: bool = False
    """The run was begun before: it must have a checkpoint."""
    silent: bool = False
    say: Callable[[str], None] = print
    show: Callable[[str], None] = print
    """Where the prefixed lines of ranks go."""
    start_seconds: float = START_SECONDS
    network: str | None = None
    interface: str | None = None
    store_port: int = 29500
    """What the checks found out; see `Launch`."""


class Session(Failing):
    """Everything that is under way on the hosts."""

    def __init__(self, order: HostOrder, engine: Engine) -> None:
        self.order, self.engine = order, engine
        self.places: tuple[NodePlace, ...] = order.hosts.places
        hosts = [place.host.network_address for place in self.places]
        # Where the engine chooses the hosts, nobody knows yet from where they will call.
        self.addresses = own_addresses() if engine.places_nodes else addresses_towards(hosts)
        self.control = Control(len(self.places), self.addresses, silence=order.silence)
        self.signals = Received()
        self.marker = secrets.token_hex(16)
        self.identity = self.marker[:16]
        self.running: Running | None = None
        self.failures: list[tuple[int, Message | Lost]] = []
        self.first_ranks = [0] * len(self.places)
        self.training = False
        self.ready: dict[int, Message] = {}
        self.spare: set[int] = set()
        """Nodes whose loss the exchange survives."""
        self.gone: set[int] = set()
        """Those of them that are lost."""
        self.forgiven = {}
        self.unheard: set[str] = set()
        """Hosts that were silent when the session failed: there is no use in asking them again."""
        self.is_led = False
        """The training goes in legs."""
        self.in_legs = False
        """The first node leads, and makes the next leg without a node that was lost."""
        self.joining: Joining | None = None
        self.collecting = Collecting(self)

    @property
    def hosts(self) -> Hosts:
        """The hosts, by the names that their agents gave where the engine has chosen them."""
        if not self.engine.places_nodes:
            return self.order.hosts
        return Hosts(host=tuple({place.host.name: place.host for place in self.places}.values()))

    # --- the whole ------------------------------------------------------------

    def run(self) -> int:
        """Train; the first node's exit code, or an error that names host, rank and operation."""
        self.identity = run_identity(self.order.run.path)
        with self.gathered():
            self.collecting.fetch()
            plan, legs = self.order.plan(self)
            write_json(self.order.run.plan, plan)
            return self.train(plan, legs)

    def visit(self, work: Callable[[Session], None]) -> None:
        """Do something else with the hosts than train, and let them go."""
        with self.gathered():
            work(self)
            for peer in self.control.peers.values():
                peer.ended = True

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """An agent on every host, until the end of the block."""
        marker = self.order.run.path / MARKER
        try:
            with handled(self.signals.note):
                self.let_save(marker)
                marker.write_text(self.marker)
                self.start()
                self.gather()
                yield
        finally:
            self.end()
            marker.unlink(missing_ok=True)

    def let_save(self, marker: Path) -> None:
        """Nodes of a launcher that was killed may still save: to begin now would lose that."""
        if not marker.exists():
            return
        seconds = SAVE_SECONDS + END_SECONDS
        self.order.say(
            "the launcher of this run was killed: waiting until its nodes have saved,"
            f" {seconds:.0f} s at most"
        )
        deadline = time.monotonic() + seconds
        while marker.exists() and time.monotonic() < deadline and not self.signals.numbers:
            time.sleep(0.05)
        if self.signals.numbers:
            self.interrupt(self.signals.numbers[0])

    def start(self) -> None:
        """Have the engine start one agent per node."""
        launch = Launch(
            places=self.places,
            addresses=tuple(self.addresses),
            port=self.control.port,
            secret=self.control.secret,
            run=self.order.run.path.resolve(),
            name=str(parse_toml(self.order.config).get("name", "run")),
            network=self.order.network,
            interface=self.order.interface,
            store_port=self.order.store_port,
        )
        self.running = self.engine.start(launch)

    def gather(self) -> None:
        """Wait for every agent, and tell each where the run is."""
        deadline: float | None = None
        told = ""
        while self.control.missing:
            self.pump(0.1)
            assert self.running is not None
            if (waits := self.running.waits_for()) not in ("", told):
                self.order.say(waits)
                told = waits
            if deadline is None and self.running.has_begun():
                deadline = time.monotonic() + self.order.start_seconds
            ended = self.running.failure()
            if ended is not None and self.control.missing:
                raise WorkerError(f"{self.names(self.control.missing)} did not start: {ended}")
            if deadline is not None and time.monotonic() > deadline:
                words = self.running.last_words()
                raise WorkerError(
                    f"{self.names(self.control.missing)} did not start within"
                    f" {self.order.start_seconds:.0f} s{': ' + words if words else ''}; is the"
                    f" launcher's port {self.control.port} open to the hosts?"
                )
        if self.engine.places_nodes:
            self.places = found_places(self.control)
        for place in self.places:
            self.welcome(place)
        self.ready = self.await_all("ready", "joining the run", self.order.start_seconds)

    def welcome(self, place: NodePlace) -> None:
        """Tell an agent where the run is."""
        self.control.send(place.node, "welcome", **welcome_fields(self, place))

    def take_in(self, place: NodePlace, *, rank: int) -> None:
        """Count a host that has joined among the others."""
        self.places = (*self.places[: place.node], place, *self.places[place.node + 1 :])
        self.first_ranks[place.node : place.node + 1] = [rank]
        self.spare.add(place.node)
        self.gone.discard(place.node)
        self.forgiven.pop(place.node, None)

    def measure(self, *, again: bool = False) -> dict[int, Machines]:
        """Let each node find out what planning must know of it, all at the same time."""
        self.control.tell("measure", again=again)
        answers = self.await_all("measure", "measuring", None)
        return {node: decode(Machines, answer["measure"]) for node, answer in answers.items()}

    def links(self, names: list[str], backend: str) -> list[Machines]:
        """Let the nodes measure what joins them; over MPI once, since it starts but once."""
        self.control.tell(
            "links",
            names=names,
            address=self.places[0].host.network_address,
            port=self.free_port(),
            backend=backend,
            secret=new_secret(),
        )
        answers = self.await_all("links", "measuring the network", None)
        return [decode(Machines, answer["links"]) for _, answer in sorted(answers.items())]

    def free_port(self) -> int:
        """A port of the first node's host that is free now."""
        self.control.send(0, "port")
        answer = self.await_all("port", "looking for a free port", 30.0, nodes={0})[0]
        return int(answer["port"])

    def train(self, plan: Plan, legs: LegsOrder | None = None) -> int:
        """Start every node's training and watch it to its end."""
        rank, self.is_led = 0, legs is not None
        for number, node in enumerate(plan.nodes):
            self.first_ranks[number] = rank
            rank += node.ranks
        survives = self.engine.backend == "gloo" and self.engine.outlives_a_loss
        if plan.servers and survives:
            # Workers but the first, which evaluates and saves, may come and go.
            self.spare = set(range(1, min(plan.servers)))
        elif plan.exchange == "hogwild" and survives:
            self.spare = set(range(1, len(plan.nodes)))
        elif legs is not None and survives:
            self.in_legs = self.control.weighs = True
            self.spare = set(range(1, len(plan.nodes)))
        self.send_checkpoints()
        self.collecting.begin()
        start = {
            "plan": encode(plan),
            "address": self.places[0].host.network_address,
            "port": self.free_port(),
            "backend": self.engine.backend,
            "secret": new_secret(),
            "program": self.order.program if legs is None else self.order.legs_program,
            "silent": self.order.silent,
            "legs": None if legs is None else encode(legs),
        }
        self.control.tell("start", **start)
        self.joining = Joining(self, plan, start)
        self.training = True
        ends = self.await_all("end", "training", None, nodes={0} if self.in_legs else None)
        if self.in_legs:  # one that hangs keeps nobody
            with contextlib.suppress(WorkerError):
                peers = self.control.peers.items()
                late = {node for node, peer in peers if not peer.ended}
                self.await_all("end", "the end", LAST_SECONDS, nodes=late)
        self.collecting.check_all_came()
        return int(ends[0]["code"])

    def send_checkpoints(self) -> None:
        """Hosts that share no files get what is to be continued."""
        run = self.order.run.path
        away = [node for node, message in self.ready.items() if not message["shared"]]
        if away and (run / "checkpoints").exists():
            for node in away:
                for piece in to_go_on_from(run):
                    self.control.send(node, "file", **piece)
                    while self.control.peers[node].channel.is_waiting:
                        self.pump(0.05)

    def end(self) -> None:
        """End whatever still runs, in order where that is possible."""
        finished = all(peer.ended or node in self.gone for node, peer in self.control.peers.items())
        self.control.tell("bye" if finished and not self.failures else "abort")
        deadline = time.monotonic() + END_SECONDS
        lost = {node for node, failure in self.failures if isinstance(failure, Lost)} | self.gone
        if self.joining is not None:
            self.joining.close()
        if self.running is not None:
            while time.monotonic() < deadline and not self.running.has_ended():
                for node, message in self.control.turn(0.05)[0]:
                    if self.collecting.hear(node, message) and len(self.signals.numbers) < 2:
                        deadline = time.monotonic() + END_SECONDS  # what was written comes first
                # mpiexec would wait for a lost host for minutes: those that live are enough.
                if lost and not self.control.connected - lost:
                    break
            self.running.end()
        self.control.close()
        self.collecting.say_what_stays()

    # --- watching -------------------------------------------------------------

    def await_all(
        self, kind: str, what: str, seconds: float | None, *, nodes: set[int] | None = None
    ) -> dict[int, Message]:
        """One message of this kind from every node (or these)."""
        answers: dict[int, Message] = {}
        deadline = None if seconds is None else time.monotonic() + seconds
        while (
            (wanted := set(range(len(self.places))) if nodes is None else nodes)
            - answers.keys()
            - self.gone
        ):
            for node, message in self.pump(0.1):
                if message["kind"] == kind:
                    answers[node] = message
            if deadline is not None and time.monotonic() > deadline:
                missing = self.names(sorted(wanted - answers.keys()))
                raise WorkerError(f"{missing} did not answer within {seconds:.0f} s in {what}")
        return answers

    def pump(self, seconds: float) -> list[tuple[int, Message]]:
        """One turn: print what ranks print, pass signals on, raise what went wrong."""
        self.pass_signals_on()
        messages, lost = self.control.turn(seconds)
        if self.joining is not None:
            lost = [each for each in lost if not self.joining.lose(each.node)]
            messages = [
                (n, message) for n, message in messages if not self.joining.hear(n, message)
            ]
            self.joining.turn()
        for each in lost:
            if self.in_legs and each.node in self.spare - self.gone:
                self.lose(each.node, each, self.lost_sentence(each))
            elif each.node in self.spare - self.gone:
                self.gone.add(each.node)
                if self.joining is not None:
                    self.joining.tell_of_loss(each.node)
                self.say_loss(each)
        self.failures += [(each.node, each) for each in lost if each.node not in self.spare]
        kept = []
        for node, message in messages:
            if message["kind"] == "line":
                self.show(node, message)
            elif message["kind"] == "error" and node in self.spare and self.in_legs:
                host = self.places[node].host.name
                self.lose(node, message, failures.report_sentence(message["report"], host))
            elif message["kind"] == "error" and node in self.spare:
                self.gone.add(node)
            elif message["kind"] == "error":
                self.failures.append((node, message))
            elif not self.collecting.hear(node, message):
                kept.append((node, message))
        if self.failures:
            self.fail()
        return kept

    def lose(self, node: int, cause: Message | Lost, sentence: str) -> None:
        """Go on without a node: those that may wait for it hear of it."""
        if node in self.gone:
            return
        self.gone.add(node)
        self.forgiven[node] = (cause, time.monotonic())
        if self.joining is not None:
            self.joining.tell_of_loss(node, sentence)
        if isinstance(cause, Lost):
            self.control.cut(node)

    def pass_signals_on(self) -> None:
        """The first signal stops in order, the second ends at once."""
        number = self.signals.fresh()
        if number is None:
            return
        if self.training and self.signals.passed_on == 1:
            self.order.say("stopping in order; once more to end at once")
            self.stop_in_order(number)
            return
        self.interrupt(number)

    def stop_in_order(self, number: int) -> None:
        """The first node tells the others at which update."""
        self.control.send(0, "stop", signal=number)


def found_places(control: Control) -> tuple[NodePlace, ...]:
    """Where an engine has put the nodes; agents that see the same cores divide them."""
    peers = [control.peers[node] for node in range(control.nodes)]
    found = []
    for peer in peers:
        alike = [p.node for p in peers if (p.host, p.cores) == (peer.host, peer.cores)]
        address = peer.address
        if address.startswith("127.") and any(p.host != peer.host for p in peers):
            address = peer.host
        host = Host(name=peer.host, address=address, slots=len(alike))
        found.append(NodePlace(node=peer.node, host=host, slot=alike.index(peer.node)))
    return tuple(found)


__all__ = ["HostOrder", "Session"]
