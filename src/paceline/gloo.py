"""When PyTorch's Gloo threads hold nothing of Python's.

After an operation, a thread of Gloo's gives back a Python object that it had. While Python takes
itself down, that ends the process with SIGABRT ("terminate called without an active exception",
pytorch/pytorch#179291). While this process is forked, the child may wait for ever for a lock of
Python's that the thread had (seen with CPython 3.11). So both wait until these threads sleep.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

THREAD = "pt_gloo_runloop"
"""What PyTorch calls the threads that carry out Gloo's operations."""
LOOK_SECONDS = 0.002
SETTLE_SECONDS = 5.0
"""Only against a thread that never rests: it is not waited for any longer then."""


def settle(*, ending: bool = False) -> None:
    """Wait until Gloo's threads sleep; `ending`: or are gone, with groups that only cycles hold."""
    if "torch.distributed" not in sys.modules:
        return
    if ending:
        gc.collect()
    end = time.monotonic() + SETTLE_SECONDS
    rested = 0
    while rested < 2 and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)  # without Python's lock, for which such a thread waits
        rested = rested + 1 if all_rest() else 0


def all_rest() -> bool:
    """None of Gloo's threads runs or wants to."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == THREAD and rest.split()[0] != "S":
            return False
    return True
