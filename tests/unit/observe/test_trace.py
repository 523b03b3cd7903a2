"""The trace follows the Chrome trace format, and shows the ranks side by side."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from paceline.commands.trace import command
from paceline.errors import RunDirectoryError
from paceline.observe.recorder import make_recorder
from paceline.observe.trace import make_trace, write_trace
from paceline.schema import RankContext
from paceline.schema.events import (
    SPAN_NAMES,
    Clock,
    End,
    Event,
    InterfaceTraffic,
    Note,
    RankSession,
    Sample,
    Span,
    Start,
    encode_line,
    newest_sessions,
    sessions,
)

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"},
    "M": {"name", "ph", "pid", "args"},
}
"""By phase, what the format asks for."""
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name"}


def check_format(trace: dict[str, Any]) -> None:
    """The rules of the Chrome trace format (JSON object format), as far as they are used."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in REQUIRED, event
        assert set(event) >= REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "M":
            assert event["name"] in METADATA
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    check_nesting(events)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one thread, complete events lie in each other or apart, and never cross."""
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append(event)
    for group in by_thread.values():
        ends: list[float] = []
        for event in group:
            start, end = event["ts"], event["ts"] + event["dur"]
            while ends and ends[-1] <= start + 0.002:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.002, event
            ends.append(end)


def network(count: int) -> dict[str, InterfaceTraffic]:
    return {
        "eth0": InterfaceTraffic(
            bytes_sent=count, bytes_received=2 * count, packets_sent=1, packets_received=1
        )
    }


def sample(time: float, count: int) -> Sample:
    return Sample(
        time=time,
        cpu=1.5,
        busy=0.5,
        idle=0.4,
        iowait=0.1,
        resident=250_000_000,
        threads=7,
        network=network(count),
        disk_read=count,
        disk_written=0,
    )


def rank_events(rank: int, host: str, shift: float) -> list[Event]:
    """The same second on every host, by its own clock."""
    at = 1_763_253_600.0 + shift
    return [
        Start(rank=rank, node=rank, host=host, pid=40 + rank, time=at, began=at, world_size=2),
        Clock(time=at, offset=shift, uncertainty=0.0001),
        Span(name="start_up", start=at, seconds=1.0),
        Span(name="backward", start=at + 1.0, seconds=0.5, update=0),
        Span(name="exchange", start=at + 1.2, seconds=0.5, update=0, bytes_sent=1000),
        Span(name="wait", start=at + 1.7, seconds=0.1, update=0, waited_for=(1 - rank,)),
        Note(time=at + 1.8, what="stall", text="something", ranks=(1,)),
        sample(at + 1.0, 1_000_000),
        sample(at + 2.0, 4_000_000),
        End(time=at + 2.0),
    ]


def two_ranks() -> list[RankSession]:
    return sessions(rank_events(0, "a", 0.0)) + sessions(rank_events(1, "b", 500.0))


def test_ranks_are_processes_with_names_on_one_clock() -> None:
    trace = make_trace(two_ranks())
    check_format(trace)
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (host a)", 1: "rank 1 (host b)"}
    backward = {e["pid"]: (e["ts"], e["dur"]) for e in events if e["name"] == "backward"}
    # Host b's clock is 500 s ahead, but the two happened at the same time.
    assert backward[0] == pytest.approx((1e6, 5e5))
    assert backward[1] == pytest.approx((1e6, 5e5))


def test_an_exchange_beside_the_backward_pass_has_a_line_of_its_own() -> None:
    events = make_trace(two_ranks())["traceEvents"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    lines = {e["cat"]: threads[e["pid"], e["tid"]] for e in events if e["ph"] == "X"}
    assert lines["exchange"] == "exchange"
    assert lines["backward"] == lines["wait"] == "training"
    (wait,) = (e for e in events if e.get("cat") == "wait" and e["pid"] == 0)
    assert wait["args"] == {"update": 0, "waited_for": "rank 1"}


def test_resources_are_counters_and_traffic_is_a_rate() -> None:
    events = make_trace(two_ranks())["traceEvents"]
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C" and e["pid"] == 1}
    assert counters["CPU of the rank (cores)"] == {"cores": 1.5}
    assert counters["memory (MB)"] == {"resident": 250.0}
    assert counters["network eth0 (MB/s)"] == pytest.approx({"sent": 3.0, "received": 6.0})
    assert counters["disk (MB/s)"]["read"] == pytest.approx(3.0)
    assert [e["args"]["text"] for e in events if e["ph"] == "i"] == ["something"] * 2


@given(
    spans=st.lists(
        st.builds(
            Span,
            name=st.sampled_from(SPAN_NAMES),
            start=st.floats(0, 1e-4),
            seconds=st.floats(0, 1e-4),
        ),
        max_size=30,
    )
)
def test_any_spans_make_a_valid_trace_and_none_is_lost(spans: list[Span]) -> None:
    start = Start(rank=0, node=0, host="a", pid=1, time=0.0, began=0.0)
    trace = make_trace([RankSession(start=start, spans=tuple(spans))])
    check_format(trace)
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) == len(spans)


def test_no_session_makes_an_empty_trace() -> None:
    check_format(make_trace([]))


def write_run(folder: Path) -> None:
    for rank, host, shift in ((0, "a", 0.0), (1, "b", 500.0)):
        (folder / f"rank-{rank}").mkdir(parents=True)
        lines = "".join(encode_line(event) for event in rank_events(rank, host, shift))
        (folder / f"rank-{rank}" / "events.jsonl").write_text(lines * 2)


def test_the_command_writes_the_trace_of_the_last_session(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run)
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0, done.output
    assert "2 ranks, 8 spans, 2.0 s" in done.output
    trace = json.loads((run / "trace.json").read_text())
    check_format(trace)
    packed = tmp_path / "trace.json.gz"
    done = CliRunner().invoke(command, [str(run), "--output", str(packed), "--all-sessions"])
    assert "16 spans" in done.output
    check_format(json.loads(gzip.decompress(packed.read_bytes())))


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tmp_path)], "observe.events = false"),
        ([str(tmp_path / "nowhere")], "no run directory"),
    ):
        done = CliRunner().invoke(command, arguments)
        assert isinstance(done.exception, RunDirectoryError)
        assert words in str(done.exception)
    write_run(tmp_path / "run")
    full = CliRunner().invoke(
        command, [str(tmp_path / "run"), "--output", str(tmp_path / "no" / "folder.json")]
    )
    assert isinstance(full.exception, RunDirectoryError)
    assert "cannot be written" in str(full.exception)


def test_what_a_recorder_wrote_makes_a_valid_trace(tmp_path: Path) -> None:
    """Real spans within microseconds of each other, with the rounding of the file."""
    for rank in range(2):
        context = RankContext(rank=rank, world_size=2)
        with make_recorder(tmp_path / f"rank-{rank}", context) as recorder:
            recorder.ready()
            for update in range(200):
                recorder.update = update
                with recorder.span("compute"), recorder.span("forward"):
                    pass
                with recorder.span("optimizer"):
                    pass

    trace = make_trace(newest_sessions(tmp_path))
    check_format(trace)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 * (1 + 3 * 200)
    assert {e["tid"] for e in spans} == {0}
    path = tmp_path / "trace.json"
    write_trace(path, trace)
    assert json.loads(path.read_text()) == trace
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["trace.json"]
    starts = [e["ts"] for e in spans]
    assert all(left <= right for left, right in itertools.pairwise(starts))
