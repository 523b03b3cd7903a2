"""Agents, the control channel and engines, with a stand-in for training.

Hosts are this machine several times; what crosses real links is in test_hosts_in_the_lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import LostError, WorkerError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from launcher import PYTHONPATH, run_standins  # noqa: E402


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def order(run: Path, **orders: object) -> None:
    (run / "standin.json").write_text(json.dumps({"updates": 5, "pause": 0.02} | orders))


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("ssh", "gloo"),
        ("torchrun", "gloo"),
        ("torchrun:c10d", "gloo"),
        pytest.param("mpi", "mpi4py", marks=pytest.mark.mpi),
    ],
)
@pytest.mark.world_size(2)
def test_every_engine_starts_a_node_per_slot(run: Path, engine: str, backend: str) -> None:
    order(run)
    lines: list[str] = []
    assert run_standins(run, "localhost:2", engine, lines) == 0
    for node in (0, 1):
        assert f"[localhost rank {node}] node {node} of 2, rank {node}, {backend}" in lines
        assert f"[localhost rank {node}] to standard error" in lines
    assert not (run / ".launch").exists()


@pytest.mark.world_size(4)
def test_four_nodes(run: Path) -> None:
    order(run)
    lines: list[str] = []
    assert run_standins(run, "localhost:4", "ssh", lines) == 0
    assert sum("of 4" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "rank 1 on host localhost failed with ValueError: the sample of doom"),
        ("exit", "rank 1 on host localhost exited with code 7 in update 3"),
        (
            "kill",
            "rank 1 on host localhost was killed by SIGKILL (often: out of memory) in update 3",
        ),
    ],
)
@pytest.mark.world_size(2)
def test_a_failing_node_ends_all(run: Path, fault: str, words: str) -> None:
    order(run, updates=100_000, fault={"1": fault})
    with pytest.raises(WorkerError) as caught:
        run_standins(run, "localhost:2", "ssh", [])
    assert words in str(caught.value)


def start(run: Path, engine: str = "ssh") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "launcher.py"), str(run), "localhost:2", engine],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def started(run: Path, engine: str = "ssh") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher whose nodes are at work, and the processes of the nodes."""
    order(run, updates=100_000)
    process = start(run, engine)
    try:
        files = [run / "alive-0", run / "alive-1"]
        wait(lambda: all(f.exists() and f.read_text() for f in files) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process, [int(file.read_text()) for file in files]
    finally:
        process.kill()
        process.communicate(timeout=600)


def wait(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.world_size(2)
def test_ctrl_c_stops_in_order(run: Path) -> None:
    with started(run) as (process, _):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert (run / "stop").exists()  # the first node was asked, and told the other
    assert "Traceback" not in output + errors


@pytest.mark.world_size(2)
@pytest.mark.parametrize("engine", ["ssh", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_killed_launcher_leaves_nothing(run: Path, engine: str) -> None:
    with started(run, engine) as (process, nodes):
        process.kill()
        wait(lambda: not any(is_alive(pid) for pid in nodes), 20)


def test_nodes_of_a_killed_launcher_are_waited_for(run: Path) -> None:
    """They may still save, and remove its mark when they have."""
    order(run)
    mark, said = run / ".launch", []

    def say(text: str) -> None:
        said.append(text)
        mark.unlink()

    mark.write_text("of the launcher before")
    assert run_standins(run, "localhost", "ssh", [], say) == 0
    assert [text.partition(":")[0] for text in said] == ["the launcher of this run was killed"]


@pytest.mark.world_size(2)
def test_a_killed_agent_is_a_lost_host(run: Path) -> None:
    with started(run) as (process, nodes):
        agent = int(Path(f"/proc/{nodes[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "host localhost (rank 1) has gone: its connection was closed in " in errors
        wait(lambda: not any(is_alive(pid) for pid in nodes), 20)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_stopped_agent_is_a_lost_host(run: Path) -> None:
    with started(run) as (process, nodes):
        agent = int(Path(f"/proc/{nodes[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGSTOP)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "host localhost (rank 1) has not been heard of for" in errors
        wait(lambda: not any(is_alive(pid) for pid in nodes), 20)


def test_a_host_that_cannot_be_reached_is_named(run: Path) -> None:
    order(run)
    with pytest.raises(WorkerError, match=r"host no-such-host did not start: ssh ended"):
        run_standins(run, "no-such-host.invalid".partition(".")[0], "ssh", [])


@pytest.mark.world_size(2)
def test_a_rank_that_hangs_prints_where_it_stands(run: Path) -> None:
    order(run, fault={"0": "late", "1": "hang"})
    lines: list[str] = []
    with pytest.raises(LostError, match="rank 1 did not arrive within 60 s"):
        run_standins(run, "localhost:2", "ssh", lines)
    assert any("[localhost rank 1]" in line and "in hanging_here" in line for line in lines), lines
    assert not any("[localhost rank 0]" in line and "File" in line for line in lines)
