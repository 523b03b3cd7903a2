"""What strangers can do to a launcher's port: nothing. Real sockets, and an agent that gets in."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from attending import attended, wait_for

from paceline.launch.channel import Channel, connect, read_message
from paceline.launch.control import Control, Lost, addresses_towards
from paceline.secure.door import MOST_STRANGERS
from paceline.secure.sealing import Sealing


def knock(control: Control, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", control.port), timeout=300)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


def is_dropped(connection: socket.socket) -> bool:
    """Whether it was closed by the launcher, whatever it was told before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@contextlib.contextmanager
def still_welcoming() -> Iterator[Control]:
    """A control to which an agent of the run still comes when the strangers have had their turn."""
    with attended() as control:
        yield control
        agent = connect([("127.0.0.1", control.port)], control.secret)
        agent.send("hello", node=0, host="a", cores=[0])
        wait_for(lambda: not control.missing)
        agent.close()


GARBAGE = {
    "a token that is not ASCII": '{"kind":"hello","node":0,"token":"é"}\n'.encode(),
    "deep JSON": b"[" * 200_000 + b"\n",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
    "zeros": bytes(100_000),
    "a greeting and no proof": b"PACELIN1" + bytes(64),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_drops_its_sender_alone(name: str) -> None:
    with still_welcoming() as control, knock(control, GARBAGE[name]) as stranger:
        assert is_dropped(stranger)
        assert control.missing == [0]


def test_senders_without_an_end_take_no_memory() -> None:
    """40 MB from each of three: forty bytes are read, and then no more."""
    with still_welcoming() as control:
        before = psutil.Process().memory_info().rss
        taken = 0
        for _ in range(3):
            with knock(control) as sender, contextlib.suppress(OSError):
                for _ in range(640):
                    taken += sender.send(b"P" * 65536)
        assert taken < 30e6  # what the kernel's buffers hold, not what was sent
        assert psutil.Process().memory_info().rss - before < 20e6


def test_a_crowd_of_idle_connections_is_bounded() -> None:
    with still_welcoming() as control:
        crowd: list[socket.socket] = []
        most = 0
        try:
            for _ in range(1500):
                with contextlib.suppress(OSError):  # the kernel's queue was full for a moment
                    crowd.append(socket.create_connection(("127.0.0.1", control.port), timeout=5))
                most = max(most, control.strangers)
                if len(crowd) > 300:  # the test itself has only so many descriptors
                    crowd.pop(0).close()
            assert 0 < most <= MOST_STRANGERS
            assert len(psutil.Process().net_connections()) < 1000
        finally:
            for connection in crowd:
                connection.close()


def test_recorded_bytes_do_not_open_the_door() -> None:
    """Who has heard an agent's whole conversation cannot have it again."""
    with still_welcoming() as control:
        heard = bytearray()
        with knock(control) as wire:
            sealing = Sealing(control.secret, "control", asks=True)
            while not sealing.is_known:
                if out := sealing.take_output():
                    heard += out
                    wire.sendall(out)
                sealing.feed(wire.recv(sealing.wanted))
            hello = sealing.seal(json.dumps({"kind": "hello", "node": 0}).encode())
            heard += hello
            wire.sendall(hello)
            wait_for(lambda: not control.missing)
        wait_for(lambda: not control.connected)
        control.expect(0)
        assert control.secret.encode() not in heard
        with knock(control, bytes(heard)) as thief:
            assert is_dropped(thief)
        assert control.missing == [0]


def test_a_message_put_into_an_open_connection_ends_it() -> None:
    lost: list[int] = []
    with attended(lost) as control:
        agent = connect([("127.0.0.1", control.port)], control.secret)
        agent.send("hello", node=0)
        wait_for(lambda: not control.missing)
        body = b'{"kind": "end", "code": 0}'
        agent.connection.sendall(len(body).to_bytes(4, "big") + bytes(16) + body)
        wait_for(lambda: lost == [0])
        agent.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"node": True},
        {"node": -1},
        {"node": "0"},
        {"node": 0, "cores": "many"},
        {"node": 0, "cores": [None]},
        {},
    ],
)
def test_a_hello_must_name_a_node_that_is_missing(hello: dict[str, object]) -> None:
    with still_welcoming() as control:
        agent = connect([("127.0.0.1", control.port)], control.secret)
        agent.send("hello", **hello)
        wait_for(lambda: not agent.receive()[1])
        agent.close()


def test_messages_are_objects_with_a_kind() -> None:
    assert read_message(b'{"kind": "x"}') == {"kind": "x"}
    for body in (b"", b"[]", b"{}", b'{"kind": 1}', b"\xff", b"[" * 200_000, b"1e999999999"):
        with pytest.raises(ValueError):  # noqa: PT011
            read_message(body)


def test_it_listens_where_it_is_needed_and_nowhere_else() -> None:
    assert addresses_towards(["localhost", "127.0.0.1"]) == ["127.0.0.1"]
    control = Control(1, addresses_towards(["localhost"]))
    try:
        listening = {
            place.laddr.ip
            for place in psutil.Process().net_connections()
            if place.status == psutil.CONN_LISTEN and place.laddr.port == control.port
        }
        assert listening == {"127.0.0.1"}
        assert control.listen("127.0.0.1") == control.port
        assert control.listen("127.0.0.2") > 0  # for a host that comes another way
    finally:
        control.close()


def test_a_node_that_is_not_worth_waiting_for_is_lost_sooner() -> None:
    """The first node says so, where that costs a leg only; what others say of it is not heard."""
    control = Control(3, silence=3600.0)
    agents: list[Channel] = []
    try:
        for node in range(3):
            agents.append(connecting(control, node))
        agents[0].send("patience", seconds={"1": 0.0})
        agents[0].send("port", port=1)
        while not control.turn(0.05)[0]:
            pass
        assert control.patience == {}
        control.weighs = True
        agents[1].send("patience", seconds={"2": 0.1})
        agents[0].send("patience", seconds={"1": 0.2, "nonsense": 0.0})
        lost: list[Lost] = []
        while not lost:
            lost = control.turn(0.05)[1]
        assert [each.node for each in lost] == [1]
        assert control.patience == {1: 0.2}
    finally:
        for agent in agents:
            agent.close()
        control.close()


def connecting(control: Control, node: int) -> Channel:
    """An agent that has come, while the launcher takes its turns here."""
    found: list[Channel] = []

    def come() -> None:
        found.append(connect([("127.0.0.1", control.port)], control.secret))
        found[0].send("hello", node=node, host="abc"[node], cores=[0])

    thread = threading.Thread(target=come)
    thread.start()
    while node in control.missing:
        control.turn(0.05)
    thread.join()
    return found[0]
