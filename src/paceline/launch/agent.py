"""What an engine starts for each node: `python -m paceline.launch.agent`.

The agent is small and never computes: it keeps in touch with the launcher while
a process of its own trains. When the launcher goes, in whatever way, the agent
ends what it has started; when the agent is killed, the kernel ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.environment import (
    QUIET,
    REPORT_ROOM,
    SECRET,
    agent_node,
    cache_root,
    child_environment,
    inherited_descriptors,
    local_place,
    rank_environment,
    take_secret,
)
from paceline.exchange.losses import Patience, leave_word
from paceline.launch.carry import Carrier
from paceline.launch.channel import BEAT_SECONDS, REPORT, SLACK_SECONDS, Channel, Message, connect
from paceline.launch.child import STACK_SIGNAL, Child, UpdateTimer
from paceline.launch.collect import Receiving
from paceline.launch.leftovers import SharedFiles, end_daemon
from paceline.launch.rank import die_with_parent
from paceline.local.cores import divide_cores, pin, usable_cores, visible_cores
from paceline.run import RunDirectory
from paceline.schema import NodePlan, Plan, RankContext, decode
from paceline.schema.plain import checked, parse_json, read_json_file
from paceline.signals import leave_tidily
from paceline.text import how_it_ended, place_name, printable

if TYPE_CHECKING:
    from paceline.local.board import Board

MARKER = ".launch"
"""File in the run directory by which an agent sees that it is the launcher's own."""
DOOR = "join.json"
"""File in the run directory: where to ask whether a host may join."""
SAVE_SECONDS = 10.0
"""How long a training has to stop in order and save when its launcher has gone, ..."""
STOP_UPDATES = 3
"""... besides these: the one that it is in, and two until all nodes stop after the same one."""
_LAST_LOOK_SECONDS = 0.3
"""A process that was killed closes its connections before it can be seen to have ended."""
_ANSWERS = {"measure": "measuring", "links": "measuring the network"}
"""Children that print one answer as JSON, and what an error calls them."""


class Agent:
    """One node's side of a run."""

    def __init__(self, channel: Channel, node: int) -> None:
        self.channel = channel
        self.node = node
        self.selector = selectors.DefaultSelector()
        self.child: Child | None = None
        self.board: Board | None = None
        self.report: int | None = None
        """Memory in which the node leaves word of a failure where the disk takes nothing."""
        self.timer = UpdateTimer()
        self.first_rank = 0
        self.ranks = 1
        self.run = RunDirectory(Path())
        self.carrier = Carrier(channel, node)
        self.receiving: Receiving | None = None
        """Where the hosts share no files."""
        self.leaving: int | None = None
        """The exit code, once the launcher has what was written here."""
        self.exit_code: int | None = None
        self.marker = ""
        self.is_deserted = False
        """The launcher has gone, or let this node go: nobody else ends what started us."""
        self.variables: dict[str, str] = {}
        self.shared_files = SharedFiles()
        self.patience: Patience | None = None
        """On the node that leads legs: how long it would wait for each of the others."""

    def serve(self) -> int:
        """Until the launcher says goodbye, or has gone."""
        self.selector.register(self.channel, selectors.EVENT_READ)
        beat = 0.0
        try:
            while self.exit_code is None:
                events = selectors.EVENT_READ
                if self.channel.is_waiting:
                    events |= selectors.EVENT_WRITE
                self.selector.modify(self.channel, events)
                for key, mask in self.selector.select(max(0.0, beat - time.monotonic())):
                    if key.fileobj is not self.channel:
                        self.relay(key.data)
                        continue
                    if mask & selectors.EVENT_WRITE:
                        self.channel.flush()
                    self.listen()
                if self.child is not None:
                    self.look_after(self.child)
                self.carrier.turn()
                if self.leaving is not None and self.carrier.is_through:
                    self.exit_code = self.leaving
                if time.monotonic() >= beat:
                    beat = time.monotonic() + BEAT_SECONDS
                    if self.patience and (fresh := self.patience.fresh()) is not None:
                        self.channel.send("patience", seconds=fresh)
                    places = self.places()
                    self.timer.look(min(place["update"] for place in places))
                    self.channel.send("beat", ranks=places)
            return self.exit_code
        except SystemExit as leaving:  # a signal
            self.say_why(int(leaving.code or 0) - 128)
            raise
        finally:
            if self.is_deserted:
                self.let_save()
            self.end_child()
            self.selector.close()
            self.channel.close()
            self.shared_files.remove()
            self.carrier.close()
            if self.is_deserted:
                self.clear_up()
                end_daemon()

    def clear_up(self) -> None:
        """Remove what a launcher that was killed has left in the run, unless there is a new one."""
        if self.is_ours():
            for name in (DOOR, MARKER):
                (self.run.path / name).unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Whether no other launcher has taken the run over that we see here."""
        try:
            return (self.run.path / MARKER).read_text() == self.marker
        except OSError:
            return False

    def let_save(self) -> None:
        """The launcher was killed, or we are cut off: stop in order, unless others write there."""
        child = self.child
        if child is None or child.purpose != "train":
            return
        if self.is_ours() or self.carrier.folder is not None:
            child.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                updates = STOP_UPDATES * self.timer.update_seconds
                child.process.wait(timeout=SAVE_SECONDS + updates)

    # --- what the launcher says -----------------------------------------------

    def listen(self) -> None:
        messages, is_open = self.channel.receive()
        for message in messages:
            handler = getattr(self, f"on_{message['kind']}", None)
            if handler is not None and self.exit_code is None:
                try:
                    handler(message)
                except Exception as error:
                    self.channel.send("error", report=_report(error, self.first_rank))
        if not is_open and self.exit_code is None:
            self.exit_code, self.is_deserted = 1, True

    def on_welcome(self, message: Message) -> None:
        """Where the run is, what the launcher's environment has, which cores are ours."""
        slot, slots, wanted = message["slot"], message["slots"], message.get("cores")
        if not 0 <= slot < slots or (wanted is not None and wanted < 1):
            raise ValueError(f"this is slot {slot} of {slots}, with {wanted} cores")
        self.variables = dict(message["variables"])
        self.channel.allow_silence(message["silence"] + SLACK_SECONDS)
        path = Path(message["run"])
        marker = path / MARKER
        shared = marker.is_file() and marker.read_text() == message["marker"]
        self.marker = message["marker"]
        if not shared:
            cache = Path(self.variables.get("PACELINE_CACHE") or cache_root())
            path = self.carrier.settle(cache, message["identity"], message["marker"])
        self.run = RunDirectory(path)
        if not shared:
            self.receiving = Receiving(path)
            self.run.config.write_text(message["config"])
        with contextlib.suppress(OSError):
            os.chdir(message["folder"])
        mine = divide_cores(visible_cores()[:wanted], slots, slot)
        if slots > 1 or wanted:
            pin(mine)
        found = {"shared": shared, "cores": list(mine), "usable": usable_cores()}
        self.channel.send("ready", **found, folder=str(path), kept=self.carrier.newest_kept)

    def on_file(self, message: Message) -> None:
        """A piece of what is to be continued, where the hosts share no files."""
        if self.receiving is not None:
            self.receiving.write(message)

    def on_carried(self, message: Message) -> None:
        """The launcher has taken a piece, or could not."""
        self.carrier.hear(message)

    def on_bring(self, message: Message) -> None:
        """The launcher wants what an earlier agent of this run has left here."""
        self.carrier.bring(message["folder"])

    def on_forget(self, message: Message) -> None:
        """The launcher has a checkpoint at least as new: what is older is not needed any more."""
        self.carrier.forget(message["update"])

    def on_measure(self, message: Message) -> None:
        """Find out what planning must know of this host."""
        command = ["measure", str(self.run.config), "--json"]
        if message["again"]:
            command.append("--again")
        self.start_child("measure", ["paceline.cli", *command], {}, collect=True)

    def on_links(self, message: Message) -> None:
        """Measure what joins this host and the others."""
        names = message["names"]
        context = RankContext(
            node=self.node,
            nodes=len(names),
            address=message["address"],
            port=message["port"],
            backend=message["backend"],
            secret=message["secret"],
        )
        words = ["paceline.hardware.links", json.dumps(names)]
        self.start_child("links", words, rank_environment(context), collect=True)

    def on_port(self, message: Message) -> None:
        """A port of this host that is free now."""
        with socket.create_server(("", 0)) as listener:
            self.channel.send("port", port=listener.getsockname()[1])

    def on_start(self, message: Message) -> None:
        """Train this node's part."""
        # Brings numpy, which nobody needs to wait for before: the launcher, too, reads this module.
        from paceline.local.board import Board, anonymous_memory

        plan = decode(Plan, message["plan"])
        if self.node >= len(plan.nodes):
            raise ValueError(f"the plan has {len(plan.nodes)} nodes, and this is node {self.node}")
        node = plan.nodes[self.node]
        self.first_rank = sum(other.ranks for other in plan.nodes[: self.node])
        self.ranks = node.ranks
        if self.carrier.folder is not None:
            self.run.plan.write_text(json.dumps(message["plan"]))
        self.carrier.begin(range(self.first_rank, self.first_rank + self.ranks))
        context = RankContext(
            rank=self.first_rank,
            world_size=sum(other.ranks for other in plan.nodes),
            local_size=node.ranks,
            node=self.node,
            nodes=len(plan.nodes),
            address=message["address"],
            port=message["port"],
            backend=message["backend"],
            secret=message["secret"],
        )
        for stale in ("error.json", "plan.json", "lost.jsonl", "patience.json"):
            (self.run.path / f"node-{self.node}" / stale).unlink(missing_ok=True)
        if message.get("legs") is not None:
            self.patience = Patience(self.run.path) if self.node == 0 else None
            told = self.run.path / f"node-{self.node}" / "legs.json"
            told.parent.mkdir(exist_ok=True)
            told.write_text(json.dumps(message["legs"]))
        if message.get("joins"):  # the others' plan does not have this node as it is
            own_plan = self.run.path / f"node-{self.node}" / "plan.json"
            own_plan.parent.mkdir(exist_ok=True)
            own_plan.write_text(json.dumps(message["plan"]))
        variables = rank_environment(context)
        descriptor = anonymous_memory("board")
        self.board = Board(descriptor, ranks=node.ranks, rank=0)
        variables["PACELINE_BOARD"] = str(descriptor)
        if self.report is not None:
            os.close(self.report)
        self.report = anonymous_memory("report")
        variables[REPORT_ROOM] = str(self.report)
        words = [message["program"], str(self.run.path), str(int(message["silent"]))]
        self.start_child(
            "train", words, variables, descriptors=(descriptor, self.report), node=node
        )
        os.close(descriptor)

    def on_stop(self, message: Message) -> None:
        """Stop in order, or at once when there is nothing yet to stop."""
        if self.child is not None and self.child.purpose == "train":
            self.child.signal(message["signal"])

    def on_stack(self, message: Message) -> None:
        """Others have waited in vain for this node: let its process print where it stands."""
        if self.child is not None and self.child.purpose == "train":
            self.child.signal(STACK_SIGNAL)

    def on_lost(self, message: Message) -> None:
        """The launcher has lost a node that others here would wait for: leave word of it."""
        leave_word(self.run.path, self.node, message["lost"], message.get("why") or "")

    def on_abort(self, message: Message) -> None:
        """Another host failed, or the user has lost patience."""
        self.end_child()
        self.carrier.end()
        self.leaving = 1

    def on_bye(self, message: Message) -> None:
        """Everything is done."""
        self.carrier.end()
        self.leaving = 0

    # --- the process that works -----------------------------------------------

    def start_child(
        self,
        purpose: str,
        words: list[str],
        variables: dict[str, str],
        *,
        collect: bool = False,
        descriptors: tuple[int, ...] = (),
        node: NodePlan | None = None,
    ) -> None:
        variables = QUIET | self.variables | variables | {"PACELINE_AGENT": str(os.getpid())}
        if node is not None:
            variables["OMP_NUM_THREADS"] = str(node.threads)
        parent = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=child_environment(variables),
            pass_fds=(*descriptors, *inherited_descriptors()),
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # safe: one thread here
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.child = Child(process, purpose, collect=collect)
        for stream in self.child.streams:
            self.selector.register(stream, selectors.EVENT_READ, stream)

    def relay(self, stream: Any) -> None:
        """Pass on what the child has printed."""
        assert self.child is not None
        is_error = stream is self.child.streams[1]
        lines, is_open = self.child.read(stream)
        for rank, text in lines:
            number = self.first_rank if rank is None else rank
            self.channel.send("line", rank=number, text=printable(text), error=is_error)
        if not is_open:
            self.selector.unregister(stream)

    def look_after(self, child: Child) -> None:
        """Tell the launcher how the child ended."""
        if child.process.poll() is None:
            return
        for stream in child.streams:
            if stream in self.selector.get_map():
                self.relay(stream)
                if stream in self.selector.get_map():
                    self.selector.unregister(stream)
        code = child.process.returncode
        self.end_child()
        if child.purpose in _ANSWERS:
            self.tell_answer(child, code)
        elif code in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
            self.carrier.end(lambda: self.channel.send("end", code=code))
        else:
            self.tell_failure(code)
            self.carrier.end()

    def tell_answer(self, child: Child, code: int) -> None:
        """What a child has printed for the launcher, under the name of what it was started for."""
        try:
            answer = checked(parse_json(child.output()), {}, "the answer")
            self.channel.send(child.purpose, **{child.purpose: answer})
        except ValueError:
            what = _ANSWERS[child.purpose]
            report = _report(RuntimeError(f"{what} ended with code {code}"), self.first_rank)
            words = printable(child.last_words().removeprefix("paceline: "))
            report |= {"kind": "StrategyError", "expected": True}
            self.channel.send("error", report=report | ({"message": words} if words else {}))

    def tell_failure(self, code: int) -> None:
        """Say how the child failed, and where it was then: what is done again is counted by it."""
        self.channel.send("beat", ranks=self.places())
        self.channel.send("error", report=self.failure(code))

    def failure(self, code: int) -> dict[str, Any]:
        """What the child has left word of, or how it ended without one."""
        path = self.run.path / f"node-{self.node}" / "error.json"
        with contextlib.suppress(OSError, ValueError):
            return dict(checked(read_json_file(path), REPORT))
        if self.report is not None:
            with contextlib.suppress(OSError, ValueError):
                data = os.pread(self.report, os.fstat(self.report).st_size, 0)
                return dict(checked(parse_json(data), REPORT))
        return self.wordless(f"{how_it_ended(code)} {self.where()}")

    def wordless(self, text: str) -> dict[str, Any]:
        report = {"rank": self.first_rank, "kind": "LostError", "message": text, "expected": True}
        return report | {"traceback": "", "wordless": True}

    def where(self) -> str:
        place = self.places()[0]
        return f"in {place_name(place['phase'], place['update'])}"

    def say_why(self, number: int) -> None:
        """Before a signal ends us: was it the child that ended first, as MPI's daemons find out?

        They end every agent of a training of which one process is gone.
        """
        child = self.child
        if child is not None and child.purpose == "train":
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.process.wait(timeout=_LAST_LOOK_SECONDS)
                if code:
                    self.tell_failure(code)
                    return
        name = signal.Signals(number).name
        report = self.wordless(f"was told to end ({name} to its agent) {self.where()}")
        self.channel.send("error", report=report | {"told": True})

    def places(self) -> list[dict[str, Any]]:
        """Where each rank of this node is."""
        if self.board is None:
            phase = self.child.purpose if self.child is not None else "start-up"
            return [{"rank": self.first_rank, "phase": phase, "update": 0}]
        return [
            {
                "rank": self.first_rank + number,
                "phase": self.board.phase(number),
                "update": self.board.update(number),
            }
            for number in range(self.ranks)
        ]

    def end_child(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            for stream in child.streams:
                if stream in self.selector.get_map():
                    self.selector.unregister(stream)
            child.end()


def _report(error: BaseException, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "kind": type(error).__name__,
        "message": printable(str(error)),
        "expected": False,
        "traceback": "",
    }


def main(arguments: list[str] | None = None) -> int:
    """Join the launcher and do what it says."""
    parser = argparse.ArgumentParser(prog="paceline.launch.agent")
    parser.add_argument("--to", required=True, help="ADDRESS:PORT[,ADDRESS:PORT] of the launcher")
    parser.add_argument("--node", type=int, help="which node this is; else whoever started it says")
    parser.add_argument("--first-node", type=int, help="of this host; torchrun counts from there")
    parser.add_argument("--parent", type=int, help="the process to end with, if it started this")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        die_with_parent(options.parent)
    node = options.node
    if options.first_node is not None:
        node = options.first_node + local_place()
    elif node is None:
        node = agent_node()
    if node is None:
        print("paceline: an agent must know its node: give --node", file=sys.stderr)
        return 2
    secret = take_secret()
    # Ray's workers have it blocked, and whoever trains here would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The launcher decides who hears of Ctrl-C; whoever sends SIGTERM means it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_tidily()
    if not secret:
        print(f"paceline: an agent must be told the run's secret: {SECRET}", file=sys.stderr)
        return 2
    places = [word.rpartition(":") for word in options.to.split(",")]
    try:
        channel = connect([(address, int(port)) for address, _, port in places], secret)
    except ConnectionError as error:
        print(f"paceline: node {node} on {platform.node()}: {error}", file=sys.stderr)
        return 1
    channel.send(
        "hello",
        node=node,
        host=platform.node(),
        cores=visible_cores(),
    )
    return Agent(channel, node).serve()


if __name__ == "__main__":
    sys.exit(main())
