"""What is exported says what the model says, is whole, and tells where it came from."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.commands.export import command
from paceline.errors import ConfigError, DataError, ModelError, StorageError
from paceline.schema.codec import read_json, write_json
from paceline.schema.version import Serving, Version
from paceline.serve import versions
from paceline.serve.export import compared, export
from paceline.serve.trained import open_trained
from paceline.serve.versions import (
    read_version,
    served_numbers,
    stable_before,
    version_numbers,
    write_next,
)


@pytest.mark.slow
def test_onnx_gives_the_models_outputs_for_any_batch(trained_run: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    to = tmp_path / "models" / "digits"
    words = [str(trained_run), "--to", str(to)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.output.startswith(f"{to / '1'}: onnx, weights of update ")
    version = read_version(to / "1")
    assert (version.kind, version.output_shape, version.tells_classes) == ("onnx", (10,), True)
    assert version.compared.samples == 32
    assert version.compared.largest <= version.compared.tolerance
    assert version.origin.run == str(trained_run)
    assert 0 < version.origin.metrics["test_accuracy"] <= 1
    session = runtime.InferenceSession(str(to / "1" / "model.onnx"))
    trained = open_trained(trained_run)
    for count in (1, 7):
        inputs = np.random.default_rng(count).standard_normal((count, 1, 28, 28), np.float32)
        (found,) = session.run(["output"], {"input": inputs})
        np.testing.assert_allclose(found, trained.outputs(inputs), atol=1e-4, rtol=1e-4)


def test_versions_count_up_and_leave_no_parts(exported: Path, trained_run: Path) -> None:
    folder = exported.parent
    second, _ = export(open_trained(trained_run, weights="latest"), "safetensors", folder)
    try:
        assert [exported.name, second.name] == ["1", "2"]
        assert version_numbers(folder) == [1, 2]
        assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]
        assert (second / "model.safetensors").stat().st_mode & 0o777 == 0o644
    finally:
        shutil.rmtree(second)


class Counting(nn.Module):
    """Python that torch.export cannot see: every call gives another output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(inputs) * self.calls  # type: ignore[no-any-return]


class Fixed(nn.Module):
    """For batches of two and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.reshape(2, 3))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_export_that_says_something_else_is_refused(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(64, 3), torch.randint(0, 4, (64,)))
    result = paceline.train(
        paceline.Workload(model=lambda: Counting(), data=data, batch_size=32),
        epochs=1,
        settings={"local.strategy": "sequential"},
        run=tmp_path / "run",
        silent=True,
    )
    np.save(tmp_path / "x.npy", np.ones((8, 3), np.float32))
    to = tmp_path / "models" / "counting"
    trained = open_trained(result.run, factory=Counting)
    with pytest.raises(ModelError, match="differ from the model's"):
        export(trained, "torch", to, samples=(tmp_path / "x.npy",))
    assert version_numbers(to) == []
    assert list(to.iterdir()) == []
    fixed = open_trained(result.run, factory=Fixed)
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    with pytest.raises(ModelError, match="for batches of any size"):
        export(fixed, "torch", to, samples=(tmp_path / "x.npy",))
    with pytest.raises(DataError, match="give some with --samples"):
        export(trained, "torch", to)


def test_small_differences_are_the_order_of_sums() -> None:
    expected = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    assert compared(lambda x: expected[: len(x)] * (1 + 1e-6), expected, expected).samples == 8
    with pytest.raises(ModelError, match="differ"):
        compared(lambda x: expected[: len(x)] * 1.01, expected, expected)
    with pytest.raises(ModelError, match="differ"):
        compared(lambda x: expected[: len(x)] * np.nan, expected, expected)
    with pytest.raises(ModelError, match="shape"):
        compared(lambda x: expected[:2], expected, expected)


def test_a_full_disk_costs_the_new_version_alone(exported: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "model.onnx").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match="No space left on device"):
        write_next(exported.parent, fill)
    assert [p.name for p in exported.parent.iterdir()] == ["1"]


def test_a_disk_that_takes_no_more_is_named(trained_run: Path, exported: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))  # bytes of a file
    try:
        with pytest.raises(StorageError, match="those that are there are as they were"):
            export(open_trained(trained_run), "safetensors", exported.parent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in exported.parent.iterdir()] == ["1"]


@pytest.mark.parametrize("name", ["..", "a b", ".hidden", "", "x" * 101, "ä"])
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be letters, digits"):
        versions.checked_name(name)


def test_damage_and_other_files_are_named(exported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "1"
    shutil.copytree(exported, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="its checksum differs"):
        read_version(copy)
    good = read_json(Version, exported / "version.json")
    outside = {"../../secret": "0", **good.files}
    write_json(copy / "version.json", dataclasses.replace(good, files=outside))
    with pytest.raises(ModelError, match="which is no file of it"):
        read_version(copy)
    (copy / "version.json").write_text("{}")
    with pytest.raises(ModelError, match="lacks the key"):
        read_version(copy)
    (copy / "version.json").unlink()
    with pytest.raises(ModelError, match="does not exist"):
        read_version(copy)


def test_policies_and_labels_choose_versions() -> None:
    assert served_numbers(Serving(), [1, 2, 9]) == [9]
    assert served_numbers(Serving(policy="all"), [1, 2]) == [1, 2]
    assert served_numbers(Serving(policy="specific", versions=(1, 7)), [1, 2]) == [1]
    assert served_numbers(Serving(labels={"stable": 1, "old": 5}), [1, 2, 3]) == [1, 3]
    assert stable_before(Serving(), [1, 2, 3]) == 2
    assert stable_before(Serving(labels={"stable": 2}), [1, 2, 3]) == 1
    with pytest.raises(ConfigError, match="no version before 1"):
        stable_before(Serving(labels={"stable": 1}), [1, 2, 3])
