"""What a rank of a script runs: `python -m paceline.launch.scripts.begin [-m] TARGET ARGUMENTS`.

The script is the main module, as if Python had been given it. Only the end differs: it waits for
PyTorch's Gloo threads (see `paceline.gloo`).
"""

from __future__ import annotations

import atexit
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from paceline.gloo import settle


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
    atexit.register(settle, ending=True)  # who is registered first is called last
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
