"""The protocols: what a request asks for, and how the answer is written.

TensorFlow Serving's REST, the Open Inference Protocol (v2, JSON and binary), and pictures as they
are. Pure: bytes in, inputs out; outputs in, bytes out.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from paceline.errors import DataError, shown
from paceline.schema.version import DATATYPES, INPUT, OUTPUT, Version
from paceline.serve.answers import TOP, top_guesses
from paceline.serve.inputs import typed, with_batch
from paceline.serve.refusals import RefusalError

HEADER = "inference-header-content-length"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a request has: numbers, or pictures that are still to be decoded."""

    numbers: np.ndarray | None = None
    pictures: tuple[bytes, ...] = ()
    named: bool = False
    """The answer names the output, as `inputs` of TensorFlow Serving asks for columns."""
    request_id: str | None = None
    binary: bool = False
    """The outputs are wanted as bytes."""


def read_json(body: bytes) -> Any:
    """A JSON body; orjson refuses nesting deeper than 1024, numpy than 64."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if body[:100].lstrip()[:1] not in (b"{", b"["):
            raise RefusalError(
                400, "the body is not JSON: a picture needs its content type, as image/png"
            ) from None
        raise RefusalError(400, f"the body is not valid JSON: {error}") from None


def tensorflow_request(body: bytes, about: Version) -> Request:
    """`{"instances": [...]}` or `{"inputs": ...}`."""
    data = read_json(body)
    if not isinstance(data, dict) or ("instances" in data) == ("inputs" in data):
        raise RefusalError(400, 'the body must be {"instances": [...]} or {"inputs": ...}')
    name = data.get("signature_name", "serving_default")
    if name not in ("serving_default", ""):
        raise RefusalError(400, f"there is no signature {shown(name)}: leave signature_name out")
    if "inputs" in data:
        values = data["inputs"]
        if isinstance(values, dict) and "b64" not in values:
            values = _only(values)
        values = [values] if isinstance(values, dict) else values
        return _rows(values, about, named=True)
    rows = data["instances"]
    if not isinstance(rows, list) or not rows:
        raise RefusalError(400, "instances must be a list of at least one sample")
    if isinstance(rows[0], dict) and "b64" not in rows[0]:
        rows = [_only(row) for row in rows]
    return _rows(rows, about)


def classify_request(body: bytes, about: Version) -> Request:
    """`{"examples": [{"input": [...]}, ...]}`."""
    data = read_json(body)
    examples = data.get("examples") if isinstance(data, dict) else None
    if not isinstance(examples, list) or not examples:
        raise RefusalError(400, 'the body must be {"examples": [{"input": [...]}, ...]}')
    return _rows([_only(row) for row in examples], about)


def _only(row: Any) -> Any:
    if not isinstance(row, dict) or list(row) != [INPUT]:
        raise RefusalError(400, f'a sample must be a list of numbers, or {{"{INPUT}": ...}}')
    return row[INPUT]


def _rows(rows: Any, about: Version, *, named: bool = False) -> Request:
    if not isinstance(rows, list) or not rows:
        raise RefusalError(400, "there must be a list of at least one sample")
    if isinstance(rows[0], dict):
        return Request(pictures=tuple(_decoded(row) for row in rows), named=named)
    return Request(numbers=shaped(_array(rows, about), about), named=named)


def _array(values: Any, about: Version) -> np.ndarray:
    """Numbers of the model's type; what would become another number is refused."""
    dtype = np.dtype(about.signature.dtype)
    try:
        if dtype.kind == "f":
            with np.errstate(over="raise"):
                found = np.asarray(values, dtype=dtype)
            if np.isnan(found).any():  # JSON has no NaN: numpy makes it of null
                raise DataError("null is no number")
            return found
        return typed(np.asarray(values), about.signature.dtype)
    except DataError as error:
        raise RefusalError(400, str(error)) from None
    except FloatingPointError:
        raise RefusalError(
            400, f"a number is too large for {dtype}, which the model takes"
        ) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise RefusalError(400, f"the samples are no numbers of one shape: {error}") from None


def _decoded(row: Any) -> bytes:
    if not isinstance(row, dict) or list(row) != ["b64"] or not isinstance(row["b64"], str):
        raise RefusalError(400, 'a picture must be {"b64": "..."}')
    try:
        return base64.b64decode(row["b64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusalError(400, f"b64 is not base64: {error}") from None


def shaped(numbers: np.ndarray, about: Version) -> np.ndarray:
    """Numbers of the model's type, with the batch first."""
    try:
        return with_batch(numbers, about.signature, single=False)
    except DataError as error:
        raise RefusalError(400, str(error)) from None


def v2_request(body: bytes, headers: Mapping[str, str], about: Version) -> Request:
    """A request of the Open Inference Protocol, with its tensor in the JSON or behind it."""
    length = headers.get(HEADER)
    text, rest = body, memoryview(b"")
    if length is not None:
        if not length.isdecimal() or len(length) > 15 or int(length) > len(body):
            raise RefusalError(400, f"{HEADER} = {shown(length)} must be the length of the JSON")
        text, rest = body[: int(length)], memoryview(body)[int(length) :]
    data = read_json(text)
    inputs = data.get("inputs") if isinstance(data, dict) else None
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise RefusalError(400, f"inputs must be a list of one tensor, {INPUT!r}")
    tensor = inputs[0]
    if tensor.get("name") != INPUT:
        raise RefusalError(400, f"there is no input {shown(tensor.get('name'))}: it is {INPUT!r}")
    outputs = data.get("outputs") or [{"name": OUTPUT}]
    if not isinstance(outputs, list) or [_name(one) for one in outputs] != [OUTPUT]:
        raise RefusalError(400, f"the only output is {OUTPUT!r}")
    parameters, wanted = _parameters(data), _parameters(outputs[0]).get("binary_data")
    request_id = data.get("id")
    common: dict[str, Any] = {
        "request_id": request_id if isinstance(request_id, str) else None,
        "binary": bool(parameters.get("binary_data_output") if wanted is None else wanted),
    }
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise RefusalError(400, f"shape = {shown(shape)} must be a list of whole numbers")
    size = _parameters(tensor).get("binary_data_size")
    if tensor.get("datatype") == "BYTES":
        return Request(pictures=_byte_strings(tensor, size, rest, math.prod(shape)), **common)
    expected = DATATYPES.get(about.signature.dtype)
    if tensor.get("datatype") != expected:
        raise RefusalError(
            400, f"datatype = {shown(tensor.get('datatype'))} must be {expected}, or BYTES"
        )
    numbers = _tensor(tensor, size, rest, about)
    if numbers.size != math.prod(shape):
        raise RefusalError(400, f"{numbers.size} numbers do not fill the shape {shape}")
    return Request(numbers=shaped(numbers.reshape(shape), about), **common)


def _parameters(table: dict[str, Any]) -> dict[str, Any]:
    found = table.get("parameters") or {}
    if not isinstance(found, dict):
        raise RefusalError(400, f"parameters = {shown(found)} must be a table of keys")
    return found


def _name(one: Any) -> Any:
    return one.get("name") if isinstance(one, dict) else None


def _tensor(tensor: dict[str, Any], size: Any, rest: memoryview, about: Version) -> np.ndarray:
    dtype = np.dtype(about.signature.dtype)
    if size is not None:
        if type(size) is not int or size != len(rest) or size % dtype.itemsize:
            raise RefusalError(
                400, f"binary_data_size = {shown(size)}, but {len(rest)} bytes follow the JSON"
            )
        return np.frombuffer(rest, dtype=dtype.newbyteorder("<"))
    return _array(tensor.get("data"), about).ravel()


def _byte_strings(
    tensor: dict[str, Any], size: Any, rest: memoryview, count: int
) -> tuple[bytes, ...]:
    """Pictures: each with its length in four bytes before it, or in JSON as base64."""
    if size is None:
        data = tensor.get("data")
        if not isinstance(data, list) or len(data) != count:
            raise RefusalError(400, f"data must be a list of {count} pictures in base64")
        return tuple(_decoded({"b64": one}) for one in data)
    found: list[bytes] = []
    place = 0
    while place + 4 <= len(rest) and len(found) < count:
        (length,) = struct.unpack_from("<I", rest, place)
        found.append(bytes(rest[place + 4 : place + 4 + length]))
        place += 4 + length
    if size != len(rest) or place != len(rest) or len(found) != count or not count:
        raise RefusalError(400, f"the bytes behind the JSON are not {count} texts and lengths")
    return tuple(found)


_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def tensorflow_answer(outputs: np.ndarray, named: bool) -> bytes:
    return orjson.dumps(
        {"outputs" if named else "predictions": np.ascontiguousarray(outputs)}, option=_NUMPY
    )


def classify_answer(outputs: np.ndarray, about: Version) -> bytes:
    rows = top_guesses(outputs, about.signature, TOP)
    return orjson.dumps({"results": [[[g.label, g.probability] for g in row] for row in rows]})


def picture_answer(outputs: np.ndarray, about: Version, name: str, number: int) -> bytes:
    """The likeliest classes of one picture; its outputs where they are no scores of classes."""
    found: dict[str, Any] = {"model": name, "version": str(number)}
    if about.tells_classes:
        (guesses,) = top_guesses(outputs, about.signature, TOP)
        found["predictions"] = [
            {"label": one.label, "probability": one.probability} for one in guesses
        ]
    else:
        found["outputs"] = outputs[0].tolist()
    return orjson.dumps(found)


def v2_answer(
    outputs: np.ndarray, asked: Request, name: str, number: int
) -> tuple[bytes, dict[str, str]]:
    """The body of an inference response, and the headers that it needs."""
    outputs = np.ascontiguousarray(outputs)
    tensor: dict[str, Any] = {
        "name": OUTPUT,
        "datatype": DATATYPES.get(str(outputs.dtype), "FP32"),
        "shape": list(outputs.shape),
    }
    answer: dict[str, Any] = {"model_name": name, "model_version": str(number)}
    if asked.request_id is not None:
        answer["id"] = asked.request_id
    if not asked.binary:
        answer["outputs"] = [tensor | {"data": outputs.ravel()}]
        return orjson.dumps(answer, option=_NUMPY), {"content-type": "application/json"}
    data = outputs.tobytes()
    answer["outputs"] = [tensor | {"parameters": {"binary_data_size": len(data)}}]
    text = orjson.dumps(answer)
    headers = {"content-type": "application/octet-stream", HEADER: str(len(text))}
    return text + data, headers


def v2_metadata(name: str, numbers: list[int], about: Version) -> dict[str, Any]:
    """What the Open Inference Protocol tells of a model."""
    return {
        "name": name,
        "versions": [str(number) for number in numbers],
        "platform": {"onnx": "onnxruntime_onnx"}.get(about.kind, "pytorch_safetensors"),
        "inputs": [
            {
                "name": INPUT,
                "datatype": DATATYPES.get(about.signature.dtype, "FP32"),
                "shape": [-1, *about.signature.shape],
            }
        ],
        "outputs": [
            {
                "name": OUTPUT,
                "datatype": DATATYPES.get(about.output_dtype, "FP32"),
                "shape": [-1, *about.output_shape],
            }
        ],
    }


def tensorflow_metadata(name: str, number: int, about: Version) -> dict[str, Any]:
    """What TensorFlow Serving tells of a model."""

    def tensor(kind: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        sizes = [{"size": str(size), "name": ""} for size in (-1, *shape)]
        return {
            "dtype": {"float32": "DT_FLOAT", "float64": "DT_DOUBLE"}.get(
                dtype, f"DT_{dtype.upper()}"
            ),
            "tensor_shape": {"dim": sizes, "unknown_rank": False},
            "name": kind,
        }

    signature = {
        "inputs": {INPUT: tensor(INPUT, about.signature.dtype, about.signature.shape)},
        "outputs": {OUTPUT: tensor(OUTPUT, about.output_dtype, about.output_shape)},
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(number)},
        "metadata": {"signature_def": {"signature_def": {"serving_default": signature}}},
    }
