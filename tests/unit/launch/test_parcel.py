"""Objects on their way to other processes: what arrives is what was sent, or it is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import UnsupportedError
from paceline.launch.parcel import receive, send


@pytest.fixture(autouse=True)
def _same_path() -> Any:
    before = list(sys.path)
    yield
    sys.path[:] = before


def there_and_back(parts: dict[str, Any]) -> dict[str, Any]:
    descriptor = send(parts)
    try:
        return receive(descriptor)
    finally:
        os.close(descriptor)


def test_tensors_arrays_and_functions_arrive() -> None:
    tensors = {
        "floats": torch.randn(3, 5),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "bf16": torch.ones(4, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "one": torch.tensor(7),
        "none": torch.empty(0, 3),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    weight = torch.nn.Parameter(torch.ones(2))
    factor = 3
    found = there_and_back(
        {"data": tensors, "array": np.arange(5), "model": weight, "loss": lambda x: x * factor}
    )
    for name, tensor in tensors.items():
        assert found["data"][name].dtype == tensor.dtype
        assert torch.equal(found["data"][name], tensor), name
    assert np.array_equal(found["array"], np.arange(5))
    assert isinstance(found["model"], torch.nn.Parameter)
    assert found["loss"](2) == 6


def test_what_one_changes_the_others_do_not_see() -> None:
    descriptor = send({"data": torch.zeros(4)})
    try:
        first, second = receive(descriptor)["data"], receive(descriptor)["data"]
        first += 1
        assert torch.equal(second, torch.zeros(4))
        assert torch.equal(receive(descriptor)["data"], torch.zeros(4))
    finally:
        os.close(descriptor)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^the data of this .* cannot be sent .*lock.*'threads'"
    ):
        send({"model": torch.nn.Linear, "data": threading.Lock()})


def test_what_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("def build():\n    return 1\n")
    sys.path.insert(0, str(tmp_path))
    import gone  # type: ignore[import-not-found]

    descriptor = send({"model": gone.build})
    del sys.modules["gone"], sys.path[0]
    (tmp_path / "gone.py").unlink()
    try:
        with pytest.raises(UnsupportedError, match="cannot be opened in another process"):
            receive(descriptor)
    finally:
        os.close(descriptor)


def test_another_process_finds_the_programs_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def build():\n    return 41\n")
    sys.path.insert(0, str(tmp_path))
    import beside  # type: ignore[import-not-found]

    descriptor = send({"model": lambda: beside.build() + 1})
    del sys.modules["beside"]
    code = "import sys; from paceline.launch.parcel import receive; "
    code += "print(receive(int(sys.argv[1]))['model']())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(descriptor)],
            pass_fds=(descriptor,), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    assert done.stdout.strip() == "42", done.stderr
