"""Memory that an update frees is there for the next one, whatever thread asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, threading
import torch
from paceline.local.memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit("the allocator cannot be told")

PR_SET_THP_DISABLE = 41  # huge pages would hide most faults
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for number in range(25):  # an aligned block is not always as large as the next one needs
        if number == 20:
            before = faults()
        torch.ones(25_000_000)  # 100 MB: more than an arena of a thread's own can hold
    print(faults() - before)

thread = threading.Thread(target=work)
thread.start() if sys.argv[2] == "thread" else work()
"""


def page_faults(memory: str, place: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, memory, place], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is Linux's")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["main", "thread"])
def test_large_blocks_are_taken_from_the_system_once(place: str) -> None:
    pages = 5 * 100_000_000 // 4096
    assert page_faults("kept", place) < pages / 2
    assert page_faults("given back", place) > pages / 2, "otherwise nothing is shown here"
