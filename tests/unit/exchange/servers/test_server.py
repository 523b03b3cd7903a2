"""A server that is sent what it should not be: refused, named, and nothing of it in the weights.

The server is real, on threads of this process, and its workers are connected to it over Gloo.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ports import free_port

from paceline.errors import WorkerError
from paceline.exchange.network import Traffic
from paceline.exchange.seed import make_seed
from paceline.exchange.servers.groups import ServerGroup
from paceline.exchange.servers.rendezvous import Rendezvous
from paceline.exchange.servers.request_handler import ServerPlace
from paceline.exchange.servers.server import ShardServer
from paceline.exchange.servers.shard import Shard
from paceline.exchange.wire import Connection, Kind, Request
from paceline.schema import ExchangeSettings, RankContext

ELEMENTS = 40
MODEL = "a model"
NAMED = [("w", torch.zeros(ELEMENTS))]


class Cluster:
    """One server, node 3, and links of three workers to it."""

    def __init__(self, mode: str) -> None:
        port = free_port()
        self.meetings = [
            Rendezvous(
                RankContext(node=node, nodes=4, port=port, secret="of this test alone"),
                deadline=30.0,
            )
            for node in range(4)
        ]
        hosts = [f"host-{node}" for node in range(4)]
        workers = tuple((n, hosts[n], 0 if mode == "sync" else n) for n in range(3))
        place = ServerPlace(
            node=3, groups=[ServerGroup(number=0, servers=(3,), workers=workers)], hosts=hosts
        )
        shard = Shard(NAMED, lambda p: torch.optim.SGD(p, lr=1.0), number=0, servers=1)
        options = ExchangeSettings(kind="parameter_server", mode=mode)  # type: ignore[arg-type]
        self.server = ShardServer(shard, place, options, patience=30.0, model=MODEL, rest_bytes=3)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.links: dict[int, Connection] = {}
        joining = [threading.Thread(target=self._join, args=(node,)) for node in range(3)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()

    def _run(self) -> None:
        try:
            self.server.run(self.meetings[3], lambda update: ())
        except WorkerError as error:
            self.error = error

    def _join(self, node: int) -> None:
        self.links[node] = self.meetings[node].link(3, node, 0, Traffic(), patience=30.0)

    def hello(self, node: int, model: str = MODEL, start: float = 5.0) -> torch.Tensor:
        link, seed = self.links[node], None
        note: dict[str, Any] = {"model": model}
        if node == 0:
            seed = make_seed([("w", torch.full((ELEMENTS,), start))], {}, 7)
            seed.rest = torch.tensor([1, 2, 3], dtype=torch.uint8)
            note["seed"] = seed.note()
        text = json.dumps(note)
        link.ask(Request(kind=Kind.HELLO, length=len(text)))
        link.send_text(text)
        if seed is not None:
            link.answered()
            seed.send(link)
        answer = link.answered()
        assert answer.version == 7
        assert link.json(answer.length, {"rest": int}) == {"rest": 3}
        weights = link.receive(torch.empty(ELEMENTS))
        assert link.receive(torch.empty(3, dtype=torch.uint8)).tolist() == [1, 2, 3]
        return weights

    def push(self, node: int, gradient: torch.Tensor, **changes: Any) -> torch.Tensor:
        link = self.links[node]
        facts = {"update": 7, "samples": 1, "total": 3, "length": ELEMENTS} | changes
        link.ask(Request(kind=Kind.PUSH, **facts))
        if facts["length"] == ELEMENTS:
            link.send(gradient)
        link.answered()
        return link.receive(torch.empty(ELEMENTS))

    def close(self) -> None:
        for node, link in self.links.items():
            if not self.server.members[node].lost and self.server.failure is None:
                link.ask(Request(kind=Kind.DONE))
                link.answered()
        self.thread.join(300.0)
        assert not self.thread.is_alive()
        for link in self.links.values():
            link.close()
        for meeting in reversed(self.meetings):  # the first has the store
            meeting.close()


@pytest.fixture(params=["sync", "async"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    made.close()


def with_nan() -> torch.Tensor:
    gradient = torch.zeros(ELEMENTS)
    gradient[11] = float("nan")
    return gradient


BAD: dict[str, tuple[Callable[[Cluster], object], str]] = {
    "nan": (
        lambda cluster: cluster.push(1, with_nan()),
        "sent a gradient for update 8 of which 1 of 40 are not finite",
    ),
    "infinite": (
        lambda cluster: cluster.push(1, torch.full((ELEMENTS,), float("inf"))),
        "sent a gradient for update 8 of which 40 of 40 are not finite",
    ),
    "size": (
        lambda cluster: cluster.push(1, torch.zeros(ELEMENTS), length=ELEMENTS - 1),
        "announced a gradient of 39 elements where the server has 40",
    ),
    "rate": (
        lambda cluster: cluster.push(1, torch.zeros(ELEMENTS), rate=float("nan"), length=ELEMENTS),
        "sent a gradient at the rate nan",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_push_is_refused_and_its_sender_named(cluster: Cluster, kind: str) -> None:
    for node in range(3):
        weights = cluster.hello(node)
        assert weights.tolist() == [5.0] * ELEMENTS
    refused: list[BaseException] = []
    act, words = BAD[kind]

    def misbehave() -> None:
        try:
            act(cluster)
        except BaseException as error:
            refused.append(error)

    others: dict[int, torch.Tensor] = {}

    def behave(node: int) -> None:
        others[node] = cluster.push(node, torch.ones(ELEMENTS))

    threads = [threading.Thread(target=misbehave)]
    threads += [threading.Thread(target=behave, args=(node,)) for node in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)
    assert isinstance(refused[0], WorkerError)
    assert str(refused[0]).startswith(f"worker 1 on host-1 {words} (refused by host-3)")
    assert cluster.server.members[1].lost
    assert cluster.server.failure is None
    assert cluster.server.news[0].startswith(f"worker 1 on host-1 {words}")
    # The sum of the two others' gradients at rate 1; synchronous: the mean over those that came.
    last = 5.0 - 2.0 * (1.5 if cluster.server.synchronous else 1.0)
    torch.testing.assert_close(cluster.server.shard.weights, torch.full((ELEMENTS,), last))


def test_another_model_is_refused(cluster: Cluster) -> None:
    cluster.hello(0)
    with pytest.raises(WorkerError, match="the model on host-1 has other parameters or buffers"):
        cluster.hello(1, model="another")
    cluster.hello(2)


def test_the_others_wait_for_the_first_weights(cluster: Cluster) -> None:
    found: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda node=node: found.update({node: cluster.hello(node)}))
        for node in (1, 2)
    ]
    for thread in threads:
        thread.start()
    assert not cluster.server.seeded
    found[0] = cluster.hello(0)
    for thread in threads:
        thread.join(300.0)
    for node in range(3):
        assert found[node].tolist() == [5.0] * ELEMENTS
