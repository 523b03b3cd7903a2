"""References to the user's own code, and models built from them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import models, references
from paceline.errors import ConfigError, ModelError

SOURCE = """
import torch
from torch import nn
from helper_beside import WIDTH

VALUE = 3
made = nn.Linear(2, 2)

def build(classes, channels, width=WIDTH):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 16, width), nn.Linear(width, classes))

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(4, classes)

class Outer:
    @staticmethod
    def build(**everything):
        Outer.seen = everything
        return nn.Linear(1, 1)

def plain(): return nn.Linear(2, 2)
def needs(classes, secret): return nn.Linear(2, 2)
def wrong(): return "a string"
def broken(classes): raise ValueError("no\\nluck")
def sized(image_size=1): return nn.Linear(image_size, 2)
def leaves(): raise SystemExit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "own.py").write_text(SOURCE)
    (tmp_path / "nets" / "helper_beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "module_in_cwd.py").write_text("def build(): return 1\n")
    (tmp_path / "needs_absent.py").write_text("import certainly_absent_module\n")
    (tmp_path / "bad_syntax.py").write_text("def build(:\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(4)\n")
    monkeypatch.chdir(tmp_path)
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package.module:callable", True),
        ("module:Outer.build", True),
        ("./some folder/file.py:build", True),
        ("/absolute/file.py:build", True),
        ("alexnet", False),
        ("folder/of/images", False),
        ("module:", False),
        (":build", False),
        (".py:build", False),
        ("module:1", False),
        ("folder/module:build", False),
        ("C:/images", False),
    ],
)
def test_is_reference(text: str, expected: bool) -> None:
    assert references.is_reference(text) is expected


@pytest.mark.usefixtures("folder")
def test_same_file_is_the_same_module(folder: Path) -> None:
    relative = references.resolve("nets/own.py:Net", "model")
    absolute = references.resolve(f"{folder}/nets/../nets/own.py:Net", "model")
    assert relative is absolute
    assert sys.modules[relative.__module__].Net is relative
    assert references.resolve("nets/own.py:Outer.build", "model")() is not None


@pytest.mark.usefixtures("folder")
def test_module_in_the_current_folder() -> None:
    assert references.resolve("module_in_cwd:build", "loss")() == 1
    assert sys.path[0] != str(Path.cwd())


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent_module:build", "no module 'absent_module'"),
        ("torch.absent:build", "no module 'torch.absent'"),
        ("nets/absent.py:build", "no file"),
        ("nets:build", "has no 'build'"),
        ("nets/own.py:biuld", "has no 'biuld'; it defines Net, Outer, broken, build"),
        ("nets/own.py:VALUE", "is a int, not callable"),
        ("needs_absent:build", "ModuleNotFoundError: No module named 'certainly_absent_module'"),
        ("needs_absent.py:build", "ModuleNotFoundError"),
        ("bad_syntax.py:build", "SyntaxError"),
        ("exits.py:build", "SystemExit: 4"),
        ("not a reference", "is not a reference"),
    ],
)
def test_bad_references_get_one_sentence(reference: str, message: str) -> None:
    for _ in range(2):  # a failed import leaves nothing behind that changes the message
        with pytest.raises(ConfigError) as caught:
            references.resolve(reference, "loss")
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"loss {reference!r}")
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_build_gives_what_the_signature_accepts() -> None:
    module = models.build("nets/own.py:build", classes=3, channels=2, options={"width": 7})
    assert module(torch.zeros(2, 2, 4, 4)).shape == (2, 3)
    assert module[1].out_features == 7
    assert models.build("nets/own.py:build", classes=3, channels=2)[1].out_features == 5
    assert models.build("nets/own.py:Net", classes=6, channels=1).head.out_features == 6
    assert isinstance(models.build("nets/own.py:plain", classes=6, channels=1), nn.Linear)
    sized = models.build("nets/own.py:sized", classes=2, channels=1, image_size=9)
    assert sized.in_features == 9
    models.build("nets/own.py:Outer.build", classes=6, channels=1, options={"depth": 2})
    seen = references.resolve("nets/own.py:Outer", "model").seen
    assert seen == {"classes": 6, "channels": 1, "depth": 2}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        ("build", {"widht": 3}, "did you mean 'width'"),
        ("needs", {}, "needs an argument 'secret'"),
        ("wrong", {}, "returned a str"),
        ("broken", {}, "raised ValueError: no luck"),
        ("made", {}, "finished module"),
        ("leaves", {}, "raised SystemExit: 3"),
    ],
)
def test_bad_models_get_one_sentence(
    attribute: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        models.build(f"nets/own.py:{attribute}", classes=2, channels=1, options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["sys:exit", "os:abort", "os:_exit", "os:system"])
def test_what_the_interpreter_brings_makes_no_model(reference: str) -> None:
    with pytest.raises(ConfigError, match="built-in function"):
        models.build(reference, classes=2, channels=1)


def test_objects_have_names_that_nothing_resolves() -> None:
    class Local:
        def __call__(self) -> None: ...

        def build(self) -> None: ...

    things = [Local, Local(), Local().build, lambda: None, functools.partial(print), (Local(), 3)]
    for thing in things:
        name = references.object_name(thing)
        assert references.reference_to(thing) is None
        assert references.is_object(name)
        assert references.is_reference(name)
        with pytest.raises(ConfigError, match="was an object of a Python program"):
            references.resolve(name, "model")
    assert references.object_name(things[1]).endswith("Local()")
    assert references.reference_to(models.ModelSpec) == "paceline.models.registry:ModelSpec"


def test_a_module_that_another_process_would_not_find_is_an_object(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = folder / "place" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside_script.py").write_text("def build(): return 1\n")
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    build = importlib.import_module("beside_script").build
    assert references.reference_to(build) is None
    (folder / "beside_script.py").write_text("def build(): return 2\n")
    assert references.reference_to(build) is None, "another file of that name comes first"
    monkeypatch.chdir(script.parent)
    assert references.reference_to(build) == "beside_script:build"
