"""A script on several hosts, from the launcher's side: a session whose nodes run it."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any

from paceline.config.environment import SHARES
from paceline.errors import UserError, WorkerError
from paceline.launch import failures
from paceline.launch.channel import Message
from paceline.launch.collect import Collecting
from paceline.launch.control import Lost
from paceline.launch.inspection import Inspection, inspect_hosts
from paceline.launch.scripts.counting import Resources, auto_ranks
from paceline.launch.scripts.screen import Screen
from paceline.launch.scripts.supervision import TERM_SECONDS, WORD_SECONDS, RanksOutcome
from paceline.launch.session import HostOrder, Session
from paceline.launch.ssh import SshEngine, is_here
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan, decode
from paceline.schema.hosts import Hosts
from paceline.schema.plain import checked
from paceline.schema.script import RankExit, Script, script_text

_EXITS: dict[str, Any] = {"exits?": [{}]}


def check_hosts(hosts: Hosts, script: Script, variables: dict[str, str]) -> Inspection:
    """The inspection of hosts that have the same script; else an error with every reason."""
    wanted = {"sources": list(script.sources), "variables": variables}
    found = inspect_hosts(hosts.in_order, wanted)
    problems = found.problems()
    if found.facts:
        first = next(iter(found.facts))
        problems += [
            f"host {first} has another {path} than this machine: copy one to the other"
            for path, digest in script.sources.items()
            if found.facts[first]["sources"][path] not in ("none", digest[:16])
        ]
    if problems:
        raise UserError("\n".join(problems))
    return found


def one_node_each(hosts: Hosts) -> Hosts:
    """Hosts on which a node has all ranks, whatever their slots say."""
    workers = tuple(dataclasses.replace(host, slots=1) for host in hosts.workers)
    return dataclasses.replace(hosts, host=workers)


def plan_ranks(hosts: Hosts, found: Inspection, asked: int | None) -> Plan:
    """Who gets how many ranks: as asked, as the host's slots say, or by what the host has."""
    nodes = []
    for host in hosts.workers:
        facts = found.facts[host.name]
        cores = min(facts["physical"], facts["usable"], host.cores or facts["physical"])
        machine = Resources(cores=cores, devices=facts["devices"], memory_mb=facts["memory_mb"])
        ranks = asked or (host.slots if host.slots > 1 else auto_ranks(machine))
        threads = max(1, cores // ranks)
        nodes.append(
            NodePlan(host=host.name, strategy="processes", processes=ranks, threads=threads)
        )
    return Plan(nodes=tuple(nodes))


def share_variables(hosts: Hosts, plan: Plan) -> dict[str, str]:
    """What `paceline.integrations` finds of hosts.toml: the share of every rank, if any."""
    shares = [
        host.share / node.ranks
        for host, node in zip(hosts.workers, plan.nodes, strict=True)
        for _ in range(node.ranks)
        if host.share is not None
    ]
    return {SHARES: ",".join(map(str, shares))} if shares else {}


def interfaces(hosts: Hosts, found: Inspection) -> tuple[str, ...]:
    """By node: the interface by which the others reach it; empty where that is not known."""
    if all(is_here(host.network_address) for host in hosts.workers):
        return ("lo",) * len(hosts.workers)
    networks = {name: place[0] for name, place in found.networks.items() if place is not None}
    return tuple(host.interface or networks.get(host.name, "") for host in hosts.workers)


def run_on_hosts(
    script: Script,
    run: RunDirectory,
    hosts: Hosts,
    plan: Plan,
    screen: Screen,
    say: Callable[[str], None],
) -> RanksOutcome:
    """Run the script to its end on every host."""
    rank = 0
    for node in plan.nodes:
        screen.hosts.update(dict.fromkeys(range(rank, rank + node.ranks), node.host))
        rank += node.ranks
    order = HostOrder(
        run=run,
        hosts=one_node_each(hosts),
        config=script_text(run.path.name, script),
        plan=lambda session: (plan, None),
        program="paceline.launch.scripts.host_part",
        say=say,
    )
    session = ScriptSession(order, screen)
    try:
        code = session.run()
    except _FailedError:
        return RanksOutcome(exits=tuple(session.exits))
    stopped = session.signals.numbers
    if code == 0 and not stopped:
        screen.let_go()
    return RanksOutcome(exits=(), signalled=stopped[0] if stopped else None)


class _FailedError(Exception):
    """A rank has failed; the session knows which."""


class _Logs(Collecting):
    """What hosts bring of a script: its ranks' logs."""

    def say_what_stays(self) -> None:
        if self.session.training and (away := self._read_away()):
            self.session.order.say(
                f"the last lines that host {away['host']} logged stay there in {away['folder']}"
            )

    def check_all_came(self) -> None:
        """A script that ended well has, whatever became of its logs: `say_what_stays` tells."""


class ScriptSession(Session):
    """Everything that is under way on the hosts of a script."""

    def __init__(self, order: HostOrder, screen: Screen) -> None:
        super().__init__(order, SshEngine())
        self.screen = screen
        self.collecting = _Logs(self)
        self.exits: list[RankExit] = []
        """Of hosts where a rank has failed."""

    def show(self, node: int, message: Message) -> None:
        self.screen.hear(message["rank"], message["text"], bool(message.get("error")))

    def pump(self, seconds: float) -> list[tuple[int, Message]]:
        self.screen.look()
        return super().pump(seconds)

    def stop_in_order(self, number: int) -> None:
        """A script's ranks know of no other: all are told."""
        self.control.tell("stop", signal=number)

    def fail(self) -> None:
        """Hear what the others have to say, end them, and leave."""
        lost = [failure for _, failure in self.failures if isinstance(failure, Lost)]
        if lost:
            raise WorkerError(f"{self.lost_sentence(lost[0])}; the run was ended")
        heard = 0
        ended: set[int] = set()
        words_until = time.monotonic() + WORD_SECONDS
        told_until: float | None = None
        while True:
            for node, failure in self.failures[heard:]:
                assert not isinstance(failure, Lost)
                self._note(node, failure["report"])
                ended.add(node)
            heard = len(self.failures)
            now = time.monotonic()
            failed = [end for end in self.exits if end.has_failed]
            causes = [end for end in failed if not self.screen.is_consequence(end.rank)]
            if told_until is None and (causes or now > words_until):
                told_until = now + TERM_SECONDS
                self.control.tell("stop", signal=int(signal.SIGTERM))
            if len(ended) == len(self.places) or (told_until is not None and now > told_until):
                raise _FailedError
            messages, gone = self.control.turn(0.05)
            ended |= {each.node for each in gone}
            for node, message in messages:
                if message["kind"] == "line":
                    self.show(node, message)
                elif message["kind"] == "error":
                    self.failures.append((node, message))
                elif message["kind"] == "end":
                    ended.add(node)
                else:
                    self.collecting.hear(node, message)

    def _note(self, node: int, report: Message) -> None:
        exits = checked(report, _EXITS).get("exits")
        if not exits:  # what was to start the ranks has failed itself
            failures.raise_report(report, self.places[node].host.name)
        for each in exits:
            end = decode(RankExit, each)
            self.exits.append(end)
            self.screen.note_end(end)

    def lost_sentence(self, lost: Lost) -> str:
        host = self.places[lost.node].host.name
        return failures.lost_sentence(lost, host, self.first_ranks[lost.node], "the script")
