"""What a folder offers to train with, and a first file that trains it: `paceline init`.

Nothing of the user's is run or imported to find out: Python is read as text, arrays by their heads.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.data.images import SUFFIXES
from paceline.data.mnist import FILES as IDX_FILES
from paceline.errors import ConfigError
from paceline.text import is_number

GIVEN = ("channels", "image_size", "classes")
"""What a model's factory is called with where it asks for it."""
MOST_CLASSES = 1000
"""Whole numbers beyond that are taken for amounts, not for classes."""
MOST_ENTRIES = 2000
"""Files of a folder that are looked at: enough to see what it is."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A class of the user's that is an nn.Module."""

    file: str
    name: str
    missing: tuple[str, ...] = ()
    """Arguments without a default that Paceline cannot know."""

    @property
    def reference(self) -> str:
        return f"{self.file}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Something to train on."""

    kind: Literal["images", "idx", "arrays", "table", "named"]
    place: str
    """The folder or file, as the new file names it."""
    targets: str = ""
    """With arrays: the file of targets."""
    classes: int | None = None
    """How many there are to tell apart; None: amounts."""
    header: bool = False

    @property
    def in_words(self) -> str:
        learnt = "amounts" if self.classes is None else f"{self.classes} classes"
        what = {
            "images": f"{self.place}/, a folder of pictures by class",
            "idx": f"{self.place}/, idx files",
            "arrays": f"{self.place} with {self.targets}, arrays of inputs and {learnt}",
            "table": f"{self.place}, a table whose last column has {learnt}",
            "named": self.place,
        }
        return what[self.kind]


@dataclass(frozen=True, kw_only=True)
class Found:
    """All that a folder offers."""

    models: tuple[Model, ...] = ()
    data: tuple[Data, ...] = ()
    loops: tuple[str, ...] = ()
    """Scripts that train by themselves: importing one would start it."""
    passed_over: tuple[str, ...] = ()
    """What looks like data and cannot be used, each in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """A file to write, and the command that uses it."""

    name: str
    text: str
    command: str
    """What the file's name follows."""


def look(folder: Path) -> Found:
    """Everything in a folder that a training can begin with."""
    models: list[Model] = []
    loops: list[str] = []
    for path in sorted(folder.glob("*.py")):
        found, is_loop = read_python(path)
        models += found
        loops += [path.name] if is_loop else []
    data: list[Data] = []
    passed: list[str] = []
    below = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    for path in (folder, *(each for each in below if not each.name.startswith("."))):
        name = path.relative_to(folder).as_posix()
        if is_image_folder(path):
            data.append(Data(kind="images", place=name))
        elif is_idx_folder(path):
            data.append(Data(kind="idx", place=name))
    for finder in (find_arrays, find_tables):
        some, sentences = finder(folder)
        data += some
        passed += sentences
    return Found(
        models=tuple(models), data=tuple(data), loops=tuple(loops), passed_over=tuple(passed)
    )


def read_python(path: Path) -> tuple[list[Model], bool]:
    """The models of a file, and whether it is a script that trains.

    A script that would train while it is imported has no models for others.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return [], False
    trains = any(_trains(node) for node in tree.body if not isinstance(node, ast.ClassDef))
    acts = [node for node in tree.body if not (isinstance(node, _QUIET) or _is_text(node))]
    guarded = [node for node in acts if ast.unparse(node).startswith("if __name__ ==")]
    if trains and len(acts) > len(guarded):
        return [], True
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base) in ("nn.Module", "torch.nn.Module", "Module") for base in node.bases
        ):
            found.append(Model(file=path.name, name=node.name, missing=tuple(_missing(node))))
    inside = {
        word.id
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for word in ast.walk(node)
        if isinstance(word, ast.Name)
    }
    # A block that another model of the file is made of is not the model.
    whole = [model for model in found if model.name not in inside]
    return whole or found, trains and bool(guarded)


_QUIET = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign,
    ast.AnnAssign,
)  # fmt: skip
"""Statements that do not train when a file is imported."""


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _trains(node: ast.stmt) -> bool:
    calls = (word for word in ast.walk(node) if isinstance(word, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute)
        and (call.func.attr == "backward" or ast.unparse(call.func) == "paceline.train")
        for call in calls
    )


def _missing(node: ast.ClassDef) -> Iterator[str]:
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
            given = entry.args
            plain = [word.arg for word in (*given.posonlyargs, *given.args)][1:]
            yield from (n for n in plain[: len(plain) - len(given.defaults)] if n not in GIVEN)
            for word, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
                if default is None and word.arg not in GIVEN:
                    yield word.arg


def is_image_folder(folder: Path) -> bool:
    """Whether it has a folder for each class, or train/ and val/ with those."""
    below = [each for each in folder.iterdir() if each.is_dir()][:MOST_ENTRIES]
    if {"train"} <= {each.name for each in below}:
        return is_image_folder(folder / "train")
    return sum(_has_picture(each) for each in below) >= 2


def _has_picture(folder: Path) -> bool:
    names = (each for _, each in zip(range(MOST_ENTRIES), folder.iterdir(), strict=False))
    return any(each.suffix.lower() in SUFFIXES for each in names)


def is_idx_folder(folder: Path) -> bool:
    """Whether the four files of MNIST's form are there, compressed or not."""
    return all((folder / n).is_file() or (folder / f"{n}.gz").is_file() for n in IDX_FILES)


def find_arrays(folder: Path) -> tuple[list[Data], list[str]]:
    """Pairs of .npy files: inputs, and one target for each."""
    heads: dict[str, np.ndarray] = {}
    passed = []
    for path in sorted(folder.glob("*.npy")):
        try:
            heads[path.name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError):
            passed.append(f"{path.name} is not an array of numbers that can be read")
    inputs = [name for name, array in heads.items() if array.ndim >= 2]
    found = []
    for name in inputs:
        fitting = [n for n, a in heads.items() if a.ndim == 1 and len(a) == len(heads[name])]
        if len(fitting) == 1:
            classes = class_count(heads[fitting[0]])
            found.append(Data(kind="arrays", place=name, targets=fitting[0], classes=classes))
        else:
            passed.append(
                f"{name} has {len(heads[name]):,} samples, and {len(fitting)} arrays have one"
                " target for each: there must be one"
            )
    return found, passed


def class_count(targets: np.ndarray) -> int | None:
    """How many classes whole numbers from 0 name; None where targets are amounts."""
    if targets.dtype.kind not in "iub" or not len(targets):
        return None
    low, high = int(targets.min()), int(targets.max())
    return max(2, high + 1) if low >= 0 and high < MOST_CLASSES else None


def find_tables(folder: Path) -> tuple[list[Data], list[str]]:
    """CSV files of numbers whose last column is a number or a class's name."""
    found: list[Data] = []
    passed: list[str] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                lines = zip(range(MOST_ENTRIES), csv.reader(file), strict=False)
                rows = [row for _, row in lines if row]
        except (UnicodeDecodeError, csv.Error, OSError):
            passed.append(f"{path.name} cannot be read as CSV in UTF-8")
            continue
        header = bool(rows) and not any(is_number(cell) for cell in rows[0])
        body = rows[1:] if header else rows
        if len(body) < 2 or len(body[0]) < 2:
            passed.append(f"{path.name} has fewer than two rows or columns")
            continue
        bad = next((c for row in body for c in row[:-1] if not is_number(c)), None)
        if bad is not None or any(len(row) != len(body[0]) for row in body):
            why = "rows of different length" if bad is None else f"the text {bad[:40]!r}"
            passed.append(f"{path.name} has {why}, and only its last column may be text")
            continue
        last = [row[-1].strip() for row in body]
        text = not all(is_number(cell) for cell in last)
        whole = not text and all(re.fullmatch(r"\d+", cell) for cell in last)
        several = len(set(last)) <= MOST_CLASSES and len(set(last)) < len(last)
        if text and not several:
            passed.append(f"{path.name} has {len(set(last))} texts for {len(last)} rows at its end")
            continue
        classes = len(set(last)) if several and (text or whole) else None
        found.append(Data(kind="table", place=path.name, header=header, classes=classes))
    return found, passed


def choose(found: Found, model: str | None, named: Data | None) -> tuple[Model | None, Data | None]:
    """What is to be trained, by what was asked for; what is not clear is refused."""
    models = [m for m in found.models if model is None or model in (m.reference, m.name, m.file)]
    if model is not None and not models:
        known = ", ".join(m.reference for m in found.models) or "none"
        raise ConfigError(f"--model {model} is no nn.Module of this folder: found {known}")
    if len(models) > 1:
        names = ", ".join(m.reference for m in models)
        raise ConfigError(f"there are {len(models)} models here ({names}): say --model NAME")
    sources = list(found.data) if named is None else [named]
    if len(sources) > 1:
        names = ", ".join(d.place for d in sources)
        raise ConfigError(f"there is more than one thing to train on ({names}): say --data NAME")
    if models and not sources:
        more = f" ({'; '.join(found.passed_over)})" if found.passed_over else ""
        raise ConfigError(
            f"{models[0].reference} is here, and nothing to train it on{more}: put a folder of"
            " pictures by class, idx files, .npy or .csv beside it, or name data with --data"
        )
    return (models[0] if models else None), (sources[0] if sources else None)


def begin(name: str, model: Model | None, data: Data | None) -> Beginning:
    """The first file: a configuration, or a script where data needs a few lines of Python."""
    if data is not None and data.kind in ("arrays", "table"):
        return Beginning(name="start.py", text=_script(model, data), command="python")
    text = _configuration(name, model, data)
    return Beginning(name="paceline.toml", text=text, command="paceline train")


def _configuration(name: str, model: Model | None, data: Data | None) -> str:
    kind = data.kind if data is not None else "named"
    default = {"images": "resnet18", "idx": "mnist_cnn"}.get(kind, "shallow_cnn")
    where = data.place if data is not None else "digits"
    lines = [
        "# Written by `paceline init`; yours to change. `paceline train --help` lists settings.",
        f"name = {_quoted(re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-.') or 'mine')}",
        "",
        "[workload]",
        f"model = {_quoted(model.reference if model else default)}"
        + ("" if model else "       # `paceline models` lists others"),
        f"data = {_quoted('mnist' if kind == 'idx' else where)}",
        f"batch_size = {32 if kind == 'images' else 64}               # over all machines",
    ]
    if model is not None and model.missing:
        lines += ["", "[workload.model_options]"]
        lines += [f"# {each} = ...       # {model.name} has no default" for each in model.missing]
    if kind == "idx":
        lines += ["", "[data]", f"root = {_quoted(where)}"]
    lines += ["", "[optimizer]", 'name = "adam"', "learning_rate = 0.001", 'schedule = "cosine"']
    lines += ["", "[train]", "epochs = 10"]
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _script(model: Model | None, data: Data) -> str:
    learns = "classes" if data.classes is not None else "amounts"
    body = [
        f'"""Learns the {learns} of {data.place}; written by `paceline init`, yours to change."""',
        "",
        "import numpy as np",
        "import torch",
        "from torch import nn",
        "",
        "import paceline",
    ]
    body += [f"from {Path(model.file).stem} import {model.name}"] if model else []
    body += ["", *_reading(data)]
    if model is None:
        width = "classes" if data.classes is not None else "1"
        last = [] if data.classes is not None else ["        nn.Flatten(0),"]
        body += ["", "", "def build():", "    return nn.Sequential(", "        nn.Flatten(),"]
        body += ["        nn.Linear(inputs[0].numel(), 64),", "        nn.ReLU(),"]
        body += [f"        nn.Linear(64, {width}),", *last, "    )", ""]
    loss = "nn.CrossEntropyLoss()" if data.classes is not None else "nn.MSELoss()"
    made = "build" if model is None else model.name
    if model is not None and model.missing:
        missing = ", ".join(f"{each}=..." for each in model.missing)
        made = f"lambda: {made}({missing})"
    body += [
        "",
        "work = paceline.Workload(",
        f"    model={made},",
        "    data=torch.utils.data.TensorDataset(inputs, targets),  # a fifth is held back to test",
        f"    loss={loss},",
        "    batch_size=64,",
        ")",
        'settings = {"data.validation": 0.2, "optimizer.learning_rate": 0.001}',
        "result = paceline.train(work, epochs=10, settings=settings)",
        "print(result.run)",
        "",
    ]
    return "\n".join(body)


def _reading(data: Data) -> Sequence[str]:
    if data.kind == "arrays":
        lines = [
            f"inputs = torch.tensor(np.load({_quoted(data.place)}), dtype=torch.float32)",
            f"targets = torch.tensor(np.load({_quoted(data.targets)}))",
        ]
        if data.classes is not None:
            return [*lines, "targets = targets.long()", "classes = int(targets.max()) + 1"]
        return [*lines, "targets = targets.float()"]
    skip = 1 if data.header else 0
    lines = [
        "table = np.loadtxt(",
        f"    {_quoted(data.place)}, delimiter=',', skiprows={skip}, dtype=str, comments=None,",
        "    quotechar='\"', encoding='utf-8',",
        ")",
        "inputs = torch.tensor(table[:, :-1].astype(np.float32))",
    ]
    if data.classes is not None:
        return [
            *lines,
            "names, numbers = np.unique(table[:, -1], return_inverse=True)",
            "targets, classes = torch.tensor(numbers), len(names)",
        ]
    return [*lines, "targets = torch.tensor(table[:, -1].astype(np.float32))"]
