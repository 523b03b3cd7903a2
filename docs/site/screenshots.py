"""Pictures of the live page, taken by a real browser during a real training on two nodes.

    make screenshots            writes docs/images/

Both nodes are this machine, each with half of its cores, so that anybody can take them. Needs
Chromium, as the tests of the page do. Each picture is drawn with at most 128 colours, which keeps
it small.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "browser"))

from chromium import Chromium, Page  # noqa: E402

PATIENCE = 900.0
HOSTS = """\
[[host]]
name = "one"
address = "localhost"
cores = {cores}

[[host]]
name = "two"
address = "127.0.0.1"
cores = {cores}
"""
PICTURES = (
    # name, width and height that are shown, dark
    ("watch", 1280, 1240, False),
    ("watch-dark", 1280, 1240, True),
    ("watch-phone", 390, 1500, False),
    ("watch-phone-dark", 390, 1500, True),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--to", type=Path, default=ROOT / "docs" / "images")
    options.add_argument("--epochs", type=int, default=8, help="pictures are taken after so many")
    options.add_argument("--set", dest="changes", action="append", default=[])
    chosen = options.parse_args()
    chosen.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        take(Path(name), chosen.to, chosen.epochs, chosen.changes)


def take(folder: Path, to: Path, epochs: int, changes: list[str]) -> None:
    """Train two nodes, wait until there is something to see, and take every picture."""
    cores = max(1, (os.cpu_count() or 2) // 2)
    (folder / "hosts.toml").write_text(HOSTS.format(cores=cores))
    words = ["train", "--hosts", "hosts.toml", "--run", "runs/digits", "--watch"]
    words += ["--set", "train.epochs=60"]
    words += [word for change in changes for word in ("--set", change)]
    training = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PACELINE_CACHE": str(folder / "cache")},
    )
    try:
        address = address_of(training)
        with Chromium(folder, deadline=PATIENCE) as browser:
            page = browser.open(f"{address}/")
            page.wait("document.documentElement.dataset.ready === 'yes'", PATIENCE)
            page.wait(
                "Number(document.querySelectorAll('.tile b')[1]?.textContent.split('/')[0])"
                f" > {epochs}",
                PATIENCE,
            )
            page.wait("document.querySelectorAll('#hosts tbody tr').length === 2", PATIENCE)
            for name, *form in PICTURES:
                photograph(page, to / f"{name}.png", *form)
    finally:
        training.send_signal(signal.SIGTERM)
        training.communicate(timeout=PATIENCE)


def address_of(training: subprocess.Popen[str]) -> str:
    """What the training says about where its page is."""
    assert training.stdout is not None
    for line in training.stdout:
        if found := re.search(r"watching on (http://\S+)", line):
            return found[1]
    raise SystemExit("the training ended before its page came up")


def photograph(page: Page, path: Path, width: int, height: int, dark: bool) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
    )  # fmt: skip
    page.set_dark(dark)
    time.sleep(1.5)  # the next look at the run redraws everything at this width
    raw = io.BytesIO(page.picture(whole=False))
    image = Image.open(raw).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
