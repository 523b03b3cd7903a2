"""Links between hosts: measured over real sockets, judged by table."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.launch.inspection import with_remedy
from paceline.launch.links import measure, serve
from paceline.launch.pairs import LinkDirection, Links


def test_measuring_over_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = threading.Thread(target=serve, args=(listener, "secret"))
        server.start()
        found = measure("127.0.0.1", port, "secret", 0.05)
        stranger = measure("127.0.0.1", port, "wrong", 0.05)
        listener.shutdown(socket.SHUT_RDWR)
        server.join(timeout=600)
    assert found["megabits"] > 0
    assert found["round_trip_ms"] > 0
    assert found["from"] == "127.0.0.1"
    assert set(stranger) == {"error"}


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "Connection refused" in measure("127.0.0.1", port, "secret", 0.05)["error"]


def full(names: str, **changed: tuple[float, float]) -> tuple[LinkDirection, ...]:
    """All pairs at 1000 Mbit/s and 0.2 ms, but for those that are changed."""
    links = []
    for source in names:
        for target in names:
            if source != target:
                megabits, trip = changed.get(source + target, (1000.0, 0.2))
                link = LinkDirection(
                    source=source, target=target, megabits=megabits, round_trip_ms=trip
                )
                links.append(link)
    return tuple(links)


SLOW, FAR = (94.0, 0.2), (1000.0, 20.0)


@pytest.mark.parametrize(
    ("links", "starts"),
    [
        (Links(links=full("abc")), []),
        (Links(links=full("abc", ab=(600.0, 0.2))), []),
        (Links(links=full("ab", ab=SLOW)), ["the link from host a to b is slow: 94 Mbit/s"]),
        (Links(links=full("abc", ab=SLOW)), ["the link from host a to b is slow: 94 Mbit/s"]),
        (
            Links(links=full("abc", ac=SLOW, ca=SLOW, bc=SLOW, cb=SLOW)),
            ["every link of host c is slow: 94 Mbit/s against 1,000 from a to b"],
        ),
        (
            Links(links=full("abc", ac=FAR, ca=FAR, bc=FAR, cb=FAR)),
            ["host c is far from all others: 20.0 ms"],
        ),
        (Links(links=full("abc", ab=FAR)), ["hosts a and b are far apart: 20.0 ms"]),
        (
            Links(links=(LinkDirection(source="a", target="b", error="timed out"),)),
            ["nothing goes from host a to b: timed out"],
        ),
        (Links(clocks={"a": 0.9, "b": -4.2}), ["the clock of host b is 4.2 s behind"]),
        (Links(failures={"b": "gone"}), ["the links of host b could not be measured: gone"]),
    ],
)
def test_what_is_wrong(links: Links, starts: list[str]) -> None:
    found = links.problems()
    assert len(found) == len(starts)
    for sentence, start in zip(found, starts, strict=True):
        assert sentence.startswith(start)


def test_a_pair_is_told_of_once() -> None:
    links = Links(links=(LinkDirection(source="a", target="b", error="timed out"),))
    assert links.problems(known={("a", "b")}) == []


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("me@b: Permission denied (publickey,password).", "ssh-copy-id"),
        ("ssh: Could not resolve hostname b: Name or service not known", "give `address`"),
        ("ssh: connect to host b port 22: Connection timed out", "switched on"),
        ("ssh: connect to host b port 22: Connection refused", "ssh service"),
        ("Host key verification failed.", "accept its key"),
        ("/usr/bin/python3: No module named paceline", "paceline hosts setup"),
        ("[Errno 2] No such file or directory: 'ssh'", "ssh client on this machine"),
    ],
)
def test_what_ssh_says_comes_with_a_remedy(words: str, remedy: str) -> None:
    found = with_remedy(words)
    assert found.startswith(words)
    assert remedy in found
