"""Reports of real trainings in a lab of 1, 2 and 4 hosts, opened in a real browser."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Chromium
from test_report import check_drawn, make_page, middle, says

from paceline.lab import Lab
from paceline.lab.testing import make_lab

__all__ = ["make_lab"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        chromium.find() is None, reason="no Chromium here: apt-get install chromium"
    ),
]
SETTINGS = (
    "workload.model=mnist_cnn",
    "workload.data=synthetic",
    "workload.batch_size=64",
    "data.options={ shape = [1, 28, 28], samples = 640, test_samples = 64 }",
    "train.epochs=2",
    "local.strategy=sequential",
)
LARGEST = 3_000_000
"""Bytes that a report may have."""


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: a browser's profile is large, and pytest keeps the folders of the last runs.
    made = Path(tempfile.mkdtemp(prefix="browser-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def train(lab: Lab, run: Path) -> Path:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    done = lab.run(
        [sys.executable, "-m", "paceline.cli", "train", "--hosts", "lab", "--engine", "ssh",
         "--run", str(run), *words],
        capture_output=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return run


def test_reports_of_one_two_and_four_hosts(
    make_lab: Callable[..., Lab], tmp_path: Path, folder: Path
) -> None:
    runs = []
    for names in ("a", "ab", "abcd"):
        lab = make_lab(*({"name": name, "cores": 0.5} for name in names), rate="1gbit")
        runs.append(train(lab, tmp_path / f"hosts-{len(names)}"))
        lab.close()
    one = make_page(tmp_path / "four.html", runs[-1])
    several = make_page(tmp_path / "scaling.html", *runs)
    assert max(one.stat().st_size, several.stat().st_size) < LARGEST
    with Chromium(folder, deadline=600) as browser:
        page = browser.open(one)
        check_drawn(page, one)
        for key in ("ledger", "exchange-time", "exchange-bytes", "timeline", "cpu", "traffic-sent"):
            assert page.evaluate(f"document.getElementById('figure-{key}') !== null"), key
        page.move_mouse(*middle(page, "#figure-ledger > svg .block"))
        says(page, " s")
        page = browser.open(several, dark=True)
        check_drawn(page, several)
        for key in ("strong-speedup", "strong-efficiency", "coordination-to-computation"):
            assert page.evaluate(f"document.getElementById('figure-{key}') !== null"), key
