"""A run's model says on files what it said in training; old checkpoints are read too."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.commands.evaluate import command as evaluate_command
from paceline.commands.predict import command as predict_command
from paceline.data import DataRequest, open_dataset
from paceline.errors import DataError, ModelError, RunDirectoryError
from paceline.schema.checkpoint import digest_of, read_state
from paceline.serve.inputs import Preparer, read_inputs
from paceline.serve.trained import class_folder, evaluate_run, open_trained, predict_any


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def lines(*words: str) -> list[str]:
    done = CliRunner().invoke(predict_command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_every_checkpoint_says_what_the_model_takes(trained_run: Path) -> None:
    signature = read_state((trained_run / "checkpoints" / "latest").resolve()).signature
    assert signature is not None
    assert (signature.shape, signature.dtype, signature.data) == ((1, 28, 28), "float32", "digits")
    assert signature.classes == tuple("0123456789")
    assert signature.pictures is not None
    assert signature.pictures.mean == (0.3051,)


def test_an_evaluation_gives_what_training_measured(trained_run: Path) -> None:
    last = metrics(trained_run)[-1]
    found = evaluate_run(open_trained(trained_run, weights="latest"))
    assert found.accuracy == pytest.approx(last["test_accuracy"])
    assert found.loss == pytest.approx(last["test_loss"], rel=1e-4)
    assert found.top5 == pytest.approx(last["test_top5"])


def test_pictures_in_folders_of_classes_are_scored(trained_run: Path, digit_files: Path) -> None:
    words = [str(trained_run), "--data", str(digit_files), "--json"]
    done = CliRunner().invoke(evaluate_command, words, catch_exceptions=False)
    found = json.loads(done.output)
    assert found["samples"] == 40
    assert found["accuracy"] > 0.15
    # The same samples, straight from the data set: pictures lose nothing on their way.
    trained = open_trained(trained_run)
    data = open_dataset(DataRequest(name="digits", limit=40))
    inputs, targets = data.test.fetch(np.arange(40), epoch=0, augment=False)
    right = trained.outputs(inputs.numpy()).argmax(1) == targets.numpy()
    assert found["accuracy"] == pytest.approx(right.mean())


def test_an_unknown_class_is_named(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "ten").mkdir()
    with pytest.raises(DataError, match="'ten', which the model does not know"):
        evaluate_run(open_trained(trained_run), tmp_path)


def test_pictures_arrays_and_tables_get_the_same_answer(
    trained_run: Path, digit_files: Path, tmp_path: Path
) -> None:
    picture = next((digit_files / "3").iterdir())
    told = lines(str(trained_run), str(picture), "--json")
    expected = json.loads(told[0])
    assert [len(expected["guesses"]), len(expected["outputs"])] == [5, 10]
    assert sum(guess["probability"] for guess in expected["guesses"]) <= 1.0 + 1e-9

    pixels = np.asarray(Image.open(picture))
    np.save(tmp_path / "bytes.npy", pixels)
    table = tmp_path / "pixels.csv"
    names = ",".join(f"p{n}" for n in range(784))
    table.write_text(names + "\n" + ",".join(map(str, pixels.ravel())) + "\n")
    prepared = Preparer(open_trained(trained_run).signature).picture(picture.read_bytes())
    np.save(tmp_path / "floats.npy", prepared)
    words = [str(tmp_path / "bytes.npy"), str(tmp_path / "floats.npy")]
    for line in lines(str(trained_run), *words, "--json"):
        assert json.loads(line)["outputs"] == pytest.approx(expected["outputs"], abs=1e-5)
    (line,) = lines(str(trained_run), str(table), "--pixels", "--json")
    assert json.loads(line)["outputs"] == pytest.approx(expected["outputs"], abs=1e-5)
    folder = lines(str(trained_run), str(digit_files / "3"))
    assert len(folder) == len(list((digit_files / "3").iterdir()))
    assert folder[0].startswith(f"{digit_files / '3'}/")


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (lambda p: p.write_text("no picture"), "a.png", "none that is known"),
        (lambda p: np.save(p, np.zeros((2, 5))), "a.npy", r"\[2, 5\] do not fit the model"),
        (lambda p: np.save(p, np.array(["x"])), "a.npy", "holds no numbers"),
        (lambda p: p.write_text("1,2\n3,x\n"), "a.csv", "line 2"),
        (lambda p: p.write_text("a,b\n"), "a.csv", "holds no numbers"),
        (lambda p: p.write_text("1,2\n3\n"), "a.csv", "line 2 has 1 numbers"),
        (lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "a.npy", "is no .npy of numbers"),
        (lambda p: np.save(p, np.full((2, 784), 255.0)), "a.npy", "look like pixels .* --pixels"),
        (lambda p: np.save(p, np.zeros((0, 28, 28))), "a.npy", "holds no sample"),
        (lambda p: p.write_text("1,x\n3,4\n"), "a.csv", "line 1: could not convert"),
        (lambda p: p.write_text("1;2\n3;4\n"), "a.csv", "line 2.* commas between them"),
        (lambda p: p.mkdir(), "folder", "no picture: give .npy and .csv files by name"),
    ],
)
def test_files_that_are_no_input_are_named(
    trained_run: Path, tmp_path: Path, write: Callable[[Path], object], name: str, message: str
) -> None:
    write(tmp_path / name)
    preparer = Preparer(open_trained(trained_run).signature)
    with pytest.raises(DataError, match=message):
        list(read_inputs(preparer, [tmp_path / name]))


def test_numbers_that_may_be_pixels_are_what_the_user_says(trained_run: Path) -> None:
    trained = open_trained(trained_run)
    preparer = Preparer(trained.signature)
    bytes_of = np.random.default_rng(0).integers(0, 256, (2, *trained.signature.shape), np.uint8)
    as_pixels = preparer.given(bytes_of)
    assert np.array_equal(preparer.given(bytes_of.astype(np.float64), True), as_pixels)
    assert np.array_equal(preparer.given(bytes_of.astype(np.float64), False), bytes_of)
    assert np.array_equal(preparer.given(as_pixels), as_pixels)
    assert predict_any(trained, bytes_of) == trained.guesses(as_pixels)
    with pytest.raises(DataError, match="look like pixels"):
        predict_any(trained, torch.from_numpy(bytes_of).float())
    with pytest.raises(DataError, match="are no pixels, which are 0 to 255"):
        preparer.given(as_pixels, True)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_answers_that_are_no_numbers_are_not_told(
    trained_run: Path, tmp_path: Path, words: list[str]
) -> None:
    np.save(tmp_path / "a.npy", np.full((1, 28, 28), np.nan))
    with pytest.raises(ModelError, match=r"a.npy\[0\]: the model gives outputs that are not all"):
        lines(str(trained_run), str(tmp_path / "a.npy"), *words)
    with pytest.raises(ModelError, match="outputs that are no numbers"):
        predict_any(open_trained(trained_run), np.full((1, 1, 28, 28), np.nan))


def test_a_folder_may_hold_the_classes_or_the_data_set(
    trained_run: Path, digit_files: Path, tmp_path: Path
) -> None:
    trained = open_trained(trained_run)
    with pytest.raises(
        DataError, match=r"no folder of a class .*, nor the run's data set 'digits'"
    ):
        evaluate_run(trained, tmp_path)
    # A data set, and another one, below one folder: the first has the name of a class in it.
    shutil.copytree(digit_files, tmp_path / "3" / "val")
    shutil.copytree(digit_files, tmp_path / "3" / "train")
    (tmp_path / "other").mkdir()
    work = dataclasses.replace(trained.config.workload, data="3")
    named = dataclasses.replace(trained, config=dataclasses.replace(trained.config, workload=work))
    assert class_folder(trained, tmp_path) == tmp_path
    assert class_folder(named, tmp_path) is None
    elsewhere = dataclasses.replace(work, data=str(digit_files))
    config = dataclasses.replace(trained.config, workload=elsewhere)
    with pytest.raises(DataError, match="no folder of a class"):  # not the run's own data instead
        evaluate_run(dataclasses.replace(trained, config=config), tmp_path / "other")


def test_a_checkpoint_without_a_signature_asks_the_data(trained_run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(trained_run, old, symlinks=True)
    for state in old.glob("checkpoints/step-*/state.json"):
        data = json.loads(state.read_text())
        del data["signature"]
        state.write_text(json.dumps(data | {"digest": digest_of(data)}))
    expected = open_trained(trained_run)
    found = open_trained(old)
    assert found.state.signature is None
    assert found.signature == expected.signature


def test_runs_that_cannot_answer_say_why(tmp_path: Path, trained_run: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(trained_run / "config.toml", bare)
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        open_trained(bare)
    with pytest.raises(RunDirectoryError, match="no best weights"):
        open_trained(bare, weights="best")
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        open_trained(tmp_path)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), functional.cross_entropy])
def test_objects_of_a_program_answer_in_it(tmp_path: Path, loss: Any) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 3), torch.randint(0, 4, (64,))
    data = TensorDataset(inputs, targets)
    result = paceline.train(
        paceline.Workload(model=lambda: Odd(), data=data, loss=loss, batch_size=16),
        epochs=1,
        settings={"local.strategy": "sequential", "numerics.precision": "fp32"},
        run=tmp_path / "run",
        silent=True,
    )
    model = result.load_model(Odd()).eval()
    found = result.predict(inputs[:2])
    with torch.no_grad():
        expected = model(inputs[:2]).softmax(1)
    for guesses, row in zip(found, expected, strict=True):
        assert guesses[0].label == str(int(row.argmax()))
        assert guesses[0].probability == pytest.approx(float(row.max()), rel=1e-5)
    assert result.predict([]) == []
    with pytest.raises(ModelError, match="object of a Python program"):
        open_trained(result.run)
    picture = tmp_path / "x.png"
    picture.write_bytes(b"x")
    with pytest.raises(DataError, match="code of its own"):
        result.predict([picture])


class TwoInputs(Odd):
    def forward(self, inputs: torch.Tensor, hour: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(inputs) + hour.unsqueeze(1)  # type: ignore[no-any-return]


def price(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, hour, targets = batch
    return functional.cross_entropy(model(inputs, hour), targets)


def test_models_of_two_inputs_are_refused(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 3), torch.rand(32), torch.randint(0, 4, (32,)))
    result = paceline.train(
        paceline.Workload(model=lambda: TwoInputs(), data=data, step=price, batch_size=16),
        epochs=1,
        settings={"local.strategy": "sequential", "numerics.precision": "fp32"},
        run=tmp_path / "run",
        silent=True,
    )
    trained = open_trained(result.run, factory=lambda: TwoInputs())
    with pytest.raises(ModelError, match=r"missing 1 .* only models of one input are predicted"):
        trained.outputs(np.zeros((2, 3), np.float32))
    with pytest.raises(ModelError, match=r"trained by the step .*price"):
        result.predict(torch.zeros(2, 3))
