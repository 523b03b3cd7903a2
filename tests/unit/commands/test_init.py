"""`paceline init`: what it makes of a folder; what it writes can be used as it is."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from paceline.commands.init import command
from paceline.config import config_from
from paceline.data.mnist import FILES
from paceline.errors import ConfigError
from paceline.workflow.starting import class_count, look, read_python

NET = """
from torch import nn
class Block(nn.Module):
    pass
class Net(nn.Module):
    def __init__(self, channels, classes, width{default}):
        super().__init__()
        self.block = Block()
"""


def init(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(command, [str(folder), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def settings(folder: Path, name: str = "paceline.toml") -> dict[str, object]:
    found = tomllib.loads((folder / name).read_text())
    config_from(found)
    return found["workload"]  # type: ignore[no-any-return]


def pictures(folder: Path, *classes: str) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / name / "one.jpg")


def test_an_empty_folder_begins_with_the_digits(tmp_path: Path) -> None:
    assert "next: " in init(tmp_path)
    assert settings(tmp_path)["data"] == "digits"


def test_pictures_and_a_model(tmp_path: Path) -> None:
    pictures(tmp_path / "photographs" / "train", "cat", "dog")
    (tmp_path / "net.py").write_text(NET.format(default="=8"))
    said = init(tmp_path)
    assert "net.py:Net" in said
    assert "fill in" not in said
    work = settings(tmp_path)
    assert (work["model"], work["data"]) == ("net.py:Net", "photographs")


def test_arguments_that_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    pictures(tmp_path / "photographs", "cat", "dog")
    (tmp_path / "net.py").write_text(NET.format(default=""))
    assert "fill in first: width of Net" in init(tmp_path)
    assert "# width = ..." in (tmp_path / "paceline.toml").read_text()


def test_idx_files(tmp_path: Path) -> None:
    (tmp_path / "clothes").mkdir()
    for name in FILES:
        (tmp_path / "clothes" / f"{name}.gz").touch()
    init(tmp_path)
    settings(tmp_path)
    text = (tmp_path / "paceline.toml").read_text()
    assert 'data = "mnist"' in text
    assert 'root = "clothes"' in text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text("mine")
    with pytest.raises(ConfigError, match="left as it is"):
        init(tmp_path)
    assert (tmp_path / "paceline.toml").read_text() == "mine"
    assert "other.toml" in init(tmp_path, "--to", "other.toml")
    settings(tmp_path, "other.toml")


def test_what_is_not_clear_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET.format(default="=8"))
    with pytest.raises(ConfigError, match="nothing to train it on"):
        init(tmp_path)
    pictures(tmp_path / "one", "cat", "dog")
    pictures(tmp_path / "two", "cat", "dog")
    with pytest.raises(ConfigError, match="--data NAME"):
        init(tmp_path)
    with pytest.raises(ConfigError, match=r"no nn\.Module"):
        init(tmp_path, "--model", "other.py", "--data", "two")
    init(tmp_path, "--data", "two")
    assert settings(tmp_path)["data"] == "two"


def test_a_script_that_trains_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfor _ in []:\n    loss.backward()\n")
    assert "next: paceline run train.py" in init(tmp_path)
    assert not (tmp_path / "paceline.toml").exists()
    (tmp_path / "train.py").write_text("def main():\n    loss.backward()\nmain()\n")
    assert read_python(tmp_path / "train.py") == ([], True)
    # One that only trains when it is run can lend its model.
    guarded = (
        '"""Mine."""'
        + NET.format(default="=8")
        + "\nif __name__ == '__main__':\n    loss.backward()\n"
    )
    (tmp_path / "train.py").write_text(guarded)
    models, is_loop = read_python(tmp_path / "train.py")
    assert [model.name for model in models] == ["Net"]
    assert is_loop


def test_tables_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("name,age\nAda,36\nAlan,41\n")
    (tmp_path / "short.csv").write_text("1,2\n")
    (tmp_path / "names.csv").write_text("1,Ada\n2,Alan\n")
    (tmp_path / "objects.npy").write_bytes(b"no array")
    found = look(tmp_path)
    assert found.data == ()
    assert "2 texts for 2 rows" in found.passed_over[1]
    assert "the text 'Ada'" in found.passed_over[2]
    assert len(found.passed_over) == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nosuch", "unknown data set 'nosuch'"),
        ("empty", "without pictures by class"),
        ("notes.txt", "is a .txt"),
        ("missing.py:points", "there is no file"),
        ("tables", "name one of its files, as tables/text.csv"),
        ("tables/text.csv", "the text 'oops'"),
    ],
)
def test_data_that_is_not_there_is_no_beginning(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "text.csv").write_text("1,2,a\n3,oops,b\n5,6,a\n")
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ConfigError, match=said):
        init(tmp_path, "--data", name)
    assert not list(tmp_path.glob("*.toml"))


def test_data_that_lies_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "rows.csv").write_text("1,2,a\n3,4,b\n5,6,a\n")
    init(tmp_path, "--data", "tables/rows.csv")
    assert "'tables/rows.csv'" in (tmp_path / "start.py").read_text().replace('"', "'")
    (tmp_path / "points.py").write_text("def points(): ...")
    init(tmp_path, "--data", "points.py:points")
    assert settings(tmp_path)["data"] == "points.py:points"


def test_whole_numbers_are_classes_and_others_amounts() -> None:
    assert class_count(np.array([0, 2, 1])) == 3
    assert class_count(np.array([-1, 2])) is None
    assert class_count(np.array([0.5, 2])) is None
    assert class_count(np.array([0, 50_000])) is None


def test_the_scripts_of_arrays_and_tables_train(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).random((120, 3)).astype(np.float32)
    kinds = np.where(numbers.sum(axis=1) > 1.5, "large", '"#small"')
    for name in ("table", "arrays"):
        (tmp_path / name).mkdir()
    rows = [f"{a},{b},{c},{kind}" for (a, b, c), kind in zip(numbers, kinds, strict=True)]
    (tmp_path / "table" / "sizes.csv").write_text("\n".join(["a,b,c,size", *rows]))
    np.save(tmp_path / "arrays" / "inputs.npy", numbers)
    np.save(tmp_path / "arrays" / "wanted.npy", numbers.sum(axis=1))
    for name, key in (("table", "test_accuracy"), ("arrays", "test_loss")):
        assert "next: " in init(tmp_path / name)
        script = tmp_path / name / "start.py"
        script.write_text(script.read_text().replace("epochs=10", "epochs=1"))
        done = subprocess.run(
            [sys.executable, "start.py"], cwd=script.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert key in (script.parent / "runs" / "latest" / "metrics.jsonl").read_text()
