"""The page of a real server in a real headless Chromium: drawn on, dropped on, in both themes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import chromium
import numpy as np
import pytest
from chromium import Chromium
from PIL import Image

import paceline
from paceline.serve.export import export
from paceline.serve.trained import open_trained

pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None, reason="no Chromium here: apt-get install chromium"
    ),
]
PATIENCE = 300.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with two versions of digits and one that is broken."""
    folder = tmp_path_factory.mktemp("page")
    paceline.train(
        paceline.Workload(batch_size=64),
        epochs=1,
        settings={"local.strategy": "sequential", "data.limit": 128},
        run=folder / "run",
        silent=True,
    )
    digits = folder / "models" / "digits"
    trained = open_trained(folder / "run")
    for _ in range(3):
        export(trained, "safetensors", digits)
    (digits / "3" / "model.safetensors").write_bytes(b"broken")
    (digits / "serving.json").write_text(json.dumps({"policy": "all", "labels": {"stable": 1}}))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", "serve", str(folder / "models"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        said = ""
        while "version 1 answers" not in said or "version 2 answers" not in said:
            said += process.stdout.readline()
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def browser() -> Iterator[Chromium]:
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    try:
        with Chromium(folder, deadline=PATIENCE) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_people_see_and_try_the_models(browser: Chromium, address: str, tmp_path: Path) -> None:
    page = browser.open(f"{address}/")
    page.wait("document.documentElement.dataset.ready === 'yes'", PATIENCE)
    page.wait("document.querySelectorAll('#models tbody tr').length >= 4", PATIENCE)
    text = page.evaluate("document.querySelector('#models').innerText")
    assert "digits" in text
    assert "stable" in text
    assert "checksum differs" in text
    assert page.evaluate("document.querySelector('#state').textContent").endswith("versions answer")

    def guesses() -> list[str]:
        found = page.evaluate(
            "[...document.querySelectorAll('.says')].map(s => s.querySelector('h3').textContent"
            " + ':' + s.querySelectorAll('.guess').length)"
        )
        assert isinstance(found, list)
        return found

    box = page.evaluate(
        "(() => { const r = document.querySelector('#pad').getBoundingClientRect();"
        " return [r.x, r.y, r.width, r.height]; })()"
    )
    x, y, width, height = box
    page.drag((x + width * 0.3, y + height * 0.2), (x + width * 0.7, y + height * 0.2))
    page.drag((x + width * 0.7, y + height * 0.2), (x + width * 0.45, y + height * 0.85))
    page.wait("document.querySelectorAll('.guess').length === 10", PATIENCE)
    assert [one.split(":")[-1] for one in guesses()] == ["5", "5"]
    ink = "(() => { const d = document.querySelector('#pad').getContext('2d')" \
        ".getImageData(0, 0, 280, 280).data; let n = 0;" \
        " for (let i = 0; i < d.length; i += 4) n += d[i] > 0; return n; })()"  # fmt: skip
    assert page.evaluate(ink) > 1000
    page.screenshot(tmp_path / "light.png")
    page.set_dark(True)
    page.screenshot(tmp_path / "dark.png")
    shades = [
        np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")).mean()
        for name in ("light", "dark")
    ]
    assert shades[0] > 150 > 80 > shades[1]

    # By keyboard alone: clear, pen down, a line, and an answer.
    page.evaluate("document.querySelector('#answers').replaceChildren()")
    page.evaluate("document.querySelector('#pad').focus()")
    keys = [("Delete", "Delete"), (" ", "Space"), *[("ArrowDown", "ArrowDown")] * 5]
    for key, code in keys:
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=code)
    page.wait("document.querySelectorAll('.guess').length === 10", PATIENCE)
    assert 1000 < page.evaluate(ink) < 5000

    # A photograph, dropped.
    page.evaluate("document.querySelector('#answers').replaceChildren()")
    page.evaluate(
        "(async () => { const c = document.createElement('canvas'); c.width = c.height = 64;"
        " const blob = await new Promise(done => c.toBlob(done, 'image/png'));"
        " const data = new DataTransfer(); data.items.add(new File([blob], 'a.png',"
        " {type: 'image/png'})); document.querySelector('#drop').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    page.wait("document.querySelectorAll('.guess').length === 10", PATIENCE)
    page.wait("!document.querySelector('#shown').hidden", PATIENCE)
    assert page.complaints == []
    assert {re.match(r"\w+:(//[^/]*)?", url)[0] for url in page.requests} <= {address, "data:"}  # type: ignore[index]


def test_the_description_is_shown(browser: Chromium, address: str) -> None:
    page = browser.open(f"{address}/docs", dark=True)
    page.wait("document.documentElement.dataset.ready === 'yes'", PATIENCE)
    assert "POST /v2/models/{name}/infer" in page.evaluate("document.body.innerText")
    assert page.complaints == []
