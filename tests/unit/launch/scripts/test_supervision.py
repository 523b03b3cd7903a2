"""The ranks of one machine under a supervisor in this process: who will not end, and what stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.launch.scripts import family, supervision
from paceline.launch.scripts.screen import Memory
from paceline.launch.scripts.supervision import Supervisor
from paceline.run import RunDirectory
from paceline.schema import RankContext
from paceline.schema.script import Script

pytestmark = pytest.mark.timeout(900)


class Heard(Memory):
    """Does something when a rank prints `ready`."""

    def __init__(self, react: Callable[[int], None]) -> None:
        super().__init__()
        self._react = react

    def pass_on(self, rank: int, text: str, is_error: bool) -> None:
        if text == "ready":
            self._react(rank)


class Site:
    """A script of some lines, and a supervisor for it."""

    def __init__(self, folder: Path, text: str, ranks: int = 1) -> None:
        (folder / "script.py").write_text(text)
        (folder / "run").mkdir()
        self.run = RunDirectory(folder / "run")
        self.said: list[str] = []
        self.react: Callable[[int], None] = lambda rank: None
        self.supervisor = Supervisor(
            Script(target=str(folder / "script.py"), folder=str(folder)),
            self.run,
            RankContext(world_size=ranks, local_size=ranks, port=1),
            memory=Heard(lambda rank: self.react(rank)),
            say=self.said.append,
        )

    def log(self, rank: int = 0) -> str:
        return (self.run.rank(rank) / "output.log").read_text()


STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
def where_it_hangs():
    print("ready", flush=True)
    time.sleep(1000)
where_it_hangs()
"""


def test_who_does_not_stop_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "STOP_SECONDS", 0.2)
    site = Site(tmp_path, STUBBORN)
    site.react = lambda rank: site.supervisor.note_signal(signal.SIGINT)
    outcome = site.supervisor.watch()
    assert outcome.signalled == signal.SIGINT
    assert outcome.failed == ()
    assert [end.code for end in outcome.exits] == [-signal.SIGABRT]
    assert "in where_it_hangs" in site.log()
    assert site.said[0].startswith("stopping: ")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, STUBBORN)

    def twice(rank: int) -> None:
        site.supervisor.note_signal(signal.SIGINT)
        site.supervisor.note_signal(signal.SIGINT)

    site.react = twice
    assert [end.code for end in site.supervisor.watch().exits] == [-signal.SIGKILL]


def test_a_rank_that_ignores_sigterm_is_ended_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "TERM_SECONDS", 0.2)
    fails = "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(4)\n"
    site = Site(tmp_path, fails + STUBBORN, ranks=2)
    outcome = site.supervisor.watch()
    assert [(end.rank, end.code) for end in outcome.failed] == [(1, 4)]
    assert {end.rank: end.ended_by_us for end in outcome.exits} == {0: True, 1: False}


def test_what_a_script_leaves_running_on_purpose_is_named_and_stays(tmp_path: Path) -> None:
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)\n"
    site = Site(tmp_path, text)
    outcome = site.supervisor.watch()
    assert outcome.exits[0].code == 0
    left = int(site.log())
    try:
        assert site.said == [f"rank 0 has left process {left} running"]
        assert family.state_of(left) in ("S", "R", "D")
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    site = Site(tmp_path, "")
    site.supervisor.script = Script(target="x.py", folder=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"rank 0 cannot be started in .*gone: No such file"):
        site.supervisor.watch()
