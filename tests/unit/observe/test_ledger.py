"""The ledger sums to 100% by construction, and names whom the others waited for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe.ledger import PRIORITY, Arrivals, book, ledger_of, make_ledger, pieces
from paceline.schema.events import (
    SPAN_NAMES,
    Clock,
    End,
    Event,
    Exchanged,
    RankSession,
    Span,
    Start,
    encode_line,
)
from paceline.schema.ledger import CATEGORIES, TITLES, ExchangeTotals, Ledger, RankLedger


def session(
    *spans: Span, rank: int = 0, host: str = "a", began: float = 0.0, ended: float = 100.0
) -> RankSession:
    start = Start(rank=rank, node=0, host=host, pid=1, time=began, began=began, world_size=2)
    return RankSession(start=start, spans=spans, end=End(time=ended))


def span(name: str, start: float, end: float, **fields: object) -> Span:
    return Span(name=name, start=start, seconds=end - start, **fields)  # type: ignore[arg-type]


def by_category(*spans: Span, **options: float) -> dict[str, float]:
    """What is booked, without the zeros."""
    found = book(session(*spans, **options))  # type: ignore[arg-type]
    return {name: seconds for name, seconds in found.items() if seconds}


def test_every_span_has_a_priority_and_every_category_a_title() -> None:
    assert set(PRIORITY) == set(SPAN_NAMES)
    assert set(TITLES) == set(CATEGORIES)


spans_anywhere = st.lists(
    st.builds(
        Span,
        name=st.sampled_from(SPAN_NAMES),
        start=st.floats(-20, 120),
        seconds=st.floats(0, 150),
        hidden_seconds=st.floats(0, 100),
        waited_for=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(spans=spans_anywhere)
def test_the_ledger_of_any_spans_sums_to_the_wall_time(spans: list[Span]) -> None:
    found = book(session(*spans))
    assert found.wall == 100.0
    assert sum(found.seconds.values()) == pytest.approx(100.0, abs=1e-9)
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-11)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert set(found.seconds) == set(CATEGORIES)
    assert sum(found.waited_for.values()) <= found.seconds["waiting"] + 1e-9


@given(spans=spans_anywhere)
def test_pieces_have_no_gap_and_no_overlap(spans: list[Span]) -> None:
    found = list(pieces(spans, 0.0, 100.0))
    assert found[0][1] == 0.0
    assert found[-1][2] == 100.0
    assert all(left[2] == right[1] for left, right in itertools.pairwise(found))
    assert all(start < end for _, start, end in found)


spans_on_a_grid = st.lists(
    st.builds(
        Span,
        name=st.sampled_from(SPAN_NAMES),
        start=st.integers(-5, 25).map(float),
        seconds=st.integers(0, 30).map(float),
        hidden_seconds=st.integers(0, 10).map(float),
    ),
    max_size=12,
)


@given(spans=spans_on_a_grid)
def test_every_second_is_booked_under_the_span_that_comes_first(spans: list[Span]) -> None:
    """Against a plain answer: second by second, the span of the highest priority."""

    def plain(second: int) -> str | None:
        here = [
            s.name
            for s in spans
            if s.start + (s.hidden_seconds if s.name == "exchange" else 0) <= second < s.end
        ]
        return min(here, key=PRIORITY.index, default=None)

    booked: list[str | None] = []
    for piece, start, end in pieces(spans, 0.0, 20.0):
        booked += [piece.name if piece else None] * round(end - start)
    assert booked == [plain(second) for second in range(20)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {"start_up": 100}),
        ([span("start_up", 0, 40)], {"start_up": 40, "other": 60}),
        ([span("compute", 30, 50)], {"start_up": 30, "compute": 20, "other": 50}),
        (
            [span("wait", 40, 45), span("compute", 0, 100)],
            {"waiting": 5, "compute": 95},
        ),
        (
            [span("backward", 0, 50), span("exchange", 20, 70), span("optimizer", 70, 100)],
            {"compute": 50, "communication": 20, "optimizer": 30},
        ),
        (
            [span("compute", 0, 60), span("exchange", 50, 100)],
            {"compute": 50, "communication": 50},
        ),
        (
            [span("compute", 0, 60), span("exchange", 40, 100, hidden_seconds=20.0)],
            {"compute": 60, "communication": 40},
        ),
        (
            [span("checkpoint", 0, 100), span("wait", 90, 100), span("read", 0, 10)],
            {"checkpoint": 80, "waiting": 10, "data": 10},
        ),
        (
            [span("evaluate", 0, 100), span("forward", 20, 70)],
            {"evaluation": 50, "compute": 50},
        ),
        ([span("wait", 0, 10), span("start_up", 0, 100)], {"start_up": 100}),
        ([span("compute", -50, 300)], {"compute": 100}),
    ],
)
def test_what_is_booked_where(spans: Sequence[Span], expected: dict[str, float]) -> None:
    assert by_category(*spans) == expected


def test_a_hidden_exchange_is_counted_beside_the_wall_time() -> None:
    found = book(session(span("backward", 0, 50), span("exchange", 20, 70)))
    assert found.hidden == 30
    assert found.seconds["communication"] == 20


def test_what_the_exchange_counted_is_added_up_over_updates_and_sessions() -> None:
    line = Exchanged(
        time=10.0,
        update=3,
        bytes_sent=100,
        bytes_received=90,
        messages_sent=4,
        messages_received=3,
        seconds=0.5,
        waited_seconds=0.125,
    )
    outside = Exchanged(time=20.0, bytes_sent=7, messages_sent=1, seconds=0.25, waited_seconds=0.5)
    one = replace(session(span("compute", 0, 100)), exchanged=(line, line, outside))
    (found,) = make_ledger({0: [one, one]}).ranks
    assert found.exchange == ExchangeTotals(
        updates=4,
        bytes_sent=400,
        bytes_received=360,
        messages_sent=16,
        messages_received=12,
        seconds=2.0,
        hidden=1.5,
        waited=0.5,
        outside=14,
    )
    assert found.hidden == 1.5


def test_a_wait_for_several_ranks_is_divided_among_them() -> None:
    found = book(session(span("wait", 0, 10, waited_for=(1, 2)), span("compute", 0, 100)))
    assert found.waited_for == {1: 5, 2: 5}


def four_ranks() -> dict[int, list[RankSession]]:
    """Rank 2 on host b is slow: the others wait 14 of 100 seconds for it."""
    found = {}
    for rank in range(4):
        waits = [] if rank == 2 else [span("wait", 50, 64, waited_for=(2,))]
        found[rank] = [
            session(span("compute", 0, 100), *waits, rank=rank, host="b" if rank in (2, 3) else "a")
        ]
    return found


def test_the_sentence_names_the_rank_that_made_the_others_wait() -> None:
    found = make_ledger(four_ranks())
    assert found.sentences() == ["Rank 2 on host b made the others wait 14% of the time."]
    assert found.slowest is not None
    assert found.slowest.rank == 2
    assert found.made_wait(2) == pytest.approx(0.14)
    assert found.made_wait(0) == 0


def test_nobody_is_named_where_nobody_waited() -> None:
    found = make_ledger({0: [session(span("compute", 0, 100))]})
    assert found.sentences() == []
    assert found.slowest is None
    assert found.coordination_to_computation == 0
    assert Ledger(ranks=()).slowest is None
    assert Ledger(ranks=()).coordination_to_computation is None


def test_the_ratio_of_coordination_to_computation() -> None:
    found = make_ledger(
        {
            0: [session(span("compute", 0, 60), span("optimizer", 60, 70), span("wait", 70, 90))],
            1: [session(span("compute", 0, 50), span("exchange", 50, 60), rank=1)],
        }
    )
    assert found.coordination_to_computation == pytest.approx((20 + 10) / (60 + 10 + 50))


def test_who_came_last_to_an_exchange_is_read_from_the_common_clock() -> None:
    """Host b's clock is 1000 s ahead. Rank 1 comes to the exchange 30 s after rank 0."""
    early = session(span("compute", 0, 20), span("exchange", 20, 60, update=0))
    start = Start(rank=1, node=1, host="b", pid=1, time=1000.0, began=1000.0)
    late = RankSession(
        start=start,
        spans=(span("compute", 1000, 1050), span("exchange", 1050, 1060, update=0)),
        clocks=(Clock(time=1000.0, offset=1000.0, uncertainty=0.001),),
        end=End(time=1100.0),
    )
    found = make_ledger({0: [early], 1: [late]})
    first, second = found.ranks
    assert first.seconds["waiting"] == 30
    assert first.seconds["communication"] == 10
    assert first.waited_for == {1: 30}
    assert second.seconds["waiting"] == 0
    assert second.seconds["communication"] == 10
    assert found.sentences() == ["Rank 1 on host b made the other wait 30% of the time."]


def test_leaders_of_nodes_exchange_for_the_ranks_of_their_node() -> None:
    ranks = {}
    for rank in range(4):
        start = Start(rank=rank, node=rank // 2, host="ab"[rank // 2], pid=1, time=0.0, began=0.0)
        came = 20 if rank == 0 else 50
        spans = (span("exchange", came, 60, update=0),) if rank % 2 == 0 else ()
        ranks[rank] = [RankSession(start=start, spans=spans, end=End(time=100.0))]
    found = make_ledger(ranks)
    assert found.ranks[0].waited_for == {2: 30}
    assert found.ranks[2].waited_for == {}
    assert found.slowest == found.ranks[2]


def test_an_exchange_that_not_all_took_part_in_is_left_as_it_is() -> None:
    ranks = {
        0: [session(span("exchange", 0, 10, update=0))],
        1: [session(span("exchange", 5, 10, update=1), rank=1)],
    }
    assert Arrivals(ranks).explain(ranks[0][0], 0) == [ranks[0][0].spans[0]]


@given(
    starts=st.lists(st.floats(0, 50), min_size=2, max_size=5),
    length=st.floats(0, 40),
)
def test_dividing_exchanges_changes_no_sum(starts: list[float], length: float) -> None:
    ranks = {
        rank: [session(span("exchange", start, 60 + length, update=0), rank=rank)]
        for rank, start in enumerate(starts)
    }
    found = make_ledger(ranks)
    last = max(starts)
    for rank, start in zip(found.ranks, starts, strict=True):
        assert sum(rank.seconds.values()) == pytest.approx(100.0)
        assert rank.seconds["waiting"] == pytest.approx(last - start)


def test_sessions_of_a_continued_run_are_added_up(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    folder.mkdir()
    lines: list[Event] = [
        Start(rank=0, node=0, host="a", pid=1, time=0.0, began=0.0),
        span("compute", 0, 10),  # and then it was killed
        Start(rank=0, node=0, host="a", pid=1, time=50.0, began=50.0),
        span("compute", 50, 55),
        End(time=60.0),
    ]
    (folder / "events.jsonl").write_text("".join(encode_line(line) for line in lines))
    (found,) = ledger_of(tmp_path).ranks
    assert isinstance(found, RankLedger)
    assert found.wall == 20
    assert found.seconds["compute"] == 15
    assert found.seconds["other"] == 5
