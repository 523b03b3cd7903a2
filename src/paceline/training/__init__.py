"""The training stage, and what `paceline.train(...)` calls.

Importing this package sets the name `train` of `paceline`, which is also that of the function: the
module is made callable, so that both spellings go on to work whatever was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        import paceline

        # The public name, found as if this module had never taken its place.
        return paceline.__getattr__("train")(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
