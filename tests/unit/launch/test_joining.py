"""Asking to join a training, and word of nodes that were lost: without any host."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from attending import attended, wait_for

from paceline.config.hosts import find_hosts
from paceline.errors import ConfigError, RunDirectoryError
from paceline.exchange.losses import Losses, Patience, leave_patience, leave_word
from paceline.launch.channel import connect
from paceline.launch.joining import DOOR, ask_to_join, one_host
from paceline.schema.hosts import Host
from paceline.secure.files import write_private


def test_a_run_that_takes_no_workers_says_so(call_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "x"\n')
    done = call_cli("join", tmp_path, "--host", "e")
    assert done.returncode == 2
    assert "takes no workers now: a host can join a training while it runs" in done.stderr
    assert call_cli("join", tmp_path / "none", "--host", "e").returncode == 2


def test_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    note = {"addresses": ["127.0.0.1"], "port": port, "secret": "t" * 32}
    write_private(tmp_path / DOOR, json.dumps(note))
    with pytest.raises(RunDirectoryError, match="is not being trained any more"):
        ask_to_join(tmp_path, Host(name="e"))
    (tmp_path / DOOR).chmod(0o644)
    with pytest.raises(ConfigError, match=r"must be yours alone: .* chmod 600"):
        ask_to_join(tmp_path, Host(name="e"))


def test_a_python_is_never_sent(tmp_path: Path) -> None:
    write_private(tmp_path / DOOR, '{"addresses": [], "port": 1, "secret": "t"}')
    with pytest.raises(ConfigError, match=r"python = '/tmp/x', which a training does not take"):
        ask_to_join(tmp_path, Host(name="e", python="/tmp/x"))


def test_one_host_at_a_time() -> None:
    assert one_host(find_hosts("e").host, "e").name == "e"
    for text in ("e,f", "e:2"):
        with pytest.raises(ConfigError, match="must name one host with one slot"):
            one_host(find_hosts(text).host, text)


@pytest.mark.parametrize("knows_secret", [True, False])
def test_only_those_who_know_the_secret_may_ask(knows_secret: bool) -> None:
    with attended() as control:
        if not knows_secret:
            with pytest.raises(ConnectionError, match="does not know this run's secret"):
                connect([("127.0.0.1", control.port)], "guess" * 4)
            assert not control.guests
            return
        guest = connect([("127.0.0.1", control.port)], control.secret)
        guest.send("join", host={"name": "e"})
        wait_for(lambda: bool(control.guests))
        assert [found["host"] for _, found in control.guests] == [{"name": "e"}]
        guest.close()


def test_a_lost_agent_may_be_followed_by_another() -> None:
    lost: list[int] = []
    with attended(lost) as control:
        for turn in range(2):
            agent = connect([("127.0.0.1", control.port)], control.secret)
            agent.send("hello", node=0)
            wait_for(lambda: not control.missing)
            agent.close()
            wait_for(lambda turn=turn: len(lost) == turn + 1)
            control.expect(0)
            assert control.missing == [0]
        assert lost == [0, 0]
        control.expect(3)
        assert control.missing == [0, 1, 2, 3]


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


def test_a_full_disk_takes_no_advice_on_patience_and_ends_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run"  # a file where a folder should be: nothing can be written below it
    place.write_text("")
    leave_patience(place, {1: 5.0})
    assert Patience(place).fresh() is None
