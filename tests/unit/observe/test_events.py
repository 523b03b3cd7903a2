"""events.jsonl: what is written can be read, and what is broken is passed over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schema.events import (
    SPAN_NAMES,
    Clock,
    End,
    Event,
    Exchanged,
    InterfaceTraffic,
    Note,
    RankSession,
    Sample,
    Span,
    Start,
    decode_line,
    encode_line,
    newest_sessions,
    read_run,
    read_sessions,
)

START = Start(rank=1, node=0, host="b", pid=7, time=100.0, began=98.0, world_size=2)
EVENTS: list[Event] = [
    START,
    Clock(time=101.0, offset=0.5, uncertainty=0.001),
    Span(name="compute", start=101.0, seconds=0.5, update=0),
    Span(
        name="exchange",
        start=101.5,
        seconds=0.25,
        update=0,
        hidden_seconds=0.1,
        bytes_sent=10,
        bytes_received=11,
        messages=2,
        detail='a "name"',
    ),
    Span(name="wait", start=102.0, seconds=0.0, waited_for=(0, 3)),
    Sample(
        time=102.5,
        cpu=1.5,
        busy=0.75,
        idle=0.2,
        iowait=0.05,
        resident=123456,
        threads=9,
        network={
            "lo": InterfaceTraffic(
                bytes_sent=1, bytes_received=2, packets_sent=3, packets_received=4
            )
        },
        disk_read=5,
        disk_written=6,
    ),
    Exchanged(
        time=102.75,
        update=0,
        bytes_sent=10,
        bytes_received=11,
        messages_sent=2,
        messages_received=3,
        seconds=0.25,
        waited_seconds=0.125,
    ),
    Note(time=103.0, what="stall", text="rank 0 is late\nvery", ranks=(0,), update=4),
    End(time=104.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = encode_line(event)
    assert line.count("\n") == 1
    assert decode_line(line) == event


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    name=st.sampled_from(SPAN_NAMES),
    start=finite,
    seconds=st.floats(min_value=0, max_value=1e9),
    update=st.none() | st.integers(min_value=0, max_value=2**62),
    late=st.lists(st.integers(min_value=0, max_value=99)),
    detail=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
)
def test_any_span_comes_back_as_it_was(
    name: str, start: float, seconds: float, update: int | None, late: list[int], detail: str
) -> None:
    span = Span(
        name=name,  # type: ignore[arg-type]
        start=start,
        seconds=seconds,
        update=update,
        waited_for=tuple(late),
        detail=detail,
    )
    assert decode_line(encode_line(span)) == span


@given(
    name=st.sampled_from(SPAN_NAMES),
    start=st.floats(min_value=0, max_value=1e12),
    seconds=st.floats(min_value=0, max_value=1e6),
    update=st.integers(min_value=0, max_value=2**62),
    more=st.sampled_from(["", ', "waited_for": [1]', ', "waited_for": [0], "detail": "weights"'])
    | st.text("abc ", min_size=1).map(', "detail": "{}"'.format),
)
def test_a_plain_span_is_read_at_a_glance_as_any_other(
    name: str, start: float, seconds: float, update: int, more: str
) -> None:
    line = (
        f'{{"event": "span", "name": "{name}", "start": {start:.6f},'
        f' "seconds": {seconds:.7f}, "update": {update}{more}}}'
    )
    # With another blank it is no longer what is known at a glance.
    slowly = decode_line(line.replace("{", "{ "))
    assert slowly is not None
    assert decode_line(line) == slowly


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"event": "span", "name": "compute", "start": 1.0, "sec',
        '{"event": "span", "name": "compute", "start": 1.0}',
        '{"event": "span", "name": "dance", "start": 1.0, "seconds": 1.0}',
        '{"event": "span", "name": "compute", "start": "1", "seconds": 1.0}',
        '{"event": "span", "name": "compute", "start": 1.0, "seconds": -1.0}',
        '{"event": "span", "name": "compute", "start": NaN, "seconds": 1.0}',
        '{"event": "of a later version", "time": 1.0}',
        '{"event": ["span"], "time": 1.0}',
        "\x00\x00\x00",
    ],
)
def test_a_line_that_makes_no_sense_is_no_event(line: str) -> None:
    assert decode_line(line) is None


def test_keys_of_a_later_version_are_passed_over() -> None:
    line = '{"event": "end", "time": 1.5, "mood": "good"}'
    assert decode_line(line) == End(time=1.5)


def test_the_half_line_of_a_killed_run_is_passed_over_and_the_next_session_read(
    tmp_path: Path,
) -> None:
    first = "".join(encode_line(event) for event in EVENTS[:-1])
    second = "".join(encode_line(event) for event in EVENTS)
    path = tmp_path / "events.jsonl"
    path.write_bytes(first.encode() + b'{"event": "span", "na\xff\n' + second.encode())
    killed, whole = read_sessions(path)
    assert killed.end is None
    assert killed.ended == 103.0
    assert whole.ended == 104.0
    assert killed.spans == whole.spans
    assert len(killed.spans) == 3
    assert whole.seconds == 6.0


def test_reading_every_cut_of_a_file_gives_a_beginning_of_it(tmp_path: Path) -> None:
    text = "".join(encode_line(event) for event in EVENTS).encode()
    path = tmp_path / "events.jsonl"
    path.write_bytes(text)
    (whole,) = read_sessions(path)
    for size in range(0, len(text), 7):
        path.write_bytes(text[:size])
        for session in read_sessions(path):
            assert session.start == START
            assert session.spans == whole.spans[: len(session.spans)]


def test_runs_are_read_rank_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        start = Start(rank=rank, node=0, host="a", pid=1, time=1.0, began=1.0)
        (folder / "events.jsonl").write_text(encode_line(start) * 2)
    (tmp_path / "rank-3").mkdir()
    (tmp_path / "rank-x").mkdir()
    assert list(read_run(tmp_path)) == [2, 10]
    assert [len(past) for past in read_run(tmp_path).values()] == [2, 2]
    assert [session.rank for session in newest_sessions(tmp_path)] == [2, 10]


def test_the_offset_is_a_straight_line_between_measurements() -> None:
    session = RankSession(
        start=START,
        clocks=(
            Clock(time=110.0, offset=1.0, uncertainty=0.0),
            Clock(time=120.0, offset=2.0, uncertainty=0.0),
        ),
    )
    assert [session.offset(t) for t in (0.0, 110.0, 115.0, 120.0, 999.0)] == [1, 1, 1.5, 2, 2]
    assert session.common(115.0) == 113.5


def test_an_offset_measured_at_the_start_holds_until_the_next_one() -> None:
    start = Start(
        rank=1, node=1, host="b", pid=7, time=100.0, began=98.0, offset=4.0, uncertainty=0.001
    )
    assert RankSession(start=start).common(50.0) == 46.0
    later = RankSession(start=start, clocks=(Clock(time=200.0, offset=5.0, uncertainty=0.001),))
    assert math.isclose(later.offset(150.0), 4.5)
