"""Paceline: train PyTorch models as fast as the machines you have allow.

    import paceline
    result = paceline.train(paceline.Workload(model=MyNet, data=(train_set, test_set)))

Names are loaded when they are used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import Result, Workload, evaluate, train
    from paceline.errors import PacelineError, RunError, UserError
    from paceline.pace.loop import Pace

__all__ = [
    "Pace", "PacelineError", "Result", "RunError", "UserError", "Workload", "evaluate", "train",
]  # fmt: skip

_HOME = {
    "Pace": "paceline.pace.loop",
    "Result": "paceline.api",
    "Workload": "paceline.api",
    "evaluate": "paceline.api",
    "train": "paceline.api",
    "PacelineError": "paceline.errors",
    "RunError": "paceline.errors",
    "UserError": "paceline.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
