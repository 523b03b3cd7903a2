"""The stall watch among nodes that share no run directory, each with a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port
from two_nodes import NODE, environment, write_node

from paceline.lab import Lab
from paceline.lab.testing import make_lab
from paceline.schema.events import Note, read_run

__all__ = ["make_lab"]


def stalls_of(folder: Path, rank: int) -> list[Note]:
    sessions = read_run(folder).get(rank, [])
    return [note for note in sessions[-1].notes if note.what == "stall"] if sessions else []


@pytest.mark.slow
def test_a_node_that_thinks_says_where_through_the_store(tmp_path: Path) -> None:
    port = free_port()
    enough = tmp_path / "enough"
    thinking = {"workload__model_options": f"{{ node = 1, update = 5, until = '{enough}' }}"}
    folders = [write_node(tmp_path / name, 300, **thinking) for name in "ab"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(folder)],
            env=os.environ | environment(node, "127.0.0.1", port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, folder in enumerate(folders)
    ]
    try:
        end = time.monotonic() + 300
        while not stalls_of(folders[0], 0):
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < end, "nobody said that it waits"
            time.sleep(0.1)
        enough.touch()
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert not (folders[0] / "rank-1").exists()
    stall = stalls_of(folders[0], 0)[0]
    assert stall.ranks == (1,)
    assert stall.text.startswith("stall: rank 0 has waited ")
    assert "in 'the sum of gradients' of update 4" in stall.text
    assert "which is in 'update' of update 4 since " in stall.text
    assert "lost_in_thought" in stall.text  # its stack, from a folder that rank 0 cannot see
    assert stall.text.splitlines()[0] in outputs[0]


@pytest.mark.slow
@pytest.mark.lab
def test_a_cut_network_is_reported_before_its_deadline(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """Nodes without a launcher: nobody else would notice."""
    lab = make_lab({"name": "a", "cores": 1.0}, {"name": "b", "cores": 1.0}, rate="1gbit")
    folders = [write_node(tmp_path / name, 40, train__epochs=100_000) for name in "ab"]
    logs = [tmp_path / f"{name}.log" for name in "ab"]
    processes = []
    for node, (name, folder, log) in enumerate(zip("ab", folders, logs, strict=True)):
        with log.open("wb") as output:
            processes.append(
                lab.start(
                    [sys.executable, "-c", NODE, str(folder)],
                    on=name,
                    env=environment(node, lab.addresses["a"], 29_600),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
    try:
        end = time.monotonic() + 300
        while "epoch 3/" not in logs[0].read_text():
            assert all(process.poll() is None for process in processes), logs[0].read_text()
            assert time.monotonic() < end, logs[0].read_text()
            time.sleep(0.1)
        lab.cut("b")
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.close()
    assert codes == [1, 1]
    for rank, (folder, log) in enumerate(zip(folders, logs, strict=True)):
        text = log.read_text()
        stall = stalls_of(folder, rank)[0]
        print(stall.text)
        assert stall.ranks == (1 - rank,)
        assert re.match(rf"stall: rank {rank} has waited \d+ s in '.+' of update \d+", stall.text)
        assert re.search(rf"rank {1 - rank}( on host \w+)?, which gives no sign", stall.text)
        assert stall.text.splitlines()[0] in text  # said, not only written
        print(text.strip().splitlines()[-1])
        assert f"rank {rank} on {'ab'[rank]} waited too long in " in text
        assert text.index("stall: ") < text.index("waited too long")
