"""What parameter servers compute without any network: shards, rounds, staleness, roles."""

from __future__ import annotations

import itertools
import queue
import threading
from typing import Any, cast

import pytest
import torch

from paceline.errors import ConfigError
from paceline.exchange.buckets import bounds
from paceline.exchange.servers.copies import Copy, Word, Words, take_copy
from paceline.exchange.servers.groups import check_groups, group_of, server_group, server_groups
from paceline.exchange.servers.members import Member, Round, must_wait
from paceline.exchange.servers.server import ShardServer
from paceline.exchange.servers.shard import Shard, whole_state
from paceline.exchange.servers.sharding import cut, shard_bounds, slices
from paceline.exchange.servers.staleness import Staleness
from paceline.exchange.wire import Answer, Connection, Request
from paceline.schema import ExchangeSettings, NodePlan, Plan


@pytest.mark.parametrize("elements", [1, 15, 100, 12_345])
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_shards_are_contiguous_and_of_the_same_size(elements: int, servers: int) -> None:
    bounds = shard_bounds(elements, servers)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == elements
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(abs((end - start) - elements / servers) <= 16 for start, end in bounds)


def test_slices_of_all_shards_are_every_parameter_once() -> None:
    sizes = [7, 100, 1, 300]
    found = [s for start, end in shard_bounds(sum(sizes), 3) for s in slices(sizes, start, end)]
    for number, size in enumerate(sizes):
        covered = [i for s in found if s.parameter == number for i in range(s.start, s.end)]
        assert covered == list(range(size))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_buckets_bring_every_element_of_every_shard_once(servers: int) -> None:
    """As a worker cuts the gradient, and as servers expect its pieces: the same, in one order."""
    named = [(f"w{n}", torch.zeros(size)) for n, size in enumerate((7, 100, 1, 300, 16))]
    spans = bounds([tensor for _, tensor in named], 4 * 64)
    assert sorted(i for first, last in spans for i in range(first, last)) == list(range(424))
    assert spans[0][1] == 424  # the last weight, whose gradient is there first
    for number, (start, end) in enumerate(shard_bounds(424, servers)):
        shard = Shard(named, torch.optim.SGD, number=number, servers=servers, bucket_bytes=4 * 64)
        sent = [(first - start, last - start) for first, last in cut(spans, start, end)]
        assert shard.pieces == sent
        covered = sorted(i for first, last in sent for i in range(first, last))
        assert covered == list(range(end - start))


def test_shards_update_like_one_optimizer_and_give_its_state() -> None:
    torch.manual_seed(0)
    named = [("a", torch.randn(8, 3, 3, 3)), ("b", torch.randn(50))]
    named[0] = ("a", named[0][1].to(memory_format=torch.channels_last))
    whole = [tensor.clone() for _, tensor in named]
    optimizer = torch.optim.Adam(whole, lr=0.1)
    shards = [
        Shard(named, lambda parts: torch.optim.Adam(parts, lr=0.1), number=n, servers=2)
        for n in range(2)
    ]
    for _ in range(3):
        for tensor in whole:
            tensor.grad = torch.randn_like(tensor)
        flat = torch.cat([whole[0].grad.permute(0, 2, 3, 1).reshape(-1), whole[1].grad])
        for shard, (start, end) in zip(shards, shard_bounds(len(flat), 2), strict=True):
            shard.apply(flat[start:end].clone(), 1.0)
        optimizer.step()
    gathered = []
    for shard in shards:
        names, numbers = shard.entries()
        gathered.append((numbers, {name: shard.entry(name) for name in names}))
    state = whole_state(named, gathered)
    weights = torch.cat([shard.weights for shard in shards])
    expected = torch.cat([whole[0].permute(0, 2, 3, 1).reshape(-1), whole[1]])
    torch.testing.assert_close(weights, expected)
    for (name, _), tensor in zip(named, whole, strict=True):
        for key, value in optimizer.state[tensor].items():
            torch.testing.assert_close(state[name][key], value)
    again = Shard(named, lambda parts: torch.optim.Adam(parts, lr=0.1), number=1, servers=2)
    again.load(state)
    torch.testing.assert_close(again.entry("exp_avg"), shards[1].entry("exp_avg"))


def test_workers_share_a_copy_of_the_weights_until_they_change() -> None:
    shard = Shard(
        [("a", torch.zeros(3))], lambda p: torch.optim.SGD(p, lr=1.0), number=0, servers=1
    )
    first = shard.copy()
    assert shard.copy() is first
    shard.apply(torch.ones(3), 1.0)
    second = shard.copy()
    shard.add(torch.full((3,), 5.0))
    # What is still being sent is not touched by what comes after it.
    assert first.tolist() == [0.0] * 3
    assert second.tolist() == [-1.0] * 3
    assert shard.copy().tolist() == [4.0] * 3


def test_a_round_waits_for_all_active_members_but_the_backup() -> None:
    members = [Member(node, f"host-{node}", 0) for node in range(3)]
    request = Request(kind=2)
    assert not Round().is_complete(members, backup=2)
    some = Round(received={0: request, 1: request})
    assert not some.is_complete(members, backup=0)
    assert some.is_complete(members, backup=1)
    members[2].lost = True
    assert some.is_complete(members, backup=0)


def test_only_workers_that_still_train_are_waited_for() -> None:
    fast, slow, done = (Member(n, "h", n, clock=clock) for n, clock in enumerate((5, 3, 0)))
    done.done = True
    members = [fast, slow, done]
    assert must_wait(fast, members, 1)
    assert not must_wait(fast, members, 2)
    assert not must_wait(slow, members, 0)
    assert not must_wait(fast, members, None)


def test_groups() -> None:
    assert [group_of(i, 4, "sync", 2) for i in range(4)] == [0, 0, 0, 0]
    assert [group_of(i, 5, "async", 2) for i in range(5)] == [0, 0, 0, 1, 1]
    assert [group_of(i, 2, "async", 9) for i in range(2)] == [0, 1]


def settled(workers: int, servers: int) -> Plan:
    nodes = [NodePlan(host=f"h{n}") for n in range(workers + servers)]
    return plan(*nodes).with_servers(servers)


def test_every_worker_group_is_bound_to_one_server_group() -> None:
    options = ExchangeSettings(mode="async", groups=4, servers=4, server_groups=2)
    one, other = server_groups(settled(8, 4), options)
    assert (one.servers, other.servers) == ((8, 9), (10, 11))
    assert [(node, group) for node, _, group in one.workers] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [(node, group) for node, _, group in other.workers] == [(4, 2), (5, 2), (6, 3), (7, 3)]
    # A worker that comes back, and one that nobody planned.
    assert [server_group(node, 8, options) for node in (3, 12)] == [0, 1]


@pytest.mark.parametrize(
    ("workers", "options", "words"),
    [
        (4, {"server_groups": 3}, "exchange.server_groups = 3 does not divide 4 servers"),
        (4, {"server_groups": 4, "groups": 2}, "leaves a server group without workers"),
        (2, {"server_groups": 4}, "there are 2 worker groups of 2 workers: use 2 or fewer"),
    ],
)
def test_groups_that_cannot_be(workers: int, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_groups(settled(workers, 4), ExchangeSettings(mode="async", **options))


def test_copies_of_the_weights_need_asynchronous_workers() -> None:
    with pytest.raises(ConfigError, match=r"server_groups = 2 needs exchange.mode = 'async'"):
        ExchangeSettings(server_groups=2)


class Held:
    """A server's weights, and how many updates it has done."""

    def __init__(self) -> None:
        self.weights = torch.zeros(3)
        self.stop = 0

    def tell_word(self) -> Word:
        return Word(updates=7, told=[1.0, 2.0, 3.0])

    def copy_of_weights(self) -> torch.Tensor:
        return self.weights.clone()

    def add_to_weights(self, change: torch.Tensor) -> None:
        self.weights += change

    def hear_stop(self, stop: int) -> None:
        self.stop = stop


class End:
    """One end of a link inside this process."""

    def __init__(self, out: queue.Queue[Any], into: queue.Queue[Any]) -> None:
        self.ask = self.send = self.answer = out.put
        self.ask_with = lambda request, text: (out.put(request), out.put(text))
        self.answered = self.asked = lambda: into.get(timeout=600)
        self.text = self.receive = lambda _: into.get(timeout=600)


def test_what_all_copies_have_done_adds_up_and_nothing_is_lost_on_the_way() -> None:
    first, late, words = Held(), Held(), Words([5])
    there: queue.Queue[Any] = queue.Queue()
    back: queue.Queue[Any] = queue.Queue()
    here, other = End(there, back), End(back, there)
    meanwhile = [100.0, 0.0]

    def hear(text: str) -> Answer:
        words.hear(5, text)
        return Answer(stop=4)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        late.weights += meanwhile.pop(0)  # workers push while the copy is under way
        first.weights += tensor
        return first.weights.clone()

    def answer() -> None:
        for _ in range(2):
            take_copy(
                cast(Connection, other), cast(End, other).asked(), hear, change, first.weights
            )

    thread = threading.Thread(target=answer)
    thread.start()
    copy = Copy(cast(ShardServer, late), cast(Connection, here), every=2, base=torch.zeros(3))
    first.weights += 1
    late.weights += 10
    copy.turn(2)
    assert first.weights.tolist() == [11.0] * 3
    assert late.weights.tolist() == [111.0] * 3
    assert late.stop == 4
    copy.turn(3, last=True)
    thread.join()
    assert first.weights.tolist() == late.weights.tolist() == [111.0] * 3
    report = {"staleness": {"0": 2}, "updates": 5, "training": 1, "progress": 3}
    report |= {"bytes_sent": 0, "bytes_received": 0}
    added = words.added_to(report)
    assert (added["updates"], added["training"], added["mixes"]) == (12, 2, 2)
    words.finish(5)
    assert words.added_to(report)["training"] == 1


def test_staleness_of_several_servers() -> None:
    one, other = Staleness(), Staleness()
    for value in (0, 3, 3):
        one.add(value)
    other.merge(one.encoded())
    other.add(10)
    assert other.encoded() == {"0": 1, "3": 2, "10": 1}
    assert (other.updates, other.mean, other.largest) == (4, 4.0, 10)


def plan(*nodes: NodePlan) -> Plan:
    return Plan(nodes=nodes, exchange="parameter_server")


def test_the_last_nodes_serve() -> None:
    settled = plan(NodePlan(), NodePlan(), NodePlan(strategy="processes", processes=2))
    settled = settled.with_servers(1)
    assert settled.servers == (2,)
    assert [node.share for node in settled.nodes] == [1.0, 1.0, 0.0]
    assert settled.nodes[2].ranks == 1
    assert settled.with_servers(1) == settled
    assert [node.role for node in settled.with_servers(1, joining=4).nodes[3:]] == ["worker"] * 2


def test_roles_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"exchange.servers = 2 leaves no worker"):
        plan(NodePlan(), NodePlan()).with_servers(2)
    with pytest.raises(ConfigError, match="stands before a worker"):
        plan(NodePlan(host="a", role="server"), NodePlan()).with_servers(1)
    alone = Plan(nodes=(NodePlan(),), exchange="parameter_server")
    assert alone.with_servers(1) is alone
