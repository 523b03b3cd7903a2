"""What parameter servers compute without any network: shards, rounds, staleness, roles."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.errors import ConfigError, UnsupportedError
from paceline.exchange.members import Member, Round, group_of, must_wait
from paceline.exchange.shard import Shard, whole_state
from paceline.exchange.shards import shard_bounds, slices
from paceline.exchange.staleness import Staleness
from paceline.exchange.wire import Request
from paceline.schema import NodePlan, Plan


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
    with pytest.raises(UnsupportedError, match="one rank per node"):
        plan(NodePlan(strategy="processes", processes=2), NodePlan()).with_servers(1)
    alone = Plan(nodes=(NodePlan(),), exchange="parameter_server")
    assert alone.with_servers(1) is alone
