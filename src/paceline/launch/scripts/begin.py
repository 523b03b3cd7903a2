"""What a rank of a script runs: `python -m paceline.launch.scripts.begin [-m] TARGET ARGUMENTS`.

The script is the main module, as if Python had been given it. Only the end differs: PyTorch's
Gloo threads may still give back a Python object of their last operation, and Python ends the
process with SIGABRT ("terminate called without an active exception") where that happens while
it takes itself down (pytorch/pytorch#179291, #190489). So the end waits until they are done.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

GLOO_THREAD = "pt_gloo_runloop"
"""What PyTorch calls the threads that carry out Gloo's operations."""
LOOK_SECONDS = 0.002
SETTLE_SECONDS = 5.0
"""Only against a thread that never rests: the end goes on without it then."""


def settle() -> None:
    """Wait until Gloo's threads are gone, or sleep: then none holds an object of Python's."""
    if "torch.distributed" not in sys.modules:
        return
    gc.collect()  # groups that only cycles hold end with their threads
    end = time.monotonic() + SETTLE_SECONDS
    rested = 0
    while rested < 2 and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)  # without Python's lock, for which such a thread waits
        rested = rested + 1 if _all_rest() else 0


def _all_rest() -> bool:
    """None of Gloo's threads runs or wants to."""
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == GLOO_THREAD and rest.split()[0] != "S":
            return False
    return True


def _script(name: str) -> tuple[CodeType, dict[str, Any]]:
    path = str(Path(name).absolute())
    sys.path[0] = str(Path(name).resolve().parent)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", path)
    return code, {"__file__": path, "__spec__": None, "__package__": None, "__loader__": loader}


def _module(name: str) -> tuple[CodeType, dict[str, Any]]:
    import runpy

    sys.path[0] = str(Path.cwd())
    # As the debugger and the profiler of the standard library start modules.
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    sys.argv[0] = code.co_filename
    return code, {
        "__file__": code.co_filename,
        "__spec__": spec,
        "__package__": spec.parent,
        "__loader__": spec.loader,
    }


def _without_us(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """A traceback begins in the script."""
    while at is not None and at.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        at = at.tb_next
    sys.__excepthook__(kind, error.with_traceback(at), at)


def main() -> None:
    """Become the script."""
    atexit.register(settle)  # the first one to be registered is the last one to be called
    sys.excepthook = _without_us
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    code, names = (_module if is_module else _script)(sys.argv[0])
    space = sys.modules["__main__"].__dict__
    builtins = space["__builtins__"]
    space.clear()
    space.update(names, __name__="__main__", __builtins__=builtins, __cached__=None, __doc__=None)
    exec(code, space)


if __name__ == "__main__":
    from paceline.launch.scripts import begin  # this module's names give way to the script's

    begin.main()
