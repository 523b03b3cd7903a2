"""The store where nodes meet: torch's interface for who knows the secret, nothing for others."""

from __future__ import annotations

import contextlib
import datetime
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from paceline.errors import ConfigError, DeadlineError, WorkerError
from paceline.exchange.opening import late_hosts, open_network, open_store, prove_members
from paceline.exchange.servers.rendezvous import read_arrival
from paceline.exchange.store import SecureStore, StoreRequest, StoreTable, read_order
from paceline.exchange.wire import (
    Connection,
    ConnectionLostError,
    Request,
    Traffic,
    read_answer,
    read_request,
)
from paceline.launch.rendezvous import read_port
from paceline.schema import RankContext
from paceline.secure.sealing import Sealing

SECRET = "0123456789abcdef"


@contextlib.contextmanager
def opened(seconds: float = 300.0) -> Iterator[tuple[SecureStore, SecureStore]]:
    """The first node's store, and another node's connection to it."""
    first = SecureStore("127.0.0.1", 0, SECRET, seconds=seconds, serves=True)
    other = SecureStore(*first.place, SECRET, seconds=seconds)
    try:
        yield first, other
    finally:
        other.close()
        first.close()


def test_what_one_node_sets_another_gets() -> None:
    with opened() as (first, other):
        first.set("a", b"\x00\xff")
        assert other.get("a") == b"\x00\xff"
        assert [other.add("n", 2), first.add("n", 3)] == [2, 5]
        assert first.check(["a", "n"])
        assert not other.check(["a", "b"])
        assert other.delete_key("a")
        assert not other.delete_key("a")
        later = threading.Timer(0.2, lambda: first.set("late", "here"))
        later.start()
        other.wait(["late"])
        PrefixStore("x", other).set("b", "through torch")
        assert first.get("x/b") == b"through torch"
        later.join()


def test_what_never_comes_ends_the_wait() -> None:
    with opened(seconds=0.3) as (_, other), pytest.raises(RuntimeError, match="waiting for never"):
        other.get("never")


def test_a_store_that_has_gone_is_named() -> None:
    with opened() as (first, other):
        first.close()
        with pytest.raises(RuntimeError, match="connection to the store was lost"):
            other.get("a")


def test_it_is_reached_at_its_own_address_alone() -> None:
    with opened() as (first, _):
        listening = {
            found.laddr.ip
            for found in psutil.Process().net_connections()
            if found.status == psutil.CONN_LISTEN and found.laddr.port == first.place[1]
        }
        assert listening == {"127.0.0.1"}


def test_a_value_cannot_be_overwritten_by_who_does_not_know_the_secret() -> None:
    with opened() as (first, other):
        first.set("config", "mine")
        with pytest.raises(RuntimeError, match="does not know this run's secret"):
            SecureStore(*first.place, "another secret!!", seconds=60.0)
        # As it was done: torch's own client, to which its server answers everything.
        with pytest.raises(dist.DistError):
            TCPStore(*first.place, timeout=datetime.timedelta(seconds=2))
        for garbage in (b"[" * 100_000, bytes(4096), "é".encode() * 50):
            with socket.create_connection(first.place, timeout=300) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(garbage)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert other.get("config") == b"mine"


def test_who_stands_between_cannot_change_a_value() -> None:
    """A relay that flips one bit of what the store answers."""
    with opened() as (first, _), relay(first.place, lambda data: data[:-1] + b"?") as place:
        first.set("a", "value")
        with pytest.raises(RuntimeError, match="was lost"):
            SecureStore(*place, SECRET, seconds=60.0).get("a")


@contextlib.contextmanager
def relay(target: tuple[str, int], change: Callable[[bytes], bytes]) -> Iterator[tuple[str, int]]:
    """Passes one connection on; what comes back after the handshake is changed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry() -> None:
            caller, _ = listener.accept()
            with caller, socket.create_connection(target) as there:

                def up() -> None:
                    with contextlib.suppress(OSError):
                        while data := caller.recv(65536):
                            there.sendall(data)
                    with contextlib.suppress(OSError):
                        there.shutdown(socket.SHUT_RDWR)

                sender = threading.Thread(target=up)
                sender.start()
                passed = 0
                with contextlib.suppress(OSError):
                    while data := there.recv(65536):
                        caller.sendall(change(data) if passed >= 72 else data)
                        passed += len(data)
                with contextlib.suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)
                sender.join()

        thread = threading.Thread(target=carry)
        thread.start()
        yield listener.getsockname()
        thread.join()


def test_a_node_without_a_secret_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match="set PACELINE_SECRET to the same text on all nodes"):
        open_store(RankContext(nodes=2), deadline=1.0)


# --- Gloo's members -------------------------------------------------------------


def pair(secrets: tuple[str, str]) -> list[object]:
    """Two members of a Gloo group, in threads; what each proof came to, and its group."""
    store = HashStore()
    found: list[object] = [None, None]

    def member(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=5)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, 2, options)
        try:
            sealings = prove_members(group, rank, [1 - rank], secrets[rank], "pair")
            found[rank] = (group, sealings[1 - rank])
        except (WorkerError, RuntimeError) as error:
            found[rank] = f"{type(error).__name__}: {error}"  # the error itself holds the group

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_stranger_in_a_group_is_found_before_it_gets_anything() -> None:
    listens, _ = pair((SECRET, "another secret!!"))
    assert str(listens).startswith("WorkerError: member 1 of pair does not belong to this run")


def test_requests_between_members_are_sealed() -> None:
    (first_group, first), (second_group, second) = pair((SECRET, SECRET))  # type: ignore[misc]
    assert isinstance(first, Sealing)
    server = Connection(first_group, 1, Traffic(), patience=20.0, sealing=first)
    worker = Connection(second_group, 0, Traffic(), patience=20.0, sealing=second)
    threading.Thread(target=lambda: worker.ask(Request(kind=2, update=7, rate=0.5))).start()
    assert server.asked() == Request(kind=2, update=7, rate=0.5)
    threading.Thread(target=lambda: worker.send(torch.zeros(96 + 16, dtype=torch.uint8))).start()
    with pytest.raises(ConnectionLostError, match="was changed on its way"):
        server.asked()
    server.close()
    worker.close()


# --- readers --------------------------------------------------------------------


def test_readers_take_any_bytes() -> None:
    generator = random.Random(0)
    readers: list[Callable[[bytes], object]] = [read_order, read_request, read_answer, read_port]
    samples = [b"[" * 100_000, b'{"do": "get", "keys": [1]}', b'{"do": 1, "keys": []}', b"", b"{}"]
    samples += [b'{"do":"get","keys":["a"],"value":"*"}', b'{"do":"x","keys":[],"seconds":"1"}']
    samples += [generator.randbytes(size) for size in (1, 5, 40, 96) for _ in range(50)]
    for reader in readers:
        for sample in samples:
            with contextlib.suppress(ValueError):
                reader(sample)
    for text in (b"[]", b'{"node": -1, "host": "a"}', b'{"node": true, "host": "a"}', b"\xff"):
        with pytest.raises(WorkerError, match="arrival 3 in the run's store cannot be read"):
            read_arrival(3, text)
    assert StoreTable().answer(StoreRequest(do="launch", keys=("a",))) == {
        "error": "the store has no order 'launch'"
    }
    order = StoreRequest(do="set", keys=("a",), value=b"\x00", number=-3, seconds=1.5)
    assert read_order(order.encoded()) == order


def test_the_crowd_at_its_door_leaves_the_store_at_work() -> None:
    with opened() as (first, other):
        crowd = [socket.create_connection(first.place, timeout=300) for _ in range(200)]
        try:
            first.set("a", "1")
            assert other.get("a") == b"1"
            assert first._server is not None
            readable, still, end = first._server._selector, 0, time.monotonic() + 300
            # Whatever stays readable would make it spin.
            while still < 20:
                assert time.monotonic() < end, "the store has no rest"
                time.sleep(0.01)
                still = 0 if readable.select(0) else still + 1
        finally:
            for connection in crowd:
                connection.close()


def test_waiting_is_given_up_once_it_is_hopeless() -> None:
    """A host that was lost writes nothing here any more; the store serves on."""
    with opened(seconds=60.0) as (first, other):
        lost: list[str] = []
        other.hopeless = lambda: "; ".join(lost)
        timer = threading.Timer(0.2, lost.append, ["host c has gone"])
        timer.start()
        with pytest.raises(RuntimeError, match="given up: host c has gone"):
            other.get("address of c")
        timer.join()
        other.hopeless = None
        first.set("a", b"1")
        assert other.get("a") == b"1"


def test_a_host_that_does_not_come_is_named() -> None:
    hosts = ["a", "b", "c"]
    assert late_hosts(RuntimeError("timed out waiting for nodes/0/1 in the store"), hosts) == "b"
    both = "timed out waiting for nodes/0/2, nodes/0/1 in the store"
    assert late_hosts(RuntimeError(both), hosts) == "c"
    assert late_hosts(RuntimeError("Connection reset by peer"), hosts) == ""


def test_the_first_node_says_who_did_not_come() -> None:
    context = RankContext(node=0, nodes=2, port=free_port(), secret=SECRET)
    with pytest.raises(DeadlineError, match=r"b did not come within the 1 s of train\.deadline"):
        open_network(context, ["a", "b"], deadline=1.0)
