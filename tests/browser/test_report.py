"""The report in a real headless Chromium: drawn, hovered over, zoomed, hidden, dark, printed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Chromium, Page
from written_runs import write_run

from paceline.commands.report import command

pytestmark = pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here: apt-get install chromium"
)

READY = "document.documentElement.dataset.ready === 'yes'"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def browser() -> Iterator[Chromium]:
    # Not tmp_path: a profile is large, and pytest keeps the folders of the last runs.
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    try:
        with Chromium(folder) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_page(output: Path, *runs: Path) -> Path:
    command.main([*map(str, runs), "--output", str(output)], standalone_mode=False)
    return output


def middle(page: Page, selector: str) -> tuple[float, float]:
    """Where an element stands, scrolled into view."""
    place = page.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r});"
        " e.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const r = e.getBoundingClientRect();"
        " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    return float(place[0]), float(place[1])


def shown_texts(page: Page, selector: str) -> list[str]:
    found = page.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
    assert isinstance(found, list)
    return found


def check_drawn(page: Page, path: Path) -> None:
    """Every figure has its marks, nothing was complained about, nothing was asked for."""
    page.wait(READY)
    empty = page.evaluate(
        "[...document.querySelectorAll('figure')].filter(f =>"
        " !f.querySelector('.plot .main-svg .trace') || !f.querySelector('.static svg polyline')"
        ").map(f => f.id)"
    )
    assert empty == []
    assert page.evaluate("document.querySelectorAll('figure').length") > 0
    assert page.complaints == []
    assert page.requests == [path.resolve().as_uri()]


def test_report_of_four_hosts(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "four", hosts=("a", "b", "c", HOSTILE), speed=3300)
    path = make_page(tmp_path / "report.html", run)
    page = browser.open(path)
    check_drawn(page, path)
    assert page.evaluate("document.querySelectorAll('figure').length") == 17
    assert page.evaluate("document.images.length") == 0

    # No button sends anything anywhere.
    buttons = set(
        page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    )
    assert buttons == {"Download plot", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}

    # Hovering over the chosen bar of the race shows its name and its speed.
    page.move_mouse(*middle(page, "#plot-race .trace .point path"))
    page.wait("document.querySelector('#plot-race .hoverlayer .hovertext') !== null")
    assert any("2,000 images/s" in text for text in shown_texts(page, "#plot-race .hovertext"))

    # A name that looks like markup is shown as it is.
    assert any(HOSTILE in text for text in shown_texts(page, "#plot-ledger .yaxislayer-above text"))

    # A click on the legend hides a series; Plotly waits a moment for a double click.
    visible = "document.querySelectorAll('#plot-loss .scatterlayer .trace').length"
    assert page.evaluate(visible) == 2
    page.click(*middle(page, "#plot-loss .legendtoggle"))
    page.wait(f"{visible} === 1")

    # Dragging zooms in.
    x, y = middle(page, "#plot-speed .nsewdrag")
    before = page.evaluate("document.getElementById('plot-speed')._fullLayout.xaxis.range")
    page.drag((x - 100, y - 40), (x + 100, y + 40))
    page.wait(
        "(r => r[1] - r[0])(document.getElementById('plot-speed')._fullLayout.xaxis.range)"
        f" < {before[1] - before[0]}"
    )
    assert page.complaints == []
    assert page.requests == [path.resolve().as_uri()]


@pytest.mark.slow
def test_report_of_a_strong_scaling_series(browser: Chromium, tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"hosts-{len(hosts)}", hosts=hosts, speed=speed)
        for hosts, speed in (("a", 1000.0), ("ab", 1850.0), ("abcd", 3300.0))
    ]
    path = make_page(tmp_path / "scaling.html", *runs)
    page = browser.open(path, dark=True)
    check_drawn(page, path)
    for key in ("strong-speedup", "strong-efficiency", "coordination-to-computation"):
        assert page.evaluate(f"document.getElementById('figure-{key}') !== null")

    colour = "getComputedStyle(document.querySelector('#plot-strong-speedup .legendtext')).fill"
    dark = page.evaluate(colour)
    page.set_dark(False)
    page.wait(f"{colour} !== {dark!r}")

    # Paper gets the drawn figures, in any colour scheme.
    page.call("Emulation.setEmulatedMedia", media="print")
    shown = "getComputedStyle(document.querySelector('{}')).display"
    assert page.evaluate(shown.format(".static")) == "block"
    assert page.evaluate(shown.format(".plot")) == "none"
    assert page.pdf().startswith(b"%PDF")
    assert page.complaints == []
