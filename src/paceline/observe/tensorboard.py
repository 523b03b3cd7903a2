"""Scalars for TensorBoard, without its package: the part of its file format that they need.

A file is a row of records, each framed by its length and checksums (TFRecord), each an `Event`
in protobuf's encoding: wall time, step, and a summary with a tag and one number.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.observe.recorder import Say

# The field of a line of metrics.jsonl -> the name that TensorBoard groups by.
EPOCH_TAGS: Final = {
    "train_loss": "loss/train",
    "test_loss": "loss/test",
    "train_accuracy": "accuracy/train",
    "test_accuracy": "accuracy/test",
    "test_top5": "accuracy/test_top5",
    "images_per_second": "speed/images_per_second",
    "seconds": "speed/epoch_seconds",
    "read_seconds": "speed/read_seconds",
    "update_seconds_median": "speed/update_seconds_median",
    "bytes_sent": "network/bytes_sent",
    "bytes_received": "network/bytes_received",
    "messages_sent": "network/messages_sent",
    "exchange_hidden_seconds": "network/hidden_seconds",
    "exchange_wait_seconds": "network/wait_seconds",
}


def _checksum_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


_TABLE: Final = _checksum_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """As TFRecord stores checksums: those of data that holds checksums would be weak."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """The frame around one event."""
    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", masked(crc32c(length)))
        + data
        + struct.pack("<I", masked(crc32c(data)))
    )


def _varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF  # negative numbers are sent as 64 bits
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def _block(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def version_event(wall_time: float) -> bytes:
    """The event that every file begins with."""
    return b"\x09" + struct.pack("<d", wall_time) + _block(3, b"brain.Event:2")


def scalar_event(tag: str, value: float, step: int, wall_time: float) -> bytes:
    """Event { wall_time = 1, step = 2, summary = 5 { value = 1 { tag = 1, simple_value = 2 } } }"""
    scalar = _block(1, tag.encode()) + b"\x15" + _float32(value)
    return (
        b"\x09"
        + struct.pack("<d", wall_time)
        + b"\x10"
        + _varint(step)
        + _block(5, _block(1, scalar))
    )


class TensorBoardFile:
    """One event file; a full disk costs a warning, never the training.

    >>> board = TensorBoardFile(run / "tensorboard")                     # doctest: +SKIP
    >>> board.add("loss/train", 0.25, step=10)                           # doctest: +SKIP
    """

    def __init__(self, folder: Path, *, say: Say = print) -> None:
        now = time.time()
        host = socket.gethostname()
        self.path = folder / f"events.out.tfevents.{int(now):010d}.{host}.{os.getpid()}.0"
        self._say = say
        self._failed = False
        self._write(version_event(now))

    def add(self, tag: str, value: float, *, step: int, wall_time: float | None = None) -> None:
        self._write(scalar_event(tag, value, step, time.time() if wall_time is None else wall_time))

    def add_epoch(self, line: Mapping[str, Any]) -> None:
        """What a line of metrics.jsonl says, with the epoch as the step."""
        for key, tag in EPOCH_TAGS.items():
            value = line.get(key)
            if isinstance(value, int | float):
                self.add(tag, float(value), step=int(line["epoch"]))

    def _write(self, event: bytes) -> None:
        if self._failed:  # half a record would make the rest unreadable
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(record(event))
        except OSError as error:
            self._failed = True
            self._say(f"warning: {self.path} cannot be written: {error.strerror}; training goes on")
