"""Which of several reports is the cause of an end."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config.environment import REPORT_ROOM, take_report
from paceline.errors import StorageError
from paceline.launch.agent import Agent
from paceline.launch.control import Lost
from paceline.launch.failing import Failing
from paceline.launch.failures import may_pass, order
from paceline.launch.rank import write_failure
from paceline.local.board import own_board
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.schema.hosts import Host, NodePlace
from paceline.text import how_it_ended


def report(message: str, kind: str = "LostError", **more: bool) -> dict[str, Any]:
    told = {"rank": 2, "kind": kind, "message": message, "expected": True, **more}
    return {"kind": "error", "report": told}


OWN = report("the loss became NaN", "DivergedError")
KILLED = report(f"{how_it_ended(-9)} in update 12", wordless=True)
SILENT = Lost(2, 10.0)
CLOSED = Lost(0, None)
ABORTED = report(f"{how_it_ended(-6)} in update 12", wordless=True)
EXITED = report(f"{how_it_ended(14)} in update 12", wordless=True)
LATE = report("no answer within 60 s", "DeadlineError")
HEARSAY = report("lost another host in the sum of gradients", "WorkerError")
STORELESS = report("this node cannot answer: the connection to the store was lost", "WorkerError")
SERVED = report("worker 0 on a was lost at update 15, and it writes the checkpoints", "WorkerError")
TOLD = report("was told to end (SIGTERM to its agent)", wordless=True, told=True)


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        # MPI ends every agent when one rank is killed: the first connection to close is no cause.
        (KILLED, [CLOSED, TOLD, ABORTED]),
        # An agent was killed with its rank; MPI tells the others to end.
        (CLOSED, [TOLD, TOLD, EXITED]),
        (SILENT, [TOLD, HEARSAY, LATE]),
        (OWN, [KILLED, CLOSED, LATE]),
        (EXITED, [HEARSAY, TOLD]),
        # The first node is lost: whoever talks with it next only hears that.
        (CLOSED, [STORELESS, SERVED]),
        # A machine that is taken away tells its agent alone.
        (TOLD, []),
    ],
)
def test_the_cause_comes_first(cause: Any, others: list[Any]) -> None:
    assert min([*others, cause], key=order) is cause


@pytest.mark.parametrize("failure", [KILLED, SILENT, CLOSED, ABORTED, EXITED, LATE, HEARSAY, TOLD])
def test_what_a_rank_does_not_say_of_itself_may_pass(failure: Any) -> None:
    assert may_pass(failure)
    assert not may_pass(OWN)


def test_word_of_a_failure_needs_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that leaves none is taken for lost, and its training is started again."""
    place = tmp_path / "run"  # a file where a folder should be: nothing can be written below it
    place.write_text("")
    memory = os.memfd_create("report")
    agent = Agent(cast("Any", None), 0)
    try:
        monkeypatch.setenv(REPORT_ROOM, str(memory))
        assert take_report() == memory
        assert take_report() is None  # its own children do not write there
        agent.run, agent.report = RunDirectory(place), memory
        assert agent.failure(1)["wordless"]
        error = StorageError("the checkpoint of update 20 could not be written")
        write_failure(place / "node-0", RankContext(), error, memory)
        report = agent.failure(1)
    finally:
        os.close(memory)
        agent.selector.close()
    assert report["message"] == str(error)
    assert not may_pass({"kind": "error", "report": report})


def test_where_a_rank_was_is_said_before_that_it_failed() -> None:
    """Heartbeats are half a second old: what is done again would be counted by them."""
    sent: list[tuple[str, dict[str, Any]]] = []

    class Heard:
        def send(self, kind: str, **fields: Any) -> None:
            sent.append((kind, fields))

    agent = Agent(cast("Any", Heard()), 0)
    agent.selector.close()
    agent.board = own_board(60.0)
    try:
        agent.board.enter("update", 13)
        agent.tell_failure(-9)
    finally:
        agent.board.close()
    assert [kind for kind, _ in sent] == ["beat", "error"]
    assert sent[0][1]["ranks"][0]["update"] == 13
    assert "update 13" in sent[1][1]["report"]["message"]


class Hosts:
    """Connections of which those that are named are silent."""

    def __init__(self, *silent: int) -> None:
        self.connected, self._silent = {0, 1, 2}, silent
        self.peers = {node: SimpleNamespace(place=f"update {node}") for node in range(3)}

    def quiet(self, node: int) -> bool:
        return node in self._silent


def said_of(silent: tuple[int, ...], *lost: Lost) -> list[str]:
    """What is said of nodes that are lost and that the others can do without."""
    said: list[str] = []
    failing = Failing()
    failing.places = tuple(
        NodePlace(node=node, host=Host(name=name, address=address))
        for node, (name, address) in enumerate(
            [("a", "127.0.0.1"), ("b", "192.0.2.2"), ("c", "192.0.2.3")]
        )
    )
    failing.control, failing.first_ranks = cast("Any", Hosts(*silent)), [0, 1, 2]
    failing.order = cast("Any", SimpleNamespace(say=said.append))
    for each in lost:
        failing.say_loss(each)
    return said


def test_hosts_that_are_lost_by_the_launchers_own_link_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.launch.failing.is_here", lambda address: address == "127.0.0.1")
    both = said_of((1, 2), Lost(1, 10.0), Lost(2, 10.0))
    assert len(both) == 1
    assert both[0].endswith("for 10 s: the link of this machine is down")
    alone = said_of((2,), Lost(2, 10.0))
    assert len(alone) == 1
    assert alone[0].startswith("host c (rank 2) has not been heard of for 10 s")
    assert alone[0].endswith("; the others go on")
