"""What ranks print: whole lines, bars that are written over, tracebacks and whose came first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.launch.scripts import screen as screens
from paceline.launch.scripts.output import LONGEST_LINE, PROGRESS_SECONDS, Lines, RankOutput
from paceline.launch.scripts.screen import Screen
from paceline.schema.script import RankExit

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


class Shown(Screen):
    """A screen that remembers what it shows."""

    def __init__(self, hosts: dict[int, str] | None = None) -> None:
        self.lines: list[str] = []
        super().__init__(lambda text, is_error: self.lines.append(text))
        self.hosts = dict(hosts or {})

    def hear_all(self, rank: int, *lines: str) -> None:
        for line in lines:
            self.hear(rank, line, True)


def test_bytes_become_whole_lines() -> None:
    lines = Lines()
    assert lines.feed(b"a\nhal") == ["a"]
    assert lines.feed(b"f\n\nx") == ["half", ""]
    assert lines.close() == ["x"]
    assert lines.close() == []
    assert lines.feed("é\n".encode()) == ["é"]
    assert lines.feed(b"\xff\n") == ["\ufffd"]
    assert lines.feed(b"y" * (LONGEST_LINE + 1)) == ["y" * (LONGEST_LINE + 1)]


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    lines = Lines()
    now = time.monotonic()
    assert lines.feed(b"\r 1%|#") == []
    assert lines.look(now) == []
    assert lines.feed(b"\r 2%|##") == []
    assert lines.look(now + 2 * PROGRESS_SECONDS) == [" 2%|##"]
    assert lines.look(now + 2 * PROGRESS_SECONDS + 1) == []
    assert lines.feed(b"\r100%|###\n") == ["100%|###"]
    # A line that is only half written is none.
    assert lines.feed(b"loss = 0.") == []
    assert lines.look(now + 9 * PROGRESS_SECONDS) == []


def test_the_log_has_every_byte(tmp_path: Path) -> None:
    heard: list[tuple[str, bool]] = []
    output = RankOutput(tmp_path / "rank-0", lambda text, is_error: heard.append((text, is_error)))
    output.take(b"one\n\r 5%", is_error=False)
    output.take(b"\r10%\n", is_error=False)
    output.take(b"oops", is_error=True)
    output.close()
    assert (tmp_path / "rank-0" / "output.log").read_bytes() == b"one\n\r 5%\r10%\noops"
    assert heard == [("one", False), ("10%", False), ("oops", True)]


def test_nothing_that_a_rank_prints_steers_the_terminal() -> None:
    shown = Shown({0: "a"})
    shown.hear(0, "\x1b[2Jgone", False)
    assert shown.lines == ["[a rank 0] \\x1b[2Jgone"]


def test_a_traceback_that_a_rank_survives_is_shown_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Shown()
    shown.hear_all(1, "Traceback (most recent call last):", "ValueError: tried again")
    shown.hear(0, "goes on", False)
    shown.look()
    assert shown.lines == ["[rank 0] goes on"]
    monkeypatch.setattr(screens, "HELD_SECONDS", -1.0)
    shown.look()
    assert shown.lines[1:] == [
        "[rank 1] Traceback (most recent call last):",
        "[rank 1] ValueError: tried again",
    ]
    # Killed later, it is not that traceback that it died of.
    shown.hear(1, "epoch 7", False)
    shown.note_end(RankExit(rank=1, code=-9))
    assert shown.last_lines(1)[-1] == "epoch 7"


def test_a_rank_that_prints_on_has_survived_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    shown.hear_all(0, "Traceback (most recent call last):", "OSError: again")
    shown.hear(0, "printed before, read after", False)
    monkeypatch.setattr(screens, "SILENT_SECONDS", -1.0)
    shown.hear(0, "next", False)
    assert shown.lines == [
        "[rank 0] printed before, read after",
        "[rank 0] Traceback (most recent call last):",
        "[rank 0] OSError: again",
        "[rank 0] next",
    ]


def test_a_rank_that_ends_well_has_only_printed_its_traceback() -> None:
    shown = Shown()
    shown.hear_all(0, "Traceback (most recent call last):", "KeyError: caught")
    shown.note_end(RankExit(rank=0))
    assert shown.lines == [
        "[rank 0] Traceback (most recent call last):",
        "[rank 0] KeyError: caught",
    ]


def test_the_cause_is_found_behind_its_consequence() -> None:
    """Rank 0 hears of the end of rank 1 and dies of it before rank 1 has said why it ends."""
    shown = Shown()
    shown.hear_all(0, "[rank0]: Traceback (most recent call last):", f"[rank0]: {CLOSED}")
    shown.hear_all(1, "[rank1]: Traceback (most recent call last):", "[rank1]: ValueError: bad")
    ends = [RankExit(rank=0, code=1, seconds=2.0), RankExit(rank=1, code=3, seconds=2.1)]
    for end in ends:
        shown.note_end(end)
    first = shown.first(ends)
    assert (first.rank, first.exit_code) == (1, 3)
    assert shown.report(first, ends) == [
        "rank 1 failed first: it exited with code 3 after 2.1 s; its last lines:\n"
        "    [rank1]: Traceback (most recent call last):\n    [rank1]: ValueError: bad",
        "then rank 0 exited with code 1",
    ]
    assert shown.lines == []


def test_who_was_killed_without_a_word_is_the_cause() -> None:
    shown = Shown({0: "a", 1: "b", 2: "b"})
    shown.hear_all(0, "Traceback (most recent call last):", CLOSED)
    ends = [
        RankExit(rank=0, code=1, seconds=1.0),
        RankExit(rank=1, code=-9, seconds=1.0),
        RankExit(rank=2, code=-15, seconds=1.1, ended_by_us=True),
    ]
    for end in ends:
        shown.note_end(end)
    first = shown.first(ends[:2])
    assert first.exit_code == 137
    assert shown.report(first, ends) == [
        "b rank 1 failed first: it was killed by SIGKILL (often: out of memory) after 1.0 s,"
        " without a word",
        "then a rank 0 exited with code 1; 1 more had to be ended",
    ]


def test_after_a_failure_the_others_are_in_their_logs_only() -> None:
    shown = Shown()
    shown.note_end(RankExit(rank=1, code=1))
    shown.hear(0, "the avalanche", False)
    assert shown.lines == []


def test_of_many_failures_few_are_named() -> None:
    shown = Shown()
    ends = [RankExit(rank=rank, code=1) for rank in range(10)]
    assert shown.report(ends[0], ends)[-1] == (
        "then rank 1 exited with code 1; rank 2 exited with code 1; rank 3 exited with code 1;"
        " rank 4 exited with code 1; 5 more failed"
    )
