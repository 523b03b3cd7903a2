"""Asking to join a training, and word of nodes that were lost: without any host."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.config.hosts import find_hosts
from paceline.errors import ConfigError, RunDirectoryError
from paceline.exchange.losses import Losses, leave_word
from paceline.launch.control import Control
from paceline.launch.joining import DOOR, ask_to_join, one_host
from paceline.schema.hosts import Host


def test_a_run_that_takes_no_workers_says_so(call_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "x"\n')
    done = call_cli("join", tmp_path, "--host", "e")
    assert done.returncode == 2
    assert "takes no workers now: a host can join a training with" in done.stderr
    assert call_cli("join", tmp_path / "none", "--host", "e").returncode == 2


def test_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    note = {"addresses": ["127.0.0.1"], "port": port, "token": "t"}
    (tmp_path / DOOR).write_text(json.dumps(note))
    with pytest.raises(RunDirectoryError, match="is not being trained any more"):
        ask_to_join(tmp_path, Host(name="e"))


def test_one_host_at_a_time() -> None:
    assert one_host(find_hosts("e").host, "e").name == "e"
    for text in ("e,f", "e:2"):
        with pytest.raises(ConfigError, match="must name one host with one slot"):
            one_host(find_hosts(text).host, text)


@pytest.mark.parametrize("knows_token", [True, False])
def test_only_those_who_know_the_token_may_ask(knows_token: bool) -> None:
    control = Control(1)
    try:
        token = control.token if knows_token else "guess"
        message = {"kind": "join", "token": token, "host": {"name": "e"}}
        with socket.create_connection(("127.0.0.1", control.port)) as guest:
            guest.sendall(json.dumps(message).encode() + b"\n")
            end = time.monotonic() + 300
            while not control.guests and time.monotonic() < end:
                control.turn(0.02)
                if not knows_token:
                    guest.settimeout(0.05)
                    try:
                        assert guest.recv(1) == b""
                        break
                    except TimeoutError:
                        continue
            assert [found["host"] for _, found in control.guests] == [{"name": "e"}] * knows_token
    finally:
        control.close()


def test_a_lost_agent_may_be_followed_by_another() -> None:
    control = Control(1)
    try:
        for _ in range(2):
            hello = {"kind": "hello", "token": control.token, "node": 0}
            with socket.create_connection(("127.0.0.1", control.port)) as agent:
                agent.sendall(json.dumps(hello).encode() + b"\n")
                while control.missing:
                    control.turn(0.02)
            assert [lost.node for lost in control.turn(1.0)[1]] == [0]
            control.expect(0)
            assert control.missing == [0]
        control.expect(3)
        assert control.missing == [0, 1, 2, 3]
    finally:
        control.close()


def test_every_loss_is_heard_of_once(tmp_path: Path) -> None:
    losses = Losses(tmp_path, 4)
    assert losses.fresh() == []
    leave_word(tmp_path, 4, 3)
    leave_word(tmp_path, 5, 1)
    assert losses.fresh() == [3]
    assert losses.fresh() == []
    leave_word(tmp_path, 4, 2)
    leave_word(tmp_path, 4, 3)
    assert losses.fresh() == [2, 3]
