"""Targets for what comes from other processes and hosts: sockets, pipes, ssh, and notes they leave.

Every message here is one that the real sender has made, damaged on its way, and given to the real
receiver. Senders have proved themselves before: who has not comes no further than `handshake`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import random as random_module
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
from readers import FaultError, Target, call, check_message, nothing

from paceline.errors import PacelineError, WorkerError
from paceline.launch.inspection import AskedHost as _Asked
from paceline.schema import Plan, encode
from paceline.schema.hosts import Host

Random = random_module.Random
Read = Callable[[bytes], object]
SECRET = "s" * 32
PLAN = encode(Plan())
REPORT = {"rank": 0, "kind": "WorkerError", "message": "x", "expected": True, "traceback": ""}
TO_LAUNCHER: tuple[dict[str, Any], ...] = (
    {"kind": "hello", "node": 0, "host": "a", "cores": [0, 1]},
    {"kind": "join", "host": {"name": "b", "address": "10.0.0.2", "cores": 2}},
    {"kind": "beat", "ranks": [{"rank": 0, "phase": "forward", "update": 3}]},
    {"kind": "patience", "seconds": {"1": 7.5}},
    {"kind": "line", "rank": 0, "text": "epoch 1"},
    {
        "kind": "ready", "shared": True, "cores": [0, 1], "usable": 2, "folder": "/tmp/x",
        "kept": {"folder": "/tmp/y", "update": 4},
    },
    {"kind": "measure", "measure": {"format": 1, "hosts": []}},
    {"kind": "measure", "measure": {"hosts": []}},
    {"kind": "port", "port": 29500},
    {"kind": "end", "code": 0},
    {"kind": "error", "report": REPORT},
    {"kind": "brought", "complete": True},
    {"kind": "file", "log": "metrics.jsonl", "at": 0, "data": "e30K", "sum": "x"},
)  # fmt: skip
TO_AGENT: tuple[dict[str, Any], ...] = (
    {
        "kind": "welcome", "run": "run", "marker": "ab" * 16, "identity": "0123456789abcdef",
        "config": "", "folder": ".", "variables": {"PACELINE_CACHE": "cache"}, "slots": 1,
        "slot": 0, "cores": None, "silence": 10.0,
    },
    {"kind": "file", "path": "checkpoints/step-00000004/state.json", "at": 0, "data": "e30K"},
    {"kind": "file", "path": "checkpoints/latest", "link": "step-00000004"},
    {"kind": "carried", "taken": True},
    {"kind": "bring", "folder": "cache/runs/x"},
    {"kind": "forget", "update": 4},
    {"kind": "measure", "again": False},
    {"kind": "measure", "again": False},
    {
        "kind": "links", "names": ["a", "b"], "address": "127.0.0.1", "port": 1, "backend": "gloo",
        "secret": SECRET,
    },
    {"kind": "port"},
    {
        "kind": "start", "plan": PLAN, "address": "127.0.0.1", "port": 1, "backend": "gloo",
        "secret": SECRET, "program": "paceline.launch.member", "silent": True,
    },
    {"kind": "stop", "signal": 2},
    {"kind": "lost", "lost": 1},
    {"kind": "abort"},
    {"kind": "bye"},
)  # fmt: skip
LOOSE = ("KeyError", "TypeError", "AttributeError", "IndexError", "ZeroDivisionError")
"""Exceptions that say nothing to whoever reads them."""


def pick(random: Random, values: tuple[Any, ...]) -> Any:
    """One of them."""
    return values[random.randint(0, len(values) - 1)]


def damaged_message(random: Random, message: Any) -> bytes:
    """A message as it may arrive; now and then whole, so that what follows is met too."""
    text = json.dumps(message)
    return text.encode() if random.randint(0, 5) == 0 else mutations.damaged_json(random, text)


def _message(read: Read, *whole: Any) -> Callable[[Random, Path], None]:
    """A message of JSON whose sender has proved itself; what is none is a ValueError."""

    def once(random: Random, folder: Path) -> None:
        with contextlib.suppress(ValueError):
            read(damaged_message(random, pick(random, whole)))

    return once


def _sentence(read: Read, *whole: Any) -> Callable[[Random, Path], None]:
    """The same where what is wrong ends in a sentence."""

    def once(random: Random, folder: Path) -> None:
        try:
            read(damaged_message(random, pick(random, whole)))
        except (PacelineError, RuntimeError) as error:
            check_message(str(error))

    return once


def _numbers(read: Read, count: int) -> Callable[[Random, Path], None]:
    """A message of numbers between a worker and a parameter server."""

    def once(random: Random, folder: Path) -> None:
        values = [float(random.randint(0, 3)) for _ in range(count)]
        for _ in range(random.randint(1, 3)):
            odd = random.choice(mutations.NUMBERS)
            at = random.randint(0, count - 1)
            values[at] = float(odd) if odd != odd or abs(odd) < 1e300 else float("inf")
        data = struct.pack(f"<{count}d", *values)
        if random.randint(0, 3) == 0:
            data = mutations.damaged_bytes(random, data)
        with contextlib.suppress(ValueError):
            read(data)

    return once


def _greet(random: Random, folder: Path) -> None:
    """What a stranger writes to a port of ours, before and after it has proved itself."""
    from paceline.secure.sealing import Sealing, UnknownPeerError

    ours, theirs = Sealing(SECRET, "x", asks=False), Sealing(SECRET, "x", asks=True)
    try:
        for step in range(4):
            sent = theirs.take_output() if step < 2 else theirs.seal(b"message")
            if random.randint(0, 2) == 0:
                sent = mutations.damaged_bytes(random, sent)
            ours.feed(sent)
            theirs.feed(ours.take_output())
    except UnknownPeerError:
        return


# --- the control channel --------------------------------------------------------------


@contextlib.contextmanager
def _both_ends() -> Iterator[tuple[Any, Any]]:
    """An agent's channel and the launcher's, joined by a real socket, both known to the other."""
    from paceline.launch.channel import TO_AGENT as FIELDS
    from paceline.launch.channel import Channel
    from paceline.secure.sealing import Sealing

    asks, listens = Sealing(SECRET, "x", asks=True), Sealing(SECRET, "x", asks=False)
    for _ in range(2):
        listens.feed(asks.take_output())
        asks.feed(listens.take_output())
    one, other = socket.socketpair()
    agent, launcher = Channel(one, asks, FIELDS), Channel(other, listens)
    try:
        yield agent, launcher
    finally:
        agent.close()
        launcher.close()


def _agent(random: Random, folder: Path) -> None:
    """What a launcher says to an agent, which starts no process here."""
    from paceline.launch.agent import Agent

    place, cores = Path.cwd(), os.sched_getaffinity(0)
    with _both_ends() as (ours, theirs):
        agent = Agent(ours, 0)
        agent.start_child = lambda *words, **more: None  # type: ignore[method-assign]
        try:
            for _ in range(random.randint(1, 3)):
                theirs.send_bytes(damaged_message(random, pick(random, TO_AGENT)))
                agent.listen()
            for message in theirs.receive()[0]:
                if message["kind"] == "error":
                    report = message["report"]
                    if report["kind"] in LOOSE or not report["message"]:
                        raise FaultError(f"{report['kind']}: {report['message']}")
            if theirs.fault:
                raise FaultError(f"an agent's own words are refused: {theirs.fault}")
        finally:
            os.chdir(place)
            os.sched_setaffinity(0, cores)
            agent.selector.close()
            agent.shared_files.remove()
            if agent.carrier.folder is not None:
                shutil.rmtree(agent.carrier.folder, ignore_errors=True)


def _session(random: Random, folder: Path) -> None:
    """What an agent, and who asks to join, say to a launcher that gathers or trains."""
    from paceline.config.hosts import find_hosts
    from paceline.launch import session as module
    from paceline.launch.channel import connect
    from paceline.launch.joining import Joining
    from paceline.launch.ssh import SshEngine
    from paceline.run import RunDirectory
    from paceline.workflow.spread import site_of

    module.GRACE_SECONDS = 0.0
    shown: list[str] = []
    run = folder / "run"
    run.mkdir(exist_ok=True)
    order = module.HostOrder(
        run=RunDirectory(run),
        hosts=find_hosts("localhost"),
        config='name = "x"\n',
        plan=lambda session: (Plan(), None),
        say=shown.append,
        show=shown.append,
    )
    session = module.Session(order, SshEngine())
    session.joining = Joining(session, Plan(), {})
    session.training = bool(random.randint(0, 1))
    words = [pick(random, TO_LAUNCHER) for _ in range(random.randint(1, 3))]
    try:
        agent, thread = _connected(connect, session.control)
        if random.randint(0, 4):
            agent.send("hello", node=0, host="a", cores=[0])
        for word in words:
            agent.send_bytes(damaged_message(random, word))
        thread.join()
        for _ in range(4):
            for node, message in session.pump(0.005):
                if message["kind"] == "ready":
                    session.ready[node] = message
                    site_of(session, node)
                    session.collecting.begin()
        agent.close()
    except PacelineError as error:
        check_message(str(error).partition("\n")[0])
    finally:
        session.joining.close()
        session.control.close()
        shutil.rmtree(run, ignore_errors=True)
    for text in shown:
        if any(c in text for c in "\0\x1b"):
            raise FaultError(f"control characters came through: {text!r}")


def _connected(connect: Any, control: Any) -> tuple[Any, threading.Thread]:
    """An agent's channel that a control has let in, whose turns are taken meanwhile."""
    found: list[Any] = []
    place = [("127.0.0.1", control.port)]
    thread = threading.Thread(target=lambda: found.append(connect(place, control.secret)))
    thread.start()
    while thread.is_alive():
        control.turn(0.002)
    return found[0], thread


# --- files that travel ----------------------------------------------------------------


def _host_folder(folder: Path) -> None:
    """What a host has written, with two checkpoints."""
    here = folder / "host"
    for update in (4, 8):
        step = here / "checkpoints" / f"step-{update:08d}"
        step.mkdir(parents=True)
        (step / "model.safetensors").write_bytes(bytes(range(100)))
        (step / "state.json").write_text(f'{{"update": {update}}}')
    (here / "checkpoints" / "best").symlink_to("step-00000004")
    (here / "checkpoints" / "latest").symlink_to("step-00000008")
    (here / "metrics.jsonl").write_text('{"epoch": 1}\n')
    (here / "run.json").write_text("{}")
    (here / "rank-0").mkdir()
    (here / "rank-0" / "events.jsonl").write_text('{"a": 1}\n' * 20)


class _Wire:
    """Both ends of `carry` in one process: what is sent is damaged, and taken."""

    is_waiting = False

    def __init__(self, random: Random, run: Path) -> None:
        from paceline.launch.collect import Receiving

        self.said: list[str] = []
        self._random = random
        self._receiving = Receiving(run, keep=2, say=self.said.append)
        self.waiting: list[bool] = []

    def send(self, kind: str, **fields: Any) -> None:
        if self._random.randint(0, 7) == 0:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                fields = json.loads(json.dumps(mutations.damaged_data(self._random, fields)))
        if not isinstance(fields, dict):
            fields = {}
        self.waiting.append(self._receiving.take(fields))


def _collect(random: Random, folder: Path) -> None:
    """What an agent brings: a checkpoint is there whole or not at all, nothing lies elsewhere."""
    from paceline.launch.carry import Bringing

    run, here = folder / "run", folder / "host"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    wire = _Wire(random, run)
    bringing = Bringing(wire, here, ranks=[0])  # type: ignore[arg-type]
    bringing.finish()
    bringing.turn()
    while wire.waiting:
        bringing.hear({"taken": wire.waiting.pop(0)})
        bringing.turn()
    for step in (run / "checkpoints").glob("step-*"):
        whole = here / "checkpoints" / step.name
        if not whole.exists():  # a name that was damaged on its way
            whole = here / "checkpoints" / "step-00000004"
        for path in step.iterdir():
            if path.read_bytes() != (whole / path.name).read_bytes():
                known = [other.read_bytes() for other in here.rglob(path.name)]
                if path.read_bytes() not in known:
                    raise FaultError(f"{path.name} came damaged and was kept")
    for text in wire.said:
        check_message(text)
        if " " not in text.partition("here: ")[2]:
            raise FaultError(f"no sentence: {text}")
    if {path.name for path in folder.iterdir()} - {"run", "host"}:
        raise FaultError("something was written outside of the run")


def _take_piece(random: Random, folder: Path) -> None:
    """What a launcher sends to a host that is to go on: nothing is written outside."""
    from paceline.launch.carry import to_go_on_from
    from paceline.launch.collect import Receiving

    root = folder / "agent"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    receiving = Receiving(root)
    from paceline.launch.channel import TO_AGENT as FIELDS
    from paceline.launch.channel import read_message

    for piece in to_go_on_from(folder / "host"):
        body = damaged_message(random, {"kind": "file", **piece})
        with contextlib.suppress(ValueError, OSError):
            message = read_message(body, FIELDS)
            if message["kind"] == "file":
                receiving.write(message)
    if {path.name for path in folder.iterdir()} - {"agent", "host"}:
        raise FaultError("something was written outside of the run")


def _left_behind(random: Random, folder: Path) -> None:
    """Small notes in a run directory: where results are kept, and what went wrong."""
    from paceline.launch.agent import Agent
    from paceline.launch.collect import AWAY, IDENTITY, Collecting, newest_here, run_identity
    from paceline.launch.local import LocalRanks, _reports
    from paceline.observe.mailbox import BothPosts, FolderPosts
    from paceline.observe.stall import Stall
    from paceline.run import RunDirectory

    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    (run / "rank-0").mkdir(parents=True)
    (run / "node-0").mkdir()
    (run / AWAY).write_bytes(damaged_message(random, {"host": "a", "folder": "/x"}))
    collecting = Collecting.__new__(Collecting)
    collecting._away = run / AWAY
    collecting._read_away()
    report = REPORT | {"time": 1.5}
    for place in ("rank-0", "node-0"):
        (run / place / "error.json").write_bytes(damaged_message(random, report))
    ranks = LocalRanks(RunDirectory(run))
    ranks.processes.append(None)  # type: ignore[arg-type]
    for found in _reports(ranks):
        _ = float(found["time"]), found["kind"], found["traceback"].rstrip()
    with _both_ends() as (ours, _):
        agent = Agent(ours, 0)
        agent.run = RunDirectory(run)
        _ = agent.failure(1)["message"]
        agent.selector.close()
    word = {
        "rank": 0, "host": "a", "time": 1.0,
        "state": {"phase": "forward", "update": 2, "seconds": 1.0, "operation": None, "stack": "a"},
    }  # fmt: skip
    (run / "rank-0" / "watch.json").write_bytes(damaged_message(random, word))
    posts = BothPosts(FolderPosts(run), FolderPosts(run))
    heard = posts.read(0)
    if heard is not None:
        own = {"operation": "allreduce", "update": 2, "seconds": 6.0}
        Stall(own=own, words={0: heard, 1: {"state": own}}, deadline=60.0).text(0.1)
    step = (
        run / "checkpoints" / pick(random, ("step-00000004", "step-²²²²²²²²", "step-" + "9" * 99))
    )
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    newest_here(run)
    (run / IDENTITY).write_bytes(mutations.damaged_bytes(random, b"0123456789abcdef"))
    run_identity(run)


def _join(random: Random, folder: Path) -> None:
    """What `paceline join` finds in a run directory; nobody listens there."""
    from paceline.launch import joining
    from paceline.secure.files import write_private

    def nobody(places: Any, secret: str) -> Any:
        for address, port in places:
            _ = address.encode("idna"), struct.pack(">H", port), secret.encode()
        raise ConnectionError("nobody listens")

    joining.connect, before = nobody, joining.connect
    note = {"addresses": ["127.0.0.1"], "port": 5, "secret": SECRET}
    try:
        write_private(folder / joining.DOOR, "")
        (folder / joining.DOOR).write_bytes(damaged_message(random, note))
        with contextlib.suppress(UnicodeError):  # as `socket` says of a name that is none
            joining.ask_to_join(folder, Host(name="e"))
    finally:
        joining.connect = before


# --- what hosts print over ssh --------------------------------------------------------


FACTS = {
    "host": "a", "versions": {"paceline": "0.1", "torch": "2.13"}, "mpi": None, "cores": 2,
    "usable": 2, "physical": 2, "devices": 0, "memory_mb": 8000, "time": 1.5e9, "data": "none",
    "sources": {}, "user": 0, "port": 5, "free_port": 6,
}  # fmt: skip
REACHED = {
    "reached": {"b": {"seconds": 0.001, "from": "10.0.0.1"}, "c": {"error": "refused"}},
    "interface": ["eth0", "10.0.0.0/24"],
}
PROBED = {
    "target": "/home/u/environment", "python": "/usr/bin/python3", "site": "/usr/lib",
    "mark": {"state": "x", "packages": "y", "base": "/usr/bin/python3", "site": "/usr/lib"},
    "occupied": False, "environment": True, "able": True, "machine": "x86_64",
}  # fmt: skip


class _Host:
    """A host over ssh: it prints what it is asked for, damaged now and then, and what else it may.

    After a damaged answer it ends, as a host that is broken does: nobody waits for more.
    """

    random: Random

    def __init__(self, host: Host, command: list[str]) -> None:
        self.host, self.sent = host, 1.5e9
        reading, self._writing = os.pipe()
        stdout = os.fdopen(reading, "rb", buffering=0)
        words = pick(self.random, (b"", b"x: not found\n", b"\x1b[31mNo such file\n", b"\xff\n"))
        self.process = SimpleNamespace(
            stdout=stdout,
            kill=lambda: None,
            communicate=lambda timeout: (b"", words),
            poll=lambda: None if self._writing >= 0 else 1,
        )
        self._rest = b""
        self.read = _Asked.read.__get__(self)
        self.last_words = _Asked.last_words.__get__(self)
        self._answers = [FACTS, REACHED] if command[2].endswith("checks") else []
        if self._answers:
            self._print(FACTS)

    def _print(self, answer: Any) -> None:
        if self._writing < 0:
            return
        text, whole = json.dumps(answer).encode(), self.random.randint(0, 3)
        if not whole:
            text = mutations.damaged_json(self.random, text.decode())[:60_000]
        os.write(self._writing, b"Welcome!\n" + text + b"\n")
        if not whole:
            self.close_pipe()

    def close_pipe(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
        self._writing = -1

    def tell(self, message: dict[str, Any]) -> None:
        answers: dict[str, Any] = {"clock": {"time": 1.5e9}}
        answers["measure"] = {"megabits": 900.0, "round_trip_ms": 0.2, "from": "10.0.0.1"}
        done = REACHED if "peers" in message else answers.get(message.get("do", ""), {"port": 5})
        self._print(done)

    def close(self) -> None:
        self.close_pipe()
        self.process.stdout.close()


def _doctor(random: Random, folder: Path) -> None:
    from paceline.launch import inspection, pairs

    before = inspection.AskedHost
    _Host.random = random
    inspection.AskedHost = pairs.Asked = _Host  # type: ignore[assignment,misc]
    try:
        words = ["--json"] if random.randint(0, 1) else []
        call("doctor", "--hosts", "a,b", *words)
    finally:
        inspection.AskedHost = pairs.Asked = before  # type: ignore[misc]


def _hosts_setup(random: Random, folder: Path) -> None:
    from paceline.launch.setup import HostSetup, Recipe

    wheel = folder / "paceline.whl"
    wheel.write_bytes(b"x")
    said: list[str] = []
    recipe = Recipe(target="~/x", requirements=("torch==2.13",), paceline=wheel, dry=True)
    setup = HostSetup(Host(name="a"), recipe, said.append)
    printed = b"Welcome!\n" + damaged_message(random, PROBED) + b"\n"
    answer = (pick(random, (0, 0, 0, 3, 255)), printed.decode(errors="replace"), "x\x1b[31m")
    setup.call = lambda *words, **more: answer  # type: ignore[method-assign]
    setup.run()


# --- between nodes and ranks ----------------------------------------------------------


def _store(random: Random, folder: Path) -> None:
    from paceline.exchange.store import StoreTable, read_answer, read_order

    table = StoreTable()
    for do in ("set", "add", "get", "check", "delete", "wait"):
        value = base64.b64encode(b"5").decode()
        order = {"do": do, "keys": ["a"], "number": 1, "seconds": 1.5, "value": value}
        try:
            answer = table.answer(read_order(damaged_message(random, order)))
        except ValueError:
            continue
        try:
            read_answer(damaged_message(random, answer or {}))
        except RuntimeError as error:
            check_message(str(error))


def _words(random: Random, folder: Path) -> None:
    """What servers of other groups, and the nodes of `hogwild`, say of themselves."""
    from paceline.exchange.servers.copies import Word, Words
    from paceline.exchange.wire import BadMessageError

    words = Words([1])
    whole = dataclasses.asdict(Word(staleness={"0": 3}, news=["x"]))
    try:
        words.hear(1, damaged_message(random, whole).decode(errors="replace"))
    except BadMessageError:
        return
    report = {"staleness": {"0": 1}, "updates": 1, "training": 1, "progress": 1}
    words.added_to(report | {"bytes_sent": 1, "bytes_received": 1})


def _seed(random: Random, folder: Path) -> None:
    from paceline.exchange.seed import check_note, read_note
    from paceline.exchange.wire import BadMessageError

    slices = [{"whole": ["momentum"], "numbers": {"step": 1.0}}]
    whole = {"update": 3, "slices": slices, "vectors": ["momentum"], "rest": 8}
    with contextlib.suppress(BadMessageError):
        note = read_note(damaged_message(random, whole).decode(errors="replace"))
        check_note(note, 1, 8)
        _ = note["update"] + 1, [float(n) for n in note["slices"][0]["numbers"].values()]


def _losses(random: Random, folder: Path) -> None:
    from paceline.exchange.losses import Losses, Patience, losses_file, patience_file

    path = losses_file(folder, 4)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damaged_message(random, {"node": 3}) + b'\n{"node": 2}\n')
    if 2 not in Losses(folder, 4).fresh():
        raise FaultError("a damaged line hid the next one")
    path = patience_file(folder)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damaged_message(random, {"1": 7.5, "2": 10.0}))
    Patience(folder).fresh()


def _leg_orders(random: Random, folder: Path) -> None:
    from paceline.launch.leg_rank import read_order
    from paceline.launch.standby import read_answer

    orders = (
        {"do": "leg", "plan": PLAN, "began": 1.0, "rehearsal": False, "place": None},
        {"do": "take_over", "rest": {}},
        {"do": "go", "until": 5, "patience": None},
        {"do": "finish", "open_seconds": 1.0, "more": {}, "received": None},
        {"do": "end"},
    )
    answers = (
        {"did": "wake"},
        {
            "did": "go",
            "times": [0.1],
            "update": 1,
            "finished": False,
            "updates": 5,
            "memory_mb": 1.0,
        },
        {"did": "finish", "summary": {}, "exit_code": 0},
        {"refused": "no"},
        {"show": "say", "with": ["x"], "named": {}},
    )
    try:
        read_order(damaged_message(random, pick(random, orders)).decode(errors="replace"))
        read_answer(damaged_message(random, pick(random, answers)))
    except WorkerError as error:
        check_message(str(error))


def _clock(random: Random, folder: Path) -> None:
    from paceline.observe.clock import ask

    def answer() -> bytes:
        values = [float(pick(random, (0.0, 1.0, float("nan"), float("inf"), -1e308))) for _ in "ab"]
        return struct.pack("<dd", *values)

    ask(lambda data: None, answer, rounds=3)


# --- downloads ------------------------------------------------------------------------


def _download(random: Random, folder: Path) -> None:
    """What a mirror answers over HTTP."""
    from paceline.data import download
    from paceline.data.base import DataSpec, Download

    body = bytes(range(200))
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nContent-Type: x/y\r\n\r\n" + body
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"http://127.0.0.1:{listener.getsockname()[1]}"
        replies = [mutations.damaged_bytes(random, reply) for _ in range(6)]
        thread = threading.Thread(target=_serve, args=(listener, replies), daemon=True)
        thread.start()
        file = Download(file="x.bin", md5="0" * 32, size=200, mirrors=(f"{place}/",))
        fields = {f.name for f in dataclasses.fields(DataSpec)}
        spec = SimpleNamespace(downloads=(file,), **dict.fromkeys(fields - {"downloads"}, ""))
        shutil.rmtree(folder / "data", ignore_errors=True)
        (folder / "data").mkdir()
        target = folder / "data" / "x.bin"
        try:
            download._download(spec, file, target, (), lambda *words: None, 2.0)  # type: ignore[arg-type]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(5.0)


def _serve(listener: socket.socket, replies: list[bytes]) -> None:
    for reply in replies:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2.0)
            connection.recv(65536)
            connection.sendall(reply)


def _lab_files(random: Random, folder: Path) -> None:
    """What `lab clean` finds, and what a lab's hosts say to each other."""
    from paceline.lab import supervisor
    from paceline.lab.agent import receive

    groups = ["/sys/fs/cgroup/x/lab-1", "/sys/fs/cgroup/y"]
    (folder / "groups.json").write_bytes(damaged_message(random, groups))
    supervisor.groups_of(str(folder))
    one, other = socket.socketpair()
    with one, other:
        data = damaged_message(random, {"do": "start", "argv": ["x"], "env": None})
        one.sendall(data[:60_000] + b"\n")
        one.shutdown(socket.SHUT_WR)
        receive(other)


def _secret_file(random: Random, folder: Path) -> None:
    from paceline.config.environment import shared_secret
    from paceline.secure.files import write_private

    write_private(folder / "secret", "")
    (folder / "secret").write_bytes(mutations.damaged_bytes(random, SECRET.encode()))
    shared_secret({"PACELINE_CACHE": str(folder)})


def messages() -> list[Target]:
    """All of these."""
    from paceline.exchange.agreement import read_description
    from paceline.exchange.servers.rendezvous import read_arrival
    from paceline.exchange.wire import read_answer, read_request
    from paceline.launch import channel
    from paceline.launch.links import read_seconds
    from paceline.launch.rendezvous import read_port

    described = {"name": "step-00000004", "files": [["state.json", 5, "ab" * 32]]}
    return [
        Target("handshake", nothing, _greet),
        Target("messages to a launcher", nothing, _message(channel.read_message, *TO_LAUNCHER)),
        Target(
            "messages to an agent",
            nothing,
            _message(
                lambda body: channel.read_message(body, channel.TO_AGENT),
                *TO_AGENT,
                {"kind": "answer", "joined": True, "text": "x"},
            ),
        ),
        Target("agent", nothing, _agent),
        Target("session", nothing, _session),
        Target("files to a launcher", _host_folder, _collect),
        Target("files to an agent", _host_folder, _take_piece),
        Target("notes in a run", nothing, _left_behind),
        Target("join.json", nothing, _join),
        Target("ssh: doctor", nothing, _doctor),
        Target("ssh: hosts setup", nothing, _hosts_setup),
        Target("store", nothing, _store),
        Target("parameter server: request", nothing, _numbers(read_request, 12)),
        Target("parameter server: answer", nothing, _numbers(read_answer, 5)),
        Target("words of servers", nothing, _words),
        Target("first state", nothing, _seed),
        Target("lost.jsonl", nothing, _losses),
        Target(
            "arrivals",
            nothing,
            _sentence(lambda body: read_arrival(1, body), {"node": 1, "host": "a"}),
        ),
        Target("checkpoint of the first node", nothing, _sentence(read_description, described)),
        Target("orders of legs", nothing, _leg_orders),
        Target("clock", nothing, _clock),
        Target("port", nothing, _message(read_port, 29500)),
        Target("seconds of a link", nothing, _message(read_seconds, 0.4)),
        Target("download", nothing, _download),
        Target("lab", nothing, _lab_files),
        Target("secret", nothing, _secret_file),
    ]
