"""The report in a real headless Chromium: drawn, hovered over, zoomed, hidden, dark, printed."""

from __future__ import annotations

import shutil
import tempfile
import time
import xml.etree.ElementTree as Xml
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
        " !f.querySelector(':scope > svg :is(.block, .mark, polyline)')).map(f => f.id)"
    )
    assert empty == []
    assert page.evaluate("document.querySelectorAll('figure').length") > 0
    assert page.evaluate("document.querySelector('main').outerHTML.includes('NaN')") is False
    assert page.complaints == []
    assert page.requests == [path.resolve().as_uri()]


def says(page: Page, text: str) -> None:
    """What the pointer is over is said beside it."""
    page.wait(f"document.querySelector('.tip').innerText.includes({text!r})")


def test_report_of_four_hosts(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "four", hosts=("a", "b", "c", HOSTILE), speed=3300)
    path = make_page(tmp_path / "report.html", run)
    page = browser.open(path)
    check_drawn(page, path)
    assert page.evaluate("document.querySelectorAll('figure').length") == 18
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelectorAll('#links a').length") == 12

    # Pointing at the chosen bar of the race says its name and its speed, at a curve every value.
    page.move_mouse(*middle(page, "#figure-race > svg .block"))
    says(page, "2,000 images/s")
    says(page, "threads 2")
    page.move_mouse(*middle(page, "#figure-loss > svg"))
    says(page, "training: ")
    says(page, "test: ")

    # A name that looks like markup is shown as it is.
    assert any(HOSTILE in text for text in shown_texts(page, "#figure-ledger > svg text"))
    assert HOSTILE in page.evaluate("document.querySelector('#table-nodes').innerText")

    # A click on the legend hides a series, and another brings it back.
    visible = "document.querySelectorAll('#figure-loss > svg polyline').length"
    for count in (1, 2):
        page.click(*middle(page, "#figure-loss .key button"))
        page.wait(f"{visible} === {count}")

    # Dragging zooms in, a double click out; the figure can be saved as it is.
    ticks = "[...document.querySelectorAll('#figure-timeline > svg text')].map(t => t.textContent)"
    before = page.evaluate(ticks)
    x, y = middle(page, "#figure-timeline > svg")
    page.drag((x - 100, y), (x + 100, y))
    page.wait("document.querySelectorAll('#figure-timeline .tools button').length === 2")
    assert page.evaluate(ticks) != before
    page.evaluate(
        "document.querySelector('#figure-timeline > svg').dispatchEvent(new Event('dblclick'))"
    )
    page.wait("document.querySelectorAll('#figure-timeline .tools button').length === 1")
    assert page.evaluate(ticks) == before
    saved = saved_figure(browser, page, tmp_path, "ledger")
    texts = [element.text for element in Xml.fromstring(saved).iter() if element.text]
    assert {"Wall time of each rank", "compute"} <= set(texts)
    assert any(HOSTILE in text for text in texts)
    assert "var(" not in saved
    assert page.complaints == []
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "blob"}


def saved_figure(browser: Chromium, page: Page, folder: Path, key: str) -> str:
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.evaluate(f"document.querySelector('#figure-{key} .tools button').click()")
    file = folder / f"{key}.svg"
    ends = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    return file.read_text()


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

    line = "#figure-strong-speedup > svg polyline:last-of-type"
    colour = f"getComputedStyle(document.querySelector('{line}')).stroke"
    dark = page.evaluate(colour)
    page.set_dark(False)
    page.wait(f"{colour} !== {dark!r}")

    # Paper has light colours, and nothing to press.
    page.set_dark(True)
    page.wait(f"{colour} === {dark!r}")
    page.call("Emulation.setEmulatedMedia", media="print")
    page.wait(f"{colour} !== {dark!r}")
    shown = "getComputedStyle(document.querySelector('{}')).display"
    assert page.evaluate(shown.format(".tools")) == page.evaluate(shown.format("nav")) == "none"
    assert page.pdf().startswith(b"%PDF")
    assert page.complaints == []
