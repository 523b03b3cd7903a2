"""The recorder: what it is told is in the file, whatever the disk does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from paceline.observe.recorder import FileRecorder, Recorder, make_recorder
from paceline.schema import RankContext
from paceline.schema.events import RankSession, Sample, Start, read_lines, read_sessions


def make_start(**changes: object) -> Start:
    fields = {"rank": 0, "node": 0, "host": "a", "pid": 1, "time": 0.0, "began": time.time()}
    return Start(**(fields | changes))  # type: ignore[arg-type]


def only_session(folder: Path) -> RankSession:
    (session,) = read_sessions(folder / "events.jsonl")
    return session


def test_everything_that_was_told_is_read_back(tmp_path: Path) -> None:
    before = time.time()
    with FileRecorder(tmp_path / "rank-0", make_start(began=before - 5.0)) as recorder:
        recorder.ready()
        with recorder.span("compute", update=0):
            inside = recorder.now()
        recorder.update = 7
        with recorder.span("optimizer", detail='a "quoted" one'):
            pass
        moment = time.perf_counter()
        recorder.add("exchange", moment, 0.25, bytes_sent=100, messages=2, hidden_seconds=0.125)
        recorder.waited("gradients", moment, 0.5, [2, 3])
        recorder.waited("gradients", moment, 0.000001, [2])
        recorder.note("shares", "3 to 1", ranks=[1])
        recorder.clock(0.5, 0.001)
    session = only_session(tmp_path / "rank-0")
    start_up, compute, optimizer, exchange, wait = session.spans
    assert start_up.name == "start_up"
    assert start_up.start == pytest.approx(before - 5.0, abs=1e-4)
    assert compute.update == 0
    moments = [start_up.end, compute.start, inside, compute.end, optimizer.start]
    # Sorted but for what writing them down rounds away.
    assert moments == pytest.approx(sorted(moments), abs=1e-4)
    assert (optimizer.update, optimizer.detail) == (7, 'a "quoted" one')
    assert (exchange.bytes_sent, exchange.messages, exchange.hidden_seconds) == (100, 2, 0.125)
    assert (wait.waited_for, wait.detail, wait.update) == ((2, 3), "gradients", 7)
    assert (session.notes[0].ranks, session.notes[0].update) == ((1,), 7)
    assert session.clocks[0].offset == 0.5
    assert session.end is not None
    assert session.ended >= compute.end


def test_a_span_that_raises_is_recorded(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path, make_start())
    with recorder, pytest.raises(ZeroDivisionError), recorder.span("compute"):
        1 / 0  # noqa: B018
    assert [span.name for span in only_session(tmp_path).spans] == ["compute"]


def test_spans_of_many_threads_all_arrive(tmp_path: Path) -> None:
    with FileRecorder(tmp_path, make_start()) as recorder:

        def work(number: int) -> None:
            for update in range(2000):
                recorder.add("compute", 0.0, 0.0, update=number * 2000 + update)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    updates = {span.update for span in only_session(tmp_path).spans}
    assert updates == set(range(8000))


def test_a_continued_run_starts_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with FileRecorder(tmp_path, make_start()) as recorder:
        recorder.add("read", 0.0, 0.0)
    os.truncate(path, path.stat().st_size - 5)  # as a kill in the middle of a line
    with FileRecorder(tmp_path, make_start()) as recorder:
        recorder.add("compute", 0.0, 0.0)
    killed, continued = read_sessions(path)
    assert killed.end is None
    assert continued.end is not None
    assert [span.name for span in killed.spans + continued.spans] == ["read", "compute"]


def test_what_is_recorded_is_in_the_file_before_the_end(tmp_path: Path) -> None:
    with FileRecorder(tmp_path, make_start()) as recorder:
        recorder.add("read", 0.0, 0.0)
        path = tmp_path / "events.jsonl"
        deadline = time.monotonic() + 300
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (session,) = read_sessions(path)
        assert session.spans
        assert session.end is None


def test_a_full_disk_is_said_once_and_recording_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """/dev/full takes no byte: a real ENOSPC."""
    said: list[str] = []
    folder = tmp_path / "rank-0"
    folder.mkdir()
    (folder / "events.jsonl").symlink_to("/dev/full")
    recorder = FileRecorder(folder, make_start(), say=said.append)
    try:
        for round_number in range(2):
            recorder.add("read", 0.0, 0.0)
            while not said or recorder._pending:
                time.sleep(0.02)
            assert len(said) == 1, round_number
        assert "No space left" in said[0]
        assert str(folder) in said[0]
        (folder / "events.jsonl").unlink()
        recorder.add("compute", 0.0, 0.0)
    finally:
        recorder.close()
    events = list(read_lines(folder / "events.jsonl"))
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Start", "Note", "Span", "End"]
    assert "2 events are missing" in events[1].text  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("in the way")
    with FileRecorder(tmp_path / "file" / "rank-0", make_start(), say=said.append) as recorder:
        recorder.add("read", 0.0, 0.0)
    assert len(said) == 1


def test_samples_are_taken_and_a_failing_sampler_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    with make_recorder(tmp_path / "good", RankContext(rank=3, world_size=4), samples_every=0.01):
        pass

    def broken(now: float) -> Sample:
        raise OSError("no /proc today")

    FileRecorder(tmp_path / "bad", make_start(), sampler=broken, say=said.append).close()
    session = only_session(tmp_path / "good")
    assert (session.start.rank, session.start.world_size) == (3, 4)
    assert session.samples[0].resident > 1_000_000
    assert said == ["warning: resources cannot be sampled: no /proc today"]


def test_the_null_recorder_takes_everything_and_writes_nothing(tmp_path: Path) -> None:
    recorder: Recorder = make_recorder(tmp_path, RankContext(), events=False)
    assert type(recorder) is Recorder
    assert not recorder.enabled
    with recorder:
        with recorder.span("compute", update=1):
            pass
        recorder.add("read", 0.0, 1.0)
        recorder.waited("x", 0.0, 1.0, [1])
        recorder.note("stall", "text")
        recorder.clock(1.0, 1.0)
        recorder.ready()
    assert not list(tmp_path.iterdir())
