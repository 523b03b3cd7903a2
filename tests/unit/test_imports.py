"""Who may import whom: read from the source with `ast`, function-level imports included.

There is one order, and imports go upwards only; planning, costs and reports run without torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
SOURCE = Path(__file__).parents[2]

ORDER = (
    "errors", "text", "signals", "gloo", "references", "secure", "run", "schema", "config", "cost",
    "plan", "models", "data", "backends", "local", "exchange", "observe", "training", "hardware",
    "launch", "lab", "serve", "report", "watch", "workflow", "integrations", "pace", "api",
    "commands", "cli", "__main__", "__init__",
)  # fmt: skip
"""A part of the package imports only from those before it."""
WITHOUT_TORCH = (
    "schema", "plan", "cost", "report", "errors", "run", "text", "cli", "__init__",
    "secure", "watch",
)  # fmt: skip

# Only these may touch os.environ: why.
ENVIRONMENT = {
    "config.environment": "the only reader of environment variables",
    "launch.local": "builds the environment of the ranks it starts",
    "launch.clusters.visit": "runs in a cluster's worker, sent there without the package",
    "lab": "makes the environment of emulated hosts, and runs inside them without the package",
    "backends.mpi.registration": "works without the rest of Paceline",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Name inside the package ("training.loop", "cli") and file of every module."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that running the code may import; `if TYPE_CHECKING:` blocks left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)
        yield from imports(node)


def inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, named as `modules` names them."""
    found = imports(ast.parse(path.read_text()))
    return {name.removeprefix("paceline.") for name in found if name.startswith("paceline.")}


def forbidden(name: str, imported: str) -> str | None:
    """Why a module may not import another, or None."""
    head, target = name.split(".")[0], imported.split(".")[0]
    if head == target or target not in ORDER or ORDER.index(target) < ORDER.index(head):
        return None
    return f"{name} imports {imported}, which comes after it"


def test_no_forbidden_import() -> None:
    found = [
        reason
        for name, path in modules()
        for imported in sorted(own_imports(path))
        if (reason := forbidden(name, imported))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("local.board", "training.loop"),
        ("schema.plan", "config"),
        ("plan.choose", "hardware.profile"),
        ("training.loop", "api"),
        ("workflow.legs", "commands.train"),
    ],
)
def test_the_rule_forbids(name: str, imported: str) -> None:
    assert forbidden(name, imported) is not None
    assert forbidden(imported, name) is None


def test_what_comes_with_the_source_alone_is_not_imported_by_the_package() -> None:
    found = [
        f"{name} imports {imported}"
        for name, path in modules()
        for imported in imports(ast.parse(path.read_text()))
        if imported.split(".")[0] in ("studies", "benchmarks")
    ]
    assert not found


def test_studies_need_neither_torch_nor_benchmarks() -> None:
    found = [
        f"{path.name} imports {imported}"
        for path in sorted((SOURCE / "studies").rglob("*.py"))
        for imported in imports(ast.parse(path.read_text()))
        if imported.split(".")[0] in ("torch", "benchmarks")
    ]
    assert not found


def test_every_part_of_the_package_has_a_place_in_the_order() -> None:
    assert {name.split(".")[0] for name, _ in modules()} == set(ORDER)


def test_torch_is_not_named_where_it_is_not_allowed() -> None:
    found = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name.split(".")[0] in WITHOUT_TORCH
        for imported in imports(ast.parse(path.read_text()))
        if imported.split(".")[0] == "torch"
    ]
    assert not found


def test_only_one_module_reads_the_environment() -> None:
    found = []
    for name, path in modules():
        words = {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        allowed = any(inside(name, module) for module in ENVIRONMENT)
        if words & {"environ", "getenv", "putenv"} and not allowed:
            found.append(name)
    assert found == []


def test_planning_and_reporting_run_without_torch() -> None:
    script = (
        "import sys, paceline.plan, paceline.cost.memory, paceline.report.tables, paceline.schema\n"
        "import paceline.plan.candidates, paceline.plan.choose, paceline.config\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=600).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "paceline" in done.stdout
