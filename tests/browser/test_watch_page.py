"""The live page of a real training in a real headless Chromium: it follows, and it is obeyed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chromium
import numpy as np
import pytest
from chromium import Chromium, Page
from PIL import Image

from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None, reason="no Chromium here: apt-get install chromium"
    ),
]
PATIENCE = 240.0
HOSTS_SETTINGS = (
    "workload.model=mnist_cnn",
    "workload.data=synthetic",
    "workload.batch_size=64",
    "data.options={ shape = [1, 28, 28], samples = 6400, test_samples = 64 }",
    "train.epochs=500",
    "local.strategy=sequential",
    "train.checkpoint_seconds=2",
)


GONE = (
    "[...document.querySelectorAll('#hosts tbody tr')]"
    ".find(row => row.cells[1].textContent === '✕ gone').cells[0].textContent"
)


def rows(state: str) -> str:
    """How many hosts are so."""
    return (
        "[...document.querySelectorAll('#hosts tbody tr')]"
        f".filter(row => row.cells[1].textContent === '{state}').length"
    )


@pytest.fixture
def browser() -> Iterator[Chromium]:
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    try:
        with Chromium(folder, deadline=PATIENCE) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that takes far longer than the test; its page beside it."""
    words = ["train", "--run", str(tmp_path / "run"), "--set", "train.epochs=4000", "--watch"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PACELINE_CACHE": str(tmp_path / "cache")},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)


def press(page: Page, text: str) -> None:
    page.evaluate(
        f"[...document.querySelectorAll('button')].find(b => b.textContent === '{text}').click()"
    )


def type_epochs(page: Page, count: int) -> None:
    page.evaluate(
        "(() => { const field = document.querySelector('#runs form.asking input');"
        f" field.value = {count}; field.dispatchEvent(new Event('input')); }})()"
    )


def test_a_training_is_watched_and_obeys(
    browser: Chromium, training: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert training.stdout is not None
    found = None
    while found is None:
        line = training.stdout.readline()
        assert line, "the training ended before its page came up"
        found = re.search(r"watching on (http://\S+)", line)
    page = browser.open(f"{found[1]}/")
    page.wait("document.documentElement.dataset.ready === 'yes'", PATIENCE)
    page.wait("document.querySelector('.run')?.dataset.state === 'training'", PATIENCE)
    update = "Number(document.querySelector('[role=progressbar]').getAttribute('aria-valuenow'))"
    before = page.evaluate(update)
    page.wait(f"{update} > {before} + 5", PATIENCE)
    page.wait("document.querySelectorAll('#progress polyline').length === 2", PATIENCE)
    page.wait("document.querySelectorAll('#training figure > svg .mark').length >= 4", PATIENCE)
    page.wait("document.querySelectorAll('#legs figure > svg .block').length >= 1", PATIENCE)
    page.wait("document.querySelectorAll('#hosts tbody tr').length === 1", PATIENCE)
    page.wait("document.querySelectorAll('#ledger figure > svg .block').length >= 2", PATIENCE)

    # What one has set stays so while the page goes on.
    page.evaluate("document.querySelector('#asked details').open = true")
    page.evaluate("document.querySelector('#figure-ledger .key button').click()")
    before = page.evaluate(update)
    page.wait(f"{update} > {before} + 5", PATIENCE)
    pressed = "document.querySelector('#figure-ledger .key button').getAttribute('aria-pressed')"
    assert page.evaluate(pressed) == "false"
    assert page.evaluate("document.querySelector('#asked details').open") is True

    shades = []
    for name, dark in (("light", False), ("dark", True)):
        page.set_dark(dark)
        page.screenshot(tmp_path / f"{name}.png")
        shades.append(np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")).mean())
    assert shades[0] > 150 > 80 > shades[1]
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=390, height=844, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    page.wait("document.documentElement.scrollWidth <= 390", 10)
    page.screenshot(tmp_path / "phone.png")

    # A run cannot become shorter than it is; a longer one goes on.
    type_epochs(page, 0)
    press(page, "Change")
    page.wait("document.querySelector('.said').textContent.includes('train.epochs')", PATIENCE)
    type_epochs(page, 5000)
    press(page, "Change")
    said = ""
    while "asked to change train.epochs = 5000" not in said:
        said = training.stdout.readline()
        assert said, "the training ended"
    page.wait("document.querySelector('#runs form.asking input').value === '5000'", PATIENCE)
    page.wait("document.querySelector('.tiles').innerText.includes('/ 5000')", PATIENCE)
    page.wait("document.querySelector('.run').dataset.state === 'training'", PATIENCE)
    page.wait("!document.querySelector('#runs form.asking').hidden", PATIENCE)

    # What a browser logs of the refusal above is meant to be there.
    assert [c for c in page.complaints if "400" not in c] == []
    assert {re.match(r"\w+:(//[^/]*)?", url)[0] for url in page.requests} <= {found[1], "data:"}  # type: ignore[index]

    page.evaluate("window.confirm = () => true")
    press(page, "Save and stop")
    rest, _ = training.communicate(timeout=PATIENCE)
    assert "stopped and saved" in rest
    assert training.returncode == 128 + signal.SIGTERM
    assert "epochs = 5000" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_host_of_four_dies_before_our_eyes(
    browser: Chromium, make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab(*({"name": name, "cores": 0.5} for name in "abcd"), rate="1gbit")
    run = tmp_path / "run"
    changes = [word for setting in HOSTS_SETTINGS for word in ("--set", setting)]
    words = ["train", "--hosts", "lab", "--engine", "ssh", "--run", str(run), *changes]
    training = lab.start([sys.executable, "-m", "paceline", *words], stdout=subprocess.DEVNULL)
    while not run.is_dir():
        assert training.poll() is None
        time.sleep(0.1)
    watcher = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", "watch", str(run), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        found = re.search(r"http://\S+", watcher.stdout.readline())
        assert found is not None
        page = browser.open(f"{found[0]}/")
        page.wait(f"{rows('there')} === 4", PATIENCE)
        update = "Number(document.querySelector('[role=progressbar]').ariaValueNow)"
        page.wait(f"{update} > 20", PATIENCE)
        page.wait("document.querySelectorAll('#ledger figure > svg .block').length >= 8", PATIENCE)
        lab.kill("c")
        page.wait(f"{rows('✕ gone')} === 1", PATIENCE)
        page.wait("document.querySelectorAll('#legs figure > svg .mark').length === 1", PATIENCE)
        assert page.evaluate(GONE) == "c"
        page.screenshot(tmp_path / "gone.png")
        # The others are started again, and go on.
        page.wait(f"{rows('there')} === 3", PATIENCE)
        page.wait("document.querySelector('.run').dataset.state === 'training'", PATIENCE)
        page.wait(
            "document.querySelector('#notes')?.textContent.includes('started again')", PATIENCE
        )
        before = page.evaluate(update)
        page.wait(f"{update} > {before} + 20", PATIENCE)
        assert page.evaluate(GONE) == "c"
        assert page.complaints == []
        assert {re.match(r"\w+:(//[^/]*)?", url)[0] for url in page.requests} == {found[0]}  # type: ignore[index]
    finally:
        watcher.terminate()
        watcher.communicate(timeout=300)
        training.terminate()
        training.wait(300)
