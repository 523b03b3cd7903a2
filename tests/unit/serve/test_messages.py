"""Requests become inputs, and no number becomes another on the way."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("orjson")

from paceline.errors import ConfigError
from paceline.schema.signature import Pictures, Signature
from paceline.schema.version import Compared, Origin, Version
from paceline.serve import messages
from paceline.serve.refusals import RefusalError


def about(dtype: str = "float32", shape: tuple[int, ...] = (3,)) -> Version:
    return Version(
        kind="onnx",
        made="",
        signature=Signature(shape=shape, dtype=dtype),
        output_shape=(2,),
        origin=Origin(run="r", update=1, epoch=1),
        compared=Compared(samples=1, largest=0.0, tolerance=0.0),
    )


def instances(*rows: Any) -> bytes:
    return json.dumps({"instances": rows}).encode()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_numbers_keep_their_type(dtype: str) -> None:
    asked = messages.tensorflow_request(instances([1, 0, 1]), about(dtype))
    assert asked.numbers is not None
    assert asked.numbers.dtype == dtype
    assert asked.numbers.tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        ("int64", [0.5, 1, 2]),
        ("uint8", [-1, 1, 2]),
        ("uint8", [256, 1, 2]),
        ("bool", [2, 1, 0]),
        ("float32", [1e300, 1, 2]),
        ("float32", [None, 1, 2]),
        ("int64", ["1", "2", "3"]),
        ("int64", [None, 1, 2]),
        ("int64", [2**70, 1, 2]),
    ],
)
def test_numbers_that_would_change_are_refused(dtype: str, row: list[Any]) -> None:
    with pytest.raises(RefusalError) as refused:
        messages.tensorflow_request(instances(row), about(dtype))
    assert refused.value.status == 400
    tensor = {"name": "input", "datatype": messages.DATATYPES[dtype], "shape": [1, 3], "data": row}
    with pytest.raises(RefusalError) as refused:
        messages.v2_request(json.dumps({"inputs": [tensor]}).encode(), {}, about(dtype))
    assert refused.value.status == 400


def test_three_grey_pictures_are_not_one_in_colour() -> None:
    grey = np.zeros((3, 4, 4)).tolist()
    with pytest.raises(RefusalError, match="do not fit the model"):
        messages.tensorflow_request(instances(*grey), about(shape=(3, 4, 4)))
    found = messages.tensorflow_request(instances(*grey), about(shape=(1, 4, 4))).numbers
    assert found is not None
    assert found.shape == (3, 1, 4, 4)


def test_binary_tensors_of_the_wrong_length_are_refused() -> None:
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 3]}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 12}}]}).encode()
    headers = {messages.HEADER: str(len(head))}
    asked = messages.v2_request(head + np.float32([1, 2, 3]).tobytes(), headers, about())
    assert asked.numbers is not None
    assert asked.numbers.tolist() == [[1, 2, 3]]
    for rest in (b"", b"\0" * 11, b"\0" * 13):
        with pytest.raises(RefusalError, match="bytes follow the JSON"):
            messages.v2_request(head + rest, headers, about())
    superscript = "\u00b31"  # a digit, and yet no number
    for length in (superscript, "9" * 5000, "-1", str(len(head) + 1)):
        with pytest.raises(RefusalError, match="must be the length of the JSON"):
            messages.v2_request(head, {messages.HEADER: length}, about())
    odd = json.dumps({"inputs": [tensor | {"parameters": [1]}]}).encode()
    with pytest.raises(RefusalError, match="must be a table"):
        messages.v2_request(odd, {}, about())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"shape": (0, 3)},
        {"shape": (2**20, 2**20)},
        {"pictures": Pictures(size=4, channels=3, mean=(0.1,), deviation=(0.1,))},
    ],
)
def test_versions_that_nobody_could_ask_are_refused(change: dict[str, Any]) -> None:
    good = about()
    with pytest.raises(ConfigError, match=r"cannot be served|must have sizes|must fit it"):
        dataclasses.replace(good, signature=dataclasses.replace(good.signature, **change))
