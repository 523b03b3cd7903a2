"""Event files for TensorBoard, read back by a decoder of the published formats."""

from __future__ import annotations

import importlib.util
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.tensorboard import EPOCH_TAGS, TensorBoardFile, crc32c, scalar_event


def records(data: bytes) -> list[bytes]:
    """TFRecord: length, its checksum, data, its checksum."""
    found = []
    while data:
        (length, length_sum) = struct.unpack_from("<QI", data)
        assert unmask(length_sum) == crc32c(data[:8])
        body = data[12 : 12 + length]
        (body_sum,) = struct.unpack_from("<I", data, 12 + length)
        assert unmask(body_sum) == crc32c(body)
        found.append(body)
        data = data[16 + length :]
    return found


def unmask(value: int) -> int:
    value = (value - 0xA282EAD8) & 0xFFFFFFFF
    return ((value >> 17) | (value << 15)) & 0xFFFFFFFF


def message(data: bytes) -> dict[int, Any]:
    """A protobuf message: field number to value."""
    found: dict[int, Any] = {}
    while data:
        key, data = varint(data)
        field, kind = key >> 3, key & 7
        if kind == 0:
            found[field], data = varint(data)
        elif kind == 1:
            found[field], data = struct.unpack("<d", data[:8])[0], data[8:]
        elif kind == 5:
            found[field], data = struct.unpack("<f", data[:4])[0], data[4:]
        else:
            assert kind == 2
            length, data = varint(data)
            found[field], data = data[:length], data[length:]
    return found


def varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for position, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[position + 1 :]
    raise AssertionError("a number without an end")


def scalar(data: bytes) -> tuple[float, int, str, float]:
    """Wall time, step, tag, value."""
    event = message(data)
    value = message(message(event[5])[1])
    return event[1], event[2], value[1].decode(), value[2]


@pytest.mark.parametrize(
    ("data", "checksum"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_is_that_of_the_standard(data: bytes, checksum: int) -> None:
    """Figures of RFC 3720, B.4."""
    assert crc32c(data) == checksum


@given(
    tag=st.text(min_size=1),
    value=st.floats(width=32, allow_nan=False),
    step=st.integers(0, 2**40),
    wall_time=st.floats(0, 1e11),
)
def test_any_scalar_comes_back(tag: str, value: float, step: int, wall_time: float) -> None:
    assert scalar(scalar_event(tag, value, step, wall_time)) == (wall_time, step, tag, value)


def test_a_number_too_large_for_the_format_is_infinite() -> None:
    assert scalar(scalar_event("x", -1e300, 0, 0.0))[3] == -math.inf


def test_a_file_begins_with_its_version_and_holds_the_epochs(tmp_path: Path) -> None:
    board = TensorBoardFile(tmp_path / "tensorboard")
    board.add("loss/update", 0.5, step=300, wall_time=12.0)
    board.add_epoch(
        {"epoch": 2, "train_loss": 0.25, "test_loss": None, "test_accuracy": 0.75, "bytes_sent": 0}
    )
    first, *rest = records(board.path.read_bytes())
    assert message(first)[3] == b"brain.Event:2"
    assert scalar(rest[0]) == (12.0, 300, "loss/update", 0.5)
    assert [scalar(event)[1:] for event in rest[1:]] == [
        (2, EPOCH_TAGS["train_loss"], 0.25),
        (2, EPOCH_TAGS["test_accuracy"], 0.75),
        (2, EPOCH_TAGS["bytes_sent"], 0.0),
    ]
    assert "tfevents" in board.path.name


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    board = TensorBoardFile(tmp_path / "file", say=said.append)
    board.add("loss", 1.0, step=0)
    assert len(said) == 1
    assert "training goes on" in said[0]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_itself_reads_the_file(tmp_path: Path) -> None:
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoardFile(tmp_path)
    board.add("loss/train", 0.5, step=7)
    reader = module.EventAccumulator(str(tmp_path))
    reader.Reload()
    (found,) = reader.Scalars("loss/train")
    assert (found.step, found.value) == (7, 0.5)
