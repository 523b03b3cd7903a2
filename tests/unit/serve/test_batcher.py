"""Requests that arrive together are computed together; what does not fit is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.serve.batcher import Batcher, QueueFullError, TooLateError
from paceline.serve.loader import Servable, load
from paceline.serve.setup import Setup, buffered


@pytest.fixture
def held(exported: Path) -> Iterator[tuple[Servable, threading.Event, list[int]]]:
    """A version whose batches wait for an event, and the sizes that were computed."""
    servable = load(exported, most=4)
    servable.close()
    go, sizes = threading.Event(), []

    def run(inputs: np.ndarray) -> np.ndarray:
        assert go.wait(300)
        sizes.append(len(inputs))
        return inputs.reshape(len(inputs), -1)[:, :1] + 1

    pool = ThreadPoolExecutor(1)
    setup = Setup(workers=1, threads=1, batch=4, samples_per_second=2.0)
    yield dataclasses.replace(servable, run=run, pool=pool, setup=setup, alone=None), go, sizes
    go.set()
    pool.shutdown()


def inputs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, 1)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


def test_batches_grow_while_others_are_computed(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, sizes = held

    async def work() -> None:
        batcher = Batcher(servable, queue=100, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        first = asyncio.create_task(batcher.submit(inputs(1), end))
        while batcher.queued or not batcher.batches:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(batcher.submit(inputs(n), end)) for n in range(2, 8)]
        large = asyncio.create_task(batcher.submit(inputs(*range(10, 19)), end))
        while batcher.queued < 15:
            await asyncio.sleep(0.001)
        go.set()
        assert (await first).tolist() == [[2]]
        assert [(await one).tolist() for one in others] == [[[n + 1]] for n in range(2, 8)]
        assert (await large).ravel().tolist() == [n + 1 for n in range(10, 19)]
        await batcher.drain()
        assert batcher.batches == {size: sizes.count(size) for size in set(sizes)}

    run(work())
    assert sizes[:2] == [1, 4]
    assert sum(sizes) == 16
    assert max(sizes) == 4


def test_a_full_queue_refuses_at_once_and_says_for_how_long(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, _ = held

    async def work() -> None:
        batcher = Batcher(servable, queue=4, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        first = asyncio.create_task(batcher.submit(inputs(1), end))
        while batcher.queued or not batcher.batches:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(batcher.submit(inputs(1, 2, 3, 4), end))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as refused:
            await batcher.submit(inputs(5), end)
        assert refused.value.seconds == 2.0
        go.set()
        await asyncio.gather(first, waiting)

    run(work())


def test_requests_that_are_late_or_gone_are_not_computed(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, sizes = held

    async def work() -> None:
        batcher = Batcher(servable, queue=100, wait=0.001)
        now = asyncio.get_running_loop().time()
        first = asyncio.create_task(batcher.submit(inputs(1), now + 300))
        while batcher.queued or not batcher.batches:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(batcher.submit(inputs(2), now))
        gone = asyncio.create_task(batcher.submit(inputs(3), now + 300))
        await asyncio.sleep(0)
        gone.cancel()
        go.set()
        await first
        with pytest.raises(TooLateError):
            await late
        await batcher.drain()

    run(work())
    assert sizes == [1]


def test_an_error_of_the_model_reaches_who_asked(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, _ = held
    go.set()

    async def work() -> None:
        broken = dataclasses.replace(servable, run=lambda x: 1 / 0)  # type: ignore[arg-type,return-value]
        batcher = Batcher(broken, queue=100, wait=0.001)
        with pytest.raises(ZeroDivisionError):
            await batcher.submit(inputs(1), asyncio.get_running_loop().time() + 300)
        await batcher.drain()

    run(work())


def test_what_waits_is_divided_among_the_workers(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, sizes = held
    pool = ThreadPoolExecutor(2)
    # A batch of eight takes 8 s by this, longer than a part of one waits.
    setup = Setup(workers=2, threads=1, batch=16, samples_per_second=2.0)
    divided = dataclasses.replace(servable, pool=pool, setup=setup)

    async def work() -> None:
        batcher = Batcher(divided, queue=100, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        asked = [asyncio.create_task(batcher.submit(inputs(n), end)) for n in range(16)]
        while batcher.queued:
            await asyncio.sleep(0.001)
        go.set()
        assert [(await one).tolist() for one in asked] == [[[n + 1]] for n in range(16)]

    run(work())
    pool.shutdown()
    assert sizes == [8, 8]


def test_small_batches_are_not_divided(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, sizes = held
    go.set()
    pool = ThreadPoolExecutor(2)
    setup = Setup(workers=2, threads=1, batch=16, samples_per_second=1e6)
    quick = dataclasses.replace(servable, pool=pool, setup=setup)

    async def work() -> None:
        batcher = Batcher(quick, queue=100, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        await asyncio.gather(*(batcher.submit(inputs(n), end) for n in range(16)))

    run(work())
    pool.shutdown()
    assert sizes == [16]


def test_a_lone_request_has_all_cores(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, sizes = held
    alone = ThreadPoolExecutor(1)
    wide = dataclasses.replace(servable, alone=(lambda values: values - 1, alone))

    async def work() -> None:
        batcher = Batcher(wide, queue=100, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        batcher.requests = 1
        assert (await batcher.submit(inputs(1), end)).tolist() == [[0]]
        go.set()
        batcher.requests = 2  # another one is still read
        assert (await batcher.submit(inputs(1), end)).tolist() == [[2]]

    run(work())
    alone.shutdown()
    assert sizes == [1]


def test_a_deadline_ends_a_request_that_is_computed(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, _ = held

    async def work() -> None:
        batcher = Batcher(servable, queue=100, wait=0.001)
        soon = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(TooLateError):
            await batcher.submit(inputs(*range(9)), soon)
        go.set()
        await batcher.drain()

    run(work())


def test_answers_are_not_overwritten_by_the_next_batch() -> None:
    compute = buffered(lambda values: values, 4)
    first = compute([inputs(1), inputs(2)])
    second = compute([inputs(3), inputs(4)])
    assert first.tolist() == [[1], [2]]
    assert second.tolist() == [[3], [4]]


def test_numbers_behind_a_head_are_aligned_before_they_are_computed() -> None:
    odd = np.frombuffer(b"x" + inputs(5).tobytes(), np.float32, offset=1).reshape(1, 1)
    assert not odd.flags.aligned
    seen: list[bool] = []

    def run(values: np.ndarray) -> np.ndarray:
        seen.append(values.flags.aligned)
        return values + 1

    assert buffered(run, 4)([odd]).tolist() == [[6]]
    assert seen == [True]


def test_who_waits_too_long_is_told_while_others_are_computed(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    """One timer for all: the shortest deadline counts, whenever it came."""
    servable, go, _ = held
    told: dict[str, Any] = {}

    async def work() -> None:
        batcher = Batcher(servable, queue=100, wait=0.001)
        now = asyncio.get_running_loop().time()
        for name, seconds in (("long", 300.0), ("short", 0.02), ("middle", 0.05)):
            batcher.add(inputs(1), now + seconds, lambda outcome, n=name: told.update({n: outcome}))
        while len(told) < 2:
            await asyncio.sleep(0.001)
        assert all(isinstance(told[name], TooLateError) for name in ("short", "middle"))
        go.set()
        while "long" not in told:
            await asyncio.sleep(0.001)
        await batcher.drain()

    run(work())
    assert told["long"].tolist() == [[2]]


def test_one_who_cannot_be_told_keeps_nobody_waiting(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, go, _ = held
    go.set()
    faults: list[Any] = []

    def fail(outcome: Any) -> None:
        raise ValueError("gone")

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: faults.append(context["exception"]))
        batcher = Batcher(servable, queue=100, wait=0.001)
        batcher.add(inputs(1), loop.time() + 300, fail)
        assert (await batcher.submit(inputs(2), loop.time() + 300)).tolist() == [[3]]
        await batcher.drain()

    run(work())
    assert [str(one) for one in faults] == ["gone"]


def test_a_lone_sample_that_takes_nothing_is_computed_by_the_loop(
    held: tuple[Servable, threading.Event, list[int]],
) -> None:
    servable, _, _ = held
    threads: list[threading.Thread] = []

    def compute(values: np.ndarray) -> np.ndarray:
        threads.append(threading.current_thread())
        return values

    setup = dataclasses.replace(servable.setup, is_instant=True)
    instant = dataclasses.replace(servable, run=compute, setup=setup)

    async def work() -> None:
        batcher = Batcher(instant, queue=100, wait=0.001)
        end = asyncio.get_running_loop().time() + 300
        assert (await batcher.submit(inputs(1), end)).tolist() == [[1]]
        batcher.requests = 2  # another is being read
        assert (await batcher.submit(inputs(2), end)).tolist() == [[2]]
        await batcher.drain()

    run(work())
    assert [one is threading.main_thread() for one in threads] == [True, False]
