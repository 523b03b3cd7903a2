"""The offset of clocks, measured between real processes over a real socket."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.clock import MESSAGE_BYTES, Offset, ask, offset_of, offset_to_first

ANSWERER = """
import socket, sys, time
from paceline.observe.clock import MESSAGE_BYTES, answer
shift = float(sys.argv[2])
with socket.socket(fileno=int(sys.argv[1])) as peer:
    answer(peer.sendall, lambda: peer.recv(MESSAGE_BYTES, socket.MSG_WAITALL),
           now=lambda: time.time() + shift)
"""

seconds = st.floats(min_value=0, max_value=10)


@given(offset=st.floats(-1e6, 1e6), there=seconds, thinking=seconds, back=seconds)
def test_the_true_offset_lies_within_the_uncertainty(
    offset: float, there: float, thinking: float, back: float
) -> None:
    sent = 1000.0  # on the answering clock
    arrived, answered = sent + there, sent + there + thinking
    found = offset_of(sent + offset, arrived, answered, answered + back + offset)
    assert found.uncertainty == pytest.approx((there + back) / 2, abs=1e-6)
    assert abs(found.seconds - offset) <= found.uncertainty + 1e-6


@pytest.mark.parametrize("shift", [-3.25, 0.0, 1234.5])
def test_the_shifted_clock_of_another_process_is_measured(shift: float) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", ANSWERER, str(theirs.fileno()), str(shift)],
            pass_fds=[theirs.fileno()],
        )
        try:
            found = ask(ours.sendall, lambda: ours.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
            assert process.wait(timeout=600) == 0
        finally:
            process.kill()
            process.wait()
    assert abs(found.seconds - -shift) <= found.uncertainty
    assert 0 < found.uncertainty < 0.5


def test_the_fastest_round_trip_is_believed() -> None:
    """A line that is slow in one direction, but not every time."""
    times = iter([0.0, 5.0, 10.0, 10.2, 20.0, 23.0])
    answers = iter([(1.0, 1.0), (10.1, 10.1), (22.9, 22.9)])

    found = ask(
        lambda data: None,
        lambda: struct.pack("<dd", *next(answers)),
        rounds=3,
        now=lambda: next(times),
    )
    assert found.seconds == pytest.approx(0.0)
    assert found.uncertainty == pytest.approx(0.1)


def test_every_rank_learns_its_offset_to_the_first() -> None:
    """Four ranks on three hosts, each pair joined by a real socket."""
    nodes, shifts = [0, 0, 1, 2], [0.0, 0.0, 7.0, -2.0]
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    found: dict[int, Offset] = {}

    def run(rank: int) -> None:
        def peer(other: int) -> socket.socket:
            return pairs[other][0] if rank == 0 else pairs[rank][1]

        found[rank] = offset_to_first(
            rank,
            nodes,
            lambda to, data: peer(to).sendall(data),
            lambda at: peer(at).recv(MESSAGE_BYTES, socket.MSG_WAITALL),
            now=lambda: time.time() + shifts[rank],
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in pairs.values():
        for end in pair:
            os.close(end.detach())
    assert found[0] == found[1] == Offset(seconds=0.0, uncertainty=0.0)
    for rank in (2, 3):
        assert abs(found[rank].seconds - shifts[rank]) <= found[rank].uncertainty
        assert found[rank].uncertainty > 0
