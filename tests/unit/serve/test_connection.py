"""Requests as they come over a socket: in pieces, behind each other, without anybody who reads."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_server import PATIENCE, Served, serving

from paceline.serve.trained import open_trained


@pytest.fixture(scope="module")
def served(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("connections") / "models"
    shutil.copytree(exported, models / "digits" / "1")
    with serving(models) as server:
        yield server


SAMPLE = np.random.default_rng(0).standard_normal((1, 1, 28, 28), np.float32)
BODY = json.dumps({"instances": SAMPLE.tolist()}).encode()


def request(body: bytes = BODY, *, more: str = "", version: str = "1.1") -> bytes:
    head = (
        f"POST /v1/models/digits:predict HTTP/{version}\r\nHost: localhost\r\n{more}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client:
    def __init__(self, server: Served) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()
        self.socket.close()

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name] = value
        return status, headers, self.file.read(int(headers.get("content-length", 0)))


@pytest.fixture(scope="module")
def right(trained_run: Path) -> list[list[float]]:
    return open_trained(trained_run).outputs(SAMPLE).tolist()


def check(answer: tuple[int, dict[str, str], bytes], right: list[list[float]]) -> None:
    status, headers, text = answer
    assert (status, headers["content-type"]) == (200, "application/json"), text
    np.testing.assert_allclose(json.loads(text)["predictions"], right, atol=1e-4)


@pytest.mark.parametrize("pause", [0.0, 0.2])
@pytest.mark.parametrize("cut", [20, 150, 1000, -1])
def test_a_request_may_come_in_pieces(
    served: Served, right: list[list[float]], cut: int, pause: float
) -> None:
    """Whether the rest comes at once or late: a late one is read where slow clients are cut off."""
    whole = request()
    with Client(served) as client:
        for _ in range(2):
            client.socket.sendall(whole[:cut])
            time.sleep(pause)
            client.socket.sendall(whole[cut:])
            check(client.answer(), right)


def test_requests_behind_each_other_are_answered_in_order(
    served: Served, right: list[list[float]]
) -> None:
    wrong = request(b"{}")
    with Client(served) as client:
        client.socket.sendall(request() + wrong + request() + request() + wrong)
        for is_right in (True, False, True, True, False):
            answer = client.answer()
            if is_right:
                check(answer, right)
            else:
                assert answer[0] == 400


@pytest.mark.parametrize(("more", "version"), [("Connection: close\r\n", "1.1"), ("", "1.0")])
def test_connections_are_closed_where_that_is_asked_for(
    served: Served, right: list[list[float]], more: str, version: str
) -> None:
    with Client(served) as client:
        client.socket.sendall(request(more=more, version=version))
        check(client.answer(), right)
        assert client.file.read() == b""


def test_who_asks_first_is_told_to_go_on(served: Served, right: list[list[float]]) -> None:
    head, _, body = request(more="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with Client(served) as client:
        client.socket.sendall(head + b"\r\n\r\n")
        assert client.answer()[0] == 100
        client.socket.sendall(body)
        check(client.answer(), right)


def test_a_body_of_chunks(served: Served, right: list[list[float]]) -> None:
    head = "POST /v1/models/digits:predict HTTP/1.1\r\nHost: localhost\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    halves = (BODY[:1000], BODY[1000:])
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in halves)
    with Client(served) as client:
        client.socket.sendall(head.encode() + chunks + b"0\r\n\r\n")
        check(client.answer(), right)
        client.socket.sendall(head.encode() + b"5\r\nabcdefg")
        assert client.answer()[0] == 400
        assert client.file.read() == b""


def test_who_does_not_read_answers_keeps_nobody_waiting(
    served: Served, right: list[list[float]]
) -> None:
    count = 200
    with Client(served) as silent:
        for _ in range(count):
            silent.socket.sendall(request())
        with Client(served) as other:
            other.socket.sendall(request())
            check(other.answer(), right)
        for _ in range(count):
            check(silent.answer(), right)


def test_clients_that_go_away_are_forgotten(served: Served, right: list[list[float]]) -> None:
    """Before the body, within it, and before the answer."""
    for text in (request()[:150], request()[:2000], request(), request() * 3):
        with Client(served) as client:
            client.socket.sendall(text)
    with Client(served) as client:
        client.socket.sendall(request())
        check(client.answer(), right)
