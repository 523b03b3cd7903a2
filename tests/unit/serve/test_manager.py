"""Versions come and go as the folder says, and the old one stays until the new one answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.schema.version import Serving
from paceline.serve.manager import Manager, NotServedError, Options
from paceline.serve.source import ModelSource
from paceline.serve.versions import write_serving


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


@pytest.fixture
def models(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "models" / "digits" / "1")
    return tmp_path / "models"


async def settled(manager: Manager, source: ModelSource) -> None:
    while await manager.follow(source.look()):
        pass
    while manager._tasks:
        await asyncio.sleep(0.01)


def states(manager: Manager, name: str = "digits") -> dict[int, str]:
    return {n: e.state for n, e in manager.models[name].entries.items() if e.state != "END"}


def break_version(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def test_versions_follow_the_folder(models: Path) -> None:
    said: list[str] = []
    digits = models / "digits"

    async def work() -> None:
        manager, source = Manager(Options(batch=1), said.append), ModelSource([models])
        with pytest.raises(NotServedError) as early:
            manager.find("digits")
        assert early.value.known  # before the first look nobody knows what there is
        await settled(manager, source)
        assert states(manager) == {1: "AVAILABLE"}
        with pytest.raises(NotServedError) as late:
            manager.find("nobody")
        assert not late.value.known
        assert manager.is_ready
        # A request under way keeps its version until it is answered.
        old = manager.find("digits")
        async with manager.using(old) as batcher:
            shutil.copytree(digits / "1", digits / "2")
            await manager.follow(source.look())
            assert states(manager) == {1: "UNLOADING", 2: "AVAILABLE"}
            assert manager.find("digits").number == 2
            zeros = np.zeros((1, 1, 28, 28), np.float32)
            end = asyncio.get_running_loop().time() + 300
            assert (await batcher.submit(zeros, end)).shape == (1, 10)
        await settled(manager, source)
        assert states(manager) == {2: "AVAILABLE"}
        # A broken one is named, and leaves the old one serving; mended, it takes over.
        shutil.copytree(digits / "2", digits / "3")
        break_version(digits / "3")
        await settled(manager, source)
        assert states(manager) == {2: "AVAILABLE"}
        assert "checksum differs" in manager.models["digits"].entries[3].error
        assert sum("digits version 3 is not served" in line for line in said) == 1
        with pytest.raises(NotServedError, match="checksum differs"):
            manager.find("digits", 3)
        shutil.rmtree(digits / "3")
        shutil.copytree(digits / "2", digits / "3")
        await settled(manager, source)
        assert states(manager) == {3: "AVAILABLE"}
        shutil.rmtree(models / "digits")
        await settled(manager, source)
        await settled(manager, source)
        assert manager.models == {}
        await manager.close()

    run(work())


def test_a_broken_newest_version_is_not_in_the_way_of_a_start(models: Path) -> None:
    shutil.copytree(models / "digits" / "1", models / "digits" / "2")
    break_version(models / "digits" / "2")

    async def work() -> None:
        manager = Manager(Options(batch=1), lambda text: None)
        await settled(manager, ModelSource([models]))
        assert states(manager) == {1: "AVAILABLE"}
        assert manager.is_ready
        with pytest.raises(NotServedError, match="checksum differs") as refused:
            manager.find("digits", 2)
        assert not refused.value.known  # it will not answer later, as it is
        await manager.close()

    run(work())


def test_labels_and_canaries(models: Path) -> None:
    digits = models / "digits"
    for number in ("2", "3"):
        shutil.copytree(digits / "1", digits / number)
    write_serving(digits, Serving(labels={"stable": 1, "canary": 3}, canary_percent=25))

    async def work() -> None:
        manager = Manager(Options(batch=1), lambda text: None)
        source = ModelSource([models])
        await settled(manager, source)
        assert sorted(states(manager)) == [1, 3]
        assert manager.find("digits", label="canary").number == 3
        manager.dice.seed(1)
        found = [manager.find("digits").number for _ in range(1000)]
        assert set(found) == {1, 3}
        assert 180 < found.count(3) < 320
        with pytest.raises(NotServedError, match="no label 'beta'"):
            manager.find("digits", label="beta")
        with pytest.raises(NotServedError, match="version 2 is not served"):
            manager.find("digits", 2)
        (digits / "serving.json").write_text('{"policy": "newest"}')
        await settled(manager, source)
        assert "not one of its choices" in manager.models["digits"].problem
        assert sorted(states(manager)) == [1, 3]
        write_serving(digits, Serving(policy="specific", versions=(2,)))
        await settled(manager, source)
        assert states(manager) == {2: "AVAILABLE"}
        await manager.close()

    run(work())


def test_all_who_ask_for_what_was_unloaded_are_answered(models: Path) -> None:
    shutil.copytree(models / "digits", models / "other")
    size = (models / "digits" / "1" / "model.safetensors").stat().st_size

    async def work() -> None:
        options = Options(batch=1, memory=int(1.5 * size))
        manager, source = Manager(options, lambda text: None), ModelSource([models])
        await settled(manager, source)

        async def ask(name: str) -> int:
            async with manager.using(manager.find(name)) as batcher:
                end = asyncio.get_running_loop().time() + 300
                return len(await batcher.submit(np.zeros((1, 1, 28, 28), np.float32), end))

        async def later(turns: int, name: str) -> int:
            for _ in range(turns):
                await asyncio.sleep(0.001)
            return await ask(name)

        names = ["digits", "other"] * 6
        found = await asyncio.gather(*(later(8 * n, name) for n, name in enumerate(names)))
        assert found == [1] * len(names)
        await manager.close()

    run(work())


def test_what_another_hides_is_named(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path / "more")
    source = ModelSource([models, tmp_path / "more"])
    assert [one.name for one in source.look()] == ["digits"]
    assert source.hidden == {tmp_path / "more" / "digits"}


def test_memory_is_for_those_who_are_asked(models: Path) -> None:
    shutil.copytree(models / "digits", models / "other")
    size = (models / "digits" / "1" / "model.safetensors").stat().st_size

    async def work() -> None:
        options = Options(batch=1, memory=int(1.5 * size))
        manager, source = Manager(options, lambda text: None), ModelSource([models])
        await settled(manager, source)
        assert [states(manager, "digits"), states(manager, "other")] == [{}, {1: "AVAILABLE"}]
        assert manager.is_ready  # what was unloaded for memory comes back when it is asked for
        entry = manager.find("digits")
        async with manager.using(entry) as batcher:
            zeros = np.zeros((1, 1, 28, 28), np.float32)
            end = asyncio.get_running_loop().time() + 300
            assert (await batcher.submit(zeros, end)).shape == (1, 10)
        await settled(manager, source)
        assert [states(manager, "digits"), states(manager, "other")] == [{1: "AVAILABLE"}, {}]
        await manager.close()

    run(work())
