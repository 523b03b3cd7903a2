"""A server's time: moving bytes, applying updates, standing by."""

from __future__ import annotations

import threading
import time

from paceline.exchange.network import Traffic
from paceline.exchange.servers.service_time import Duty


class Heard:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.counted: list[tuple[int | None, Traffic]] = []

    def add(self, name: str, started: float, seconds: float, *, update: int | None = None) -> None:
        self.spans.append((name, started, seconds))

    def exchanged(self, update: int | None, traffic: Traffic) -> None:
        self.counted.append((update, traffic))


def test_time_is_moving_or_waiting_without_gap_or_overlap() -> None:
    heard = Heard()
    began = time.perf_counter()
    duty = Duty(heard)
    ready, release = threading.Barrier(3), threading.Event()

    def work() -> None:
        with duty.moving():
            ready.wait(300)
            release.wait(300)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(300)  # both move at once: that is one span
    release.set()
    for thread in threads:
        thread.join()
    with duty.moving():
        pass
    duty.close()
    ended = time.perf_counter()
    assert [name for name, _, _ in heard.spans] == ["wait", "exchange"] * 2 + ["wait"]
    assert all(seconds >= 0 for _, _, seconds in heard.spans)
    for (_, start, seconds), (_, following, _) in zip(heard.spans, heard.spans[1:], strict=False):
        assert abs(start + seconds - following) < 1e-9
    assert began <= heard.spans[0][1]
    assert heard.spans[-1][1] + heard.spans[-1][2] <= ended


def test_updates_count_what_was_moved_since_the_last_one() -> None:
    heard = Heard()
    duty = Duty(heard)
    links = [Traffic(bytes_sent=10, messages_sent=1), Traffic(bytes_received=5)]
    duty.applied(0, time.perf_counter(), links)
    links[0].bytes_sent += 7
    duty.applied(1, time.perf_counter(), links)
    found = [(update, each.bytes_sent, each.bytes_received) for update, each in heard.counted]
    assert found == [(0, 10, 5), (1, 7, 0)]
    assert heard.counted[0][1].messages_sent == 1
