"""Strangers at every port of a real training with a parameter server: it ends as if alone."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from paced_model import put_into
from torch._C._distributed_c10d import TCPStore

from paceline.errors import WorkerError
from paceline.exchange.store import SecureStore
from paceline.launch.channel import connect

SETTINGS = {
    "workload.data": "digits",
    "workload.batch_size": 64,
    "optimizer.learning_rate": 0.003,
    "train.epochs": 2,
    "local.strategy": "threads",
    "local.threads": 1,
    "exchange.kind": "parameter_server",
}
MARK = b"PACELIN1" + bytes(32)
"""How a greeting begins."""
OLD_HELLO = '{"kind":"hello","node":1,"token":"é"}\n'.encode()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Where a process listens."""
    with contextlib.suppress(psutil.Error):
        return {
            (found.laddr.ip, found.laddr.port)
            for found in process.net_connections()
            if found.status == psutil.CONN_LISTEN
        }
    return set()


def greets(place: tuple[str, int]) -> bool:
    """Whether Paceline listens there itself, and not Gloo."""
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=10) as caller:
        caller.sendall(MARK)
        return caller.recv(8) == MARK[:8]
    return False


def strike(place: tuple[str, int], crowd: list[socket.socket]) -> None:
    """What ended runs before: odd tokens, deep JSON, endless lines, a crowd that says nothing."""
    for data in (OLD_HELLO, b"[" * 300_000 + b"\n", b"x" * 300_000):
        stranger = socket.create_connection(place, timeout=300)
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
    for _ in range(150):
        with contextlib.suppress(OSError):
            crowd.append(socket.create_connection(place, timeout=5))


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.timeout(900)
def test_a_training_among_strangers_ends_well(
    start_cli: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    pace, run = tmp_path / "pace", tmp_path / "run"
    pace.write_text("1.5")
    settings = SETTINGS | {"workload.model": put_into(tmp_path)}
    words = [word for pair in settings.items() for word in ("--set", f"{pair[0]}={pair[1]}")]
    line = ["train", "--hosts", "localhost:2", "--engine", "ssh", "--run", str(run), *words]
    process = start_cli(*line)
    wait_for((tmp_path / "asleep").exists, process)
    launcher = psutil.Process(process.pid)
    family = [launcher, *launcher.children(recursive=True)]
    places = {place for member in family for place in listening(member)}
    assert {address for address, _ in places} == {"127.0.0.1"}  # all hosts are this machine
    [control] = listening(launcher)
    [store] = [place for place in sorted(places - {control}) if greets(place)]
    # Nobody else can read the secret: neither in files, nor on command lines.
    note = json.loads((run / "join.json").read_text())
    assert stat.S_IMODE((run / "join.json").stat().st_mode) == 0o600
    others = [path for path in run.rglob("*") if path.is_file() and path.name != "join.json"]
    assert not [path for path in others if note["secret"].encode() in path.read_bytes()]
    assert not [member for member in family if note["secret"] in " ".join(member.cmdline())]
    crowd: list[socket.socket] = []
    try:
        for place in (control, store):
            strike(place, crowd)
            with pytest.raises(dist.DistError):  # as a value was overwritten before
                TCPStore(*place, timeout=datetime.timedelta(seconds=1))
        with pytest.raises(RuntimeError, match="does not know this run's secret"):
            SecureStore(*store, "a stranger's secret", seconds=60.0)  # as a worker would come
        with pytest.raises(ConnectionError, match="does not know this run's secret"):
            connect([control], "a stranger's secret")
        evil = {"name": "127.0.0.1", "python": str(tmp_path / "evil")}
        with pytest.raises(WorkerError, match="unknown key 'python'"):
            _ask([control], note["secret"], evil)
        pace.unlink()
        output, errors = process.communicate(timeout=600)
    finally:
        for connection in crowd:
            connection.close()
    assert process.returncode == 0, output + errors
    assert "join" not in output + errors
    assert "lost" not in output + errors
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert [found["epoch"] for found in lines] == [1, 2]
    assert not (run / "join.json").exists()


def _ask(places: list[tuple[str, int]], secret: str, host: dict[str, str]) -> None:
    """`paceline join`, by one who knows the secret but says more than a joiner may."""
    channel = connect(places, secret)
    try:
        channel.send("join", host=host)
        while True:
            channel.wait(1.0)
            messages, is_open = channel.receive()
            for message in messages:
                raise WorkerError(message["text"])
            assert is_open
    finally:
        channel.close()
