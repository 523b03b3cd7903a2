"""Which files of the user belong to a script: it, and the modules beside it that it imports.

Found by reading, as Python would look for them; nothing is run.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def hashes(first: Path, root: Path) -> dict[str, str]:
    """SHA-256 by path of a file and of what it imports from below `root`, directly or not."""
    found: dict[str, str] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        if str(path) in found:
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue
        found[str(path)] = hashlib.sha256(data).hexdigest()
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):  # running it will say more
            continue
        waiting += [file for name in _imported(tree, path, root) for file in _files(name, root)]
    return found


def module_file(name: str, root: Path) -> Path | None:
    """The file that `python -m name` runs, where it lies below `root`."""
    base = root.joinpath(*name.split("."))
    for path in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
        if path.is_file():
            return path
    return None


def _imported(tree: ast.AST, path: Path, root: Path) -> Iterator[str]:
    """Dotted names of modules that a file may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folders = list(path.relative_to(root).parts[: -node.level])
                base = ".".join([*folders, *([base] if base else [])])
            yield from (".".join(filter(None, (base, alias.name))) for alias in node.names)


def _files(name: str, root: Path) -> Iterator[Path]:
    """The files that importing `a.b.c` runs: of a, of a.b, and of a.b.c."""
    place = root
    for part in name.split("."):
        if not part.isidentifier():  # `from a import *`
            return
        place /= part
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                yield path
