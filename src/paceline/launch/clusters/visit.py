"""What a worker process of a cluster does for us. Standard library alone: it is sent by value.

The cluster's Python needs no Paceline to receive it; what it starts does, and says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

LAST_LETTERS = 600
OF_THE_CLUSTER = ("OMP_NUM_THREADS",)
"""What clusters set for their own workers, and what an agent decides itself."""


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Of a process that is started here."""
    kept = {key: value for key, value in os.environ.items() if key not in OF_THE_CLUSTER}
    return {**kept, **variables}


def ask(words: list[str], variables: dict[str, str], seconds: float) -> dict[str, Any]:
    """The first table that `python -m WORDS` prints; or why there is none, as `failure`."""
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(variables),
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"nothing came within {seconds:.0f} s"}
    for line in done.stdout.decode(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return {"failure": said[-LAST_LETTERS:] or f"it ended with code {done.returncode}"}


def work(words: list[str], variables: dict[str, str]) -> str:
    """Run `python -m WORDS` to its end here; what it said last, if it failed."""
    command = [sys.executable, "-m", *words, "--parent", str(os.getpid())]
    with tempfile.TemporaryFile() as said:
        code = subprocess.call(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment(variables),
            start_new_session=True,
        )
        if not code:
            return ""
        said.seek(0)
        last = " / ".join(said.read().decode(errors="replace").strip().splitlines()[-3:])
    return f"its agent ended with code {code}: {last[-LAST_LETTERS:] or 'it said nothing'}"
