"""What a killed server and a full disk cost: nothing that was served before."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from real_server import PATIENCE, serving

pytest.importorskip("uvicorn")

from paceline.schema.checkpoint import checkpoints_in
from paceline.serve.publish import Publisher
from paceline.serve.versions import version_numbers

pytestmark = pytest.mark.slow
ROOM = 8_000_000
"""Bytes of the small disk: two versions of the model and a half."""
BODY = json.dumps({"instances": np.zeros((1, 784)).tolist()}).encode()


class Asking:
    """Clients that ask one after the other, and connect again when the server is away."""

    def __init__(self, port: int, clients: int = 4) -> None:
        self.port = port
        self.codes: list[int] = []
        self.away = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        while not self._stop.is_set():
            try:
                connection.request("POST", "/v1/models/digits:predict", BODY)
                answer = connection.getresponse()
                answer.read()
                self.codes.append(answer.status)
            except (OSError, http.client.HTTPException):
                self.away += 1
                connection.close()
                self._stop.wait(0.05)
        connection.close()


def test_a_killed_server_comes_back_as_it_was(exported: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(exported, models / "digits" / "1")
    port = free_port()
    with Asking(port) as asking:
        with serving(models, port=port, code=-9) as first:
            first.until(lambda: len(asking.codes) > 100)
            first.process.kill()
            first.process.wait(PATIENCE)
        before = len(asking.codes)
        with serving(models, port=port) as second:
            second.until(lambda: asking.codes[before:].count(200) > 100)
            assert second.json("/v2/models/digits")["versions"] == ["1"]
            # Before the model is loaded the server says so, and when to come again.
            assert set(asking.codes) <= {200, 503}
            assert set(asking.codes[-50:]) == {200}
    assert asking.away > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room; skipped where only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs root; test_export.py has one without")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", ["safetensors", "onnx"])
def test_a_full_disk_costs_the_new_version_alone(
    kind: str, small_disk: Path, trained_run: Path, exported: Path, tmp_path: Path
) -> None:
    run, digits = tmp_path / "run", small_disk / "models" / "digits"
    shutil.copytree(trained_run, run, symlinks=True)
    shutil.copytree(exported, digits / "1")
    said: list[str] = []
    publisher = Publisher(run, digits, kind, said.append)
    with serving(digits.parent) as server, Asking(server.port) as asking:
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        publisher.look()
        ((line),) = said
        assert line.startswith("warning: update ")
        assert "No space left on device" in line
        assert version_numbers(digits) == [1]
        assert list(digits.glob(".partial-*")) == []
        asked = len(asking.codes)
        server.until(lambda: len(asking.codes) > asked + 50)
        assert server.json("/v2/models/digits")["versions"] == ["1"]
        # With room again, the next best is published and served.
        filler.unlink()
        best = run / "checkpoints" / "best"
        now = best.readlink().name
        other = next(path for path in checkpoints_in(run / "checkpoints") if path.name != now)
        best.unlink()
        best.symlink_to(other.name)
        publisher.look()

        def versions() -> Any:
            return server.json("/v2/models/digits")["versions"]

        server.until(lambda: versions() == ["2"])
    assert set(asking.codes) == {200}
    assert asking.away == 0
