"""A real server in a process of its own, and what tests ask of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 300.0
"""Seconds, only to end a hang."""


@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int
    models: Path

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("POST" if body is not None else "GET", path, body, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, answer.read(), found
        finally:
            connection.close()

    def json(self, path: str, data: Any = None) -> Any:
        status, text, _ = self.ask(path, None if data is None else json.dumps(data).encode())
        assert status == 200, text
        return json.loads(text)

    def until(self, what: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.05)


@contextlib.contextmanager
def serving(models: Path, *words: str, port: int = 0, code: int = 0) -> Iterator[Served]:
    """`paceline serve`, ready to answer; at the end it is told to stop and ends with `code`."""
    command = [sys.executable, "-u", "-m", "paceline", "serve", str(models), "--poll", "0.1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        reader.start()
        assert found is not None
        server = Served(process, int(found[1]), models)
        server.until(lambda: server.ask("/v2/health/ready")[0] == 200)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(PATIENCE)
        reader.join(PATIENCE)
        process.stdout.close()
    assert ended == code
