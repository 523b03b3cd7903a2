"""Ticks, strokes, drawings and what the page is given: the same numbers in each."""

from __future__ import annotations

import io
import itertools
import json
import xml.etree.ElementTree as Xml

import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from paceline.report.canvas import dashes, hatch_lines
from paceline.report.drawing import bounds, figure_png, figure_svg, log_ticks, nice_ticks
from paceline.report.figure import LOOKS, Axis, Figure, Section, Series, Table, look
from paceline.report.page import Report, parts
from paceline.report.write import table_csv, table_markdown

NAUGHTY = "</script><img src=x onerror=alert(1)> & \x07 \"quoted\" '|' é"


def lines(**changes: object) -> Figure:
    given_: dict[str, object] = {
        "key": "speed",
        "title": "Speed",
        "caption": "Measured.",
        "x": Axis(title="hosts", ticks=(1.0, 2.0, 4.0)),
        "y": Axis(title="images/s", minimum=0.0),
        "series": (
            Series(name="ideal", shape="guide", x=(1.0, 4.0), y=(10.0, 40.0)),
            Series(name=NAUGHTY, x=(1.0, 2.0, 4.0), y=(10.0, None, 30.0), look=1),
        ),
    }
    return Figure(**{**given_, **changes})  # type: ignore[arg-type]


def bars(**changes: object) -> Figure:
    series = tuple(
        Series(name=str(n), shape="bar", look=n, x=("rank 0", NAUGHTY), y=(0.5, 0.25))
        for n in range(2)
    )
    return lines(x=Axis(title="rank", kind="category"), series=series, **changes)


@given(some.floats(-1e9, 1e9), some.floats(1e-3, 1e9))
def test_ticks_cover_what_is_shown_in_even_steps(low: float, length: float) -> None:
    high = low + length
    ticks = nice_ticks(low, high)
    room = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(("low", "high"), [(0.002, 0.004), (1, 1000), (3, 3), (0.5, 8e7)])
def test_ticks_of_a_logarithmic_axis(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high


@pytest.mark.parametrize("values", [[], [float("nan")], [5.0], [0.0, 0.0]])
def test_an_axis_without_much_to_show_has_bounds(values: list[float]) -> None:
    for kind in ("linear", "log"):
        low, high, ticks = bounds(Axis(title="", kind=kind), values)  # type: ignore[arg-type]
        assert low <= high
        assert ticks


@given(some.lists(some.tuples(some.floats(0, 100), some.floats(0, 100)), min_size=2, max_size=8))
def test_dashes_cover_the_line_in_their_proportion(points: list[tuple[float, float]]) -> None:
    def length(line: list[tuple[float, float]]) -> float:
        pairs = itertools.pairwise(line)
        return sum(((a - c) ** 2 + (b - d) ** 2) ** 0.5 for (a, b), (c, d) in pairs)

    drawn = sum(length(stroke) for stroke in dashes(points, (4, 2)))
    whole = length(points)
    periods, rest = divmod(whole, 6)
    assert drawn == pytest.approx(periods * 4 + min(rest, 4), abs=1e-6 * (1 + whole))


@given(
    some.sampled_from([each.hatch for each in LOOKS]),
    some.tuples(some.floats(0, 300), some.floats(0, 300)),
    some.tuples(some.floats(1, 300), some.floats(1, 300)),
)
def test_hatches_stay_inside_their_block(
    hatch: str, corner: tuple[float, float], size: tuple[float, float]
) -> None:
    (left, top), (width, height) = corner, size
    for stroke in hatch_lines((left, top, left + width, top + height), hatch):
        for x, y in stroke:
            assert left - 1e-6 <= x <= left + width + 1e-6
            assert top - 1e-6 <= y <= top + height + 1e-6


def test_looks_differ_in_more_than_colour() -> None:
    first = [look(place) for place in range(8)]
    assert len({each.dash for each in first}) == 8
    assert len({each.marker for each in first}) == 8
    assert len({each.hatch for each in first}) == 8
    assert len({(each.light, each.dash) for each in map(look, range(27))}) == 27


@pytest.mark.parametrize(
    "figure",
    [
        lines(),
        lines(y=Axis(title="s", kind="log")),
        lines(series=()),
        bars(),
        bars(stacked=True, horizontal=True),
        bars(horizontal=True),
    ],
)
def test_every_kind_of_figure_is_drawn(figure: Figure) -> None:
    root = Xml.fromstring(figure_svg(figure))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert figure.title in words
    assert root.find(".//{http://www.w3.org/2000/svg}img") is None
    picture = Image.open(io.BytesIO(figure_png(figure)))
    assert picture.size[0] == 1520
    assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 3


def test_stacked_bars_end_at_their_sum() -> None:
    svg = figure_svg(bars(stacked=True, y=Axis(title="part", minimum=0.0, maximum=1.0)))
    blocks = [
        [tuple(map(float, pair.split(","))) for pair in (element.get("points") or "").split()]
        for element in Xml.fromstring(svg).iter("{http://www.w3.org/2000/svg}polygon")
    ]
    columns = [block for block in blocks if max(p[1] for p in block) > 60]
    below, above = columns[0], columns[2]  # the second series stands on the first
    assert min(p[1] for p in below) == pytest.approx(max(p[1] for p in above), abs=0.2)


def test_the_page_gets_the_same_numbers_and_no_infinity() -> None:
    lying = bars(horizontal=True, stacked=True, key="lying")
    broken = lines(key="broken", series=(Series(name="n", x=(1.0,), y=(float("inf"),)),))
    report = Report(
        title="t",
        subtitle="",
        tiles=(),
        sections=(Section(key="s", title="S", blocks=(lines(), lying, broken)),),
    )
    found = [block["figure"] for block in json.loads(parts(report)["s"])["blocks"]]
    assert [each["y"] for each in found[0]["series"]] == [[10.0, 40.0], [10.0, None, 30.0]]
    assert found[0]["x"]["ticks"] == [1.0, 2.0, 4.0]
    assert (found[1]["stacked"], found[1]["horizontal"]) == (True, True)
    assert found[1]["series"][0]["x"] == ["rank 0", NAUGHTY]
    assert found[2]["series"][0]["y"] == [None]


def test_tables_keep_every_digit_for_programs_and_few_for_people() -> None:
    table = Table(
        key="t",
        title="T",
        columns=("name", "part"),
        rows=((NAUGHTY, 0.123456789), ("none", None)),
        formats=("", ".1%"),
    )
    assert "0.123456789" in table_csv(table)
    shown = table_markdown(table)
    assert "12.3%" in shown
    assert "<img" not in shown
    assert all(row.replace("\\|", "").count("|") == 3 for row in shown.splitlines())
