"""Names of the user's own code: `package.module:callable` or `path/to/file.py:callable`.

A model, a data set, a loss or an optimizer of one's own is named in the
configuration by such a reference. Python code is executed only because the user
named it; nothing is ever executed from data.

What a script hands over itself (a class of its own, a lambda, a dataset) has no such
name. Its run says `object:` and what it was, which can be read but not resolved.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

from paceline.errors import ConfigError
from paceline.text import user_path

PARQUET = "parquet:"
"""Begins the name of data in Parquet files; their path follows, and is no callable."""
OBJECT = "object:"
"""Begins the name of something that only the process that made it has."""

SHOWN = 2
"""Items of a list of the user's own that are named."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

# Two threads that resolve the same file must get the same module.
_LOADING = threading.RLock()


def is_reference(text: str) -> bool:
    """Whether `text` names a callable of the user's own rather than something built in.

    >>> is_reference("my_package.nets:build"), is_reference("nets/small.py:Small")
    (True, True)
    >>> is_reference("alexnet"), is_reference("some/folder")
    (False, False)
    """
    if is_object(text):
        return True
    if text.startswith(PARQUET):
        return False
    place, colon, attribute = text.rpartition(":")
    if not colon or not _DOTTED.fullmatch(attribute):
        return False
    return _is_file(place) or _DOTTED.fullmatch(place) is not None


def resolve(reference: str, what: str) -> Callable[..., Any]:
    """The callable that `reference` names; `what` ("model", "loss") is for messages.

    A file is read relative to the current directory. Modules next to it, and
    modules in the current directory, can be imported.

    >>> resolve("collections:OrderedDict", "model")()
    OrderedDict()
    """
    if is_object(reference):
        raise ConfigError(
            f"{what} {reference!r} was an object of a Python program, which no other process has:"
            " give it again to paceline.train(), or put it into a module and name it as"
            " 'module:callable'"
        )
    if not is_reference(reference):
        raise ConfigError(
            f"{what} {reference!r} is not a reference: write 'package.module:callable'"
            " or 'path/to/file.py:callable'"
        )
    place, _, attribute = reference.rpartition(":")
    subject = f"{what} {reference!r}"
    with _LOADING:
        module = _load_file(place, subject) if _is_file(place) else _load_module(place, subject)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{subject}: {place} has no {attribute!r};{_offer(module)}") from None
    if not callable(found):
        raise ConfigError(
            f"{subject}: {attribute!r} is a {type(found).__name__}, not callable;"
            " name a function or a class"
        )
    return found  # type: ignore[no-any-return]


def resolve_factory(reference: str, what: str) -> Callable[..., Any]:
    """`resolve` for what is called to make something: a function or a class written in Python.

    What the interpreter itself brings (os:abort, sys:exit) makes no model; it is not called.
    """
    found = resolve(reference, what)
    if isinstance(found, BuiltinFunctionType):
        raise ConfigError(
            f"{what} {reference!r} is a built-in function of the interpreter, which makes no"
            f" {what.rpartition('.')[0] or what}: name a function or a class of your own"
        )
    return found


def _is_file(place: str) -> bool:
    return place.endswith(".py") and len(place) > len(".py")


def _offer(module: ModuleType) -> str:
    """The callables that the module defines itself, as a remedy."""
    own = sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    )
    return f" it defines {', '.join(own[:10])}" if own else " it defines no function or class"


def _load_module(name: str, subject: str) -> ModuleType:
    with _importable(Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the named module or a package above it: what the module itself
            # fails to import is another mistake and gets another sentence.
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"{subject}: there is no module {error.name!r}; install it, start from the"
                    " folder that holds it, or write 'path/to/file.py:callable'"
                ) from error
            raise _import_failed(name, subject, error) from error
        except (Exception, SystemExit) as error:
            raise _import_failed(name, subject, error) from error


def _load_file(place: str, subject: str) -> ModuleType:
    path = user_path(place).resolve()
    if not path.is_file():
        raise ConfigError(
            f"{subject}: there is no file {str(path)!r}; give a path from the current folder"
            " or an absolute one"
        )
    # Stable, so that the same file is the same module in every worker.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"paceline_user_{stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    file_spec = importlib.util.spec_from_file_location(name, path)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    sys.modules[name] = module
    with _importable(path.parent):
        try:
            file_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise _import_failed(place, subject, error) from error
    return module


def _import_failed(place: str, subject: str, error: BaseException) -> ConfigError:
    text = " ".join(str(error).split()) or "no message"
    return ConfigError(
        f"{subject}: importing {place} failed with {type(error).__name__}: {text};"
        " correct that file or install what it needs"
    )


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Look in `directory` first during the import, and last ever after.

    First, so that the user's own modules are found as from a script; last
    afterwards, so that what they import later still works while a file named
    like a library cannot hide that library from the rest of the run.
    """
    entry = str(directory)
    present = entry in sys.path
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)
        if not present:
            sys.path.append(entry)


def reference_to(thing: object) -> str | None:
    """The reference by which another process finds `thing`, or None where there is none.

    Objects of the script that runs have none: importing it again would run it again.

    >>> reference_to(resolve)
    'paceline.references:resolve'
    """
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing and _is_found_elsewhere(module) else None


def _is_found_elsewhere(module: str) -> bool:
    """Whether a process that is started in the current folder imports the same file.

    The folder of the running script is searched by this process alone.
    """
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # part of the interpreter
        return True
    place = Path(file).resolve()
    here = PathFinder.find_spec(top, [str(Path.cwd())])
    if here is not None:
        return here.origin is not None and Path(here.origin).resolve() == place
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    root = place.parent.parent if place.name == "__init__.py" else place.parent
    if script is None or Path(script).resolve().parent != root:
        return True
    return any(Path(entry).resolve() == root for entry in sys.path[1:])


def refuse_other_arguments(function: Callable[..., Any], who: str, *words: str) -> None:
    """Refuse a function of the user's own that cannot be called with so many arguments.

    >>> refuse_other_arguments(lambda model, batch: 0, "step 'update'", "model", "batch")
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: only calling it tells
        return
    try:
        signature.bind(*words)
    except TypeError:
        raise ConfigError(
            f"{who} takes {signature}, but is called with ({', '.join(words)}): let it take these"
        ) from None


def is_object(text: str) -> bool:
    """Whether `text` is what a run says of something that was handed over as an object.

    >>> is_object("object:__main__.Net"), is_object("nets:Net")
    (True, False)
    """
    return text.startswith(OBJECT)


def object_name(thing: object) -> str:
    """What a run says of an object that another process cannot find.

    >>> object_name(lambda: None), object_name(functools.partial(print, 1))
    ('object:paceline.references.<lambda>', 'object:partial(builtins.print)')
    """
    return f"{OBJECT}{_described(thing)}"


def _described(thing: object) -> str:
    thing = getattr(thing, "described_as", thing)  # what only wraps an object of the user's
    if isinstance(thing, functools.partial):
        return f"partial({_described(thing.func)})"
    if type(thing) in (tuple, list):
        first = [_described(each) for each in thing[:SHOWN]]  # type: ignore[index]
        more = [f"... {len(thing)} in all"] if len(thing) > SHOWN else []  # type: ignore[arg-type]
        return f"({', '.join([*first, *more])})"
    name = getattr(thing, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(thing, '__module__', None) or 'builtins'}.{name}"
    return f"{type(thing).__module__}.{type(thing).__qualname__}()"
