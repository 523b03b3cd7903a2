"""Ends and forks wait until no thread of Gloo's holds anything of Python's."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from paceline import gloo

BLOCK = bytes(2**22)


def test_the_end_waits_for_threads_of_gloo_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, True, False, True, True])
    monkeypatch.setattr(gloo, "all_rest", lambda: next(looks))
    import torch.distributed  # noqa: F401

    gloo.settle(ending=True)
    assert list(looks) == []


def test_a_thread_that_runs_does_not_rest() -> None:
    stop = threading.Event()
    name = Path("/proc/thread-self/comm")
    ready = threading.Event()

    def busy() -> None:
        name.write_text(gloo.THREAD)
        ready.set()
        while not stop.is_set():
            hashlib.sha256(BLOCK)  # without Python's lock

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        ready.wait()
        assert not all(gloo.all_rest() for _ in range(1000))
    finally:
        stop.set()
        thread.join()
    gloo.settle()  # the kernel takes a moment to take it away
    assert gloo.all_rest()
