"""How the leaders of all nodes come together: a store where they meet, and a group on top of it."""

from __future__ import annotations

import datetime
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.errors import ConfigError, DeadlineError, WorkerError
from paceline.exchange.network import Network
from paceline.exchange.store import SecureStore
from paceline.schema import RankContext
from paceline.secure.sealing import MAGIC, NONCE_BYTES, PROOF_BYTES, Sealing, UnknownPeerError

_TAG = 1902
"""Messages of the proof; other messages between nodes have other numbers."""
_LATE = re.compile(r"timed out waiting for nodes/\S*?(\d+)(?:,.*)? in the store")
"""The last part of the name that Gloo asks for is the number of a member."""
_STEPS = (len(MAGIC) + NONCE_BYTES,) * 2 + (PROOF_BYTES,) * 2


def prove_members(
    group: Any, rank: int, others: Iterable[int], secret: str, purpose: str
) -> dict[int, Sealing]:
    """Members of a Gloo group prove to each other that they belong to the run; all call it.

    Gloo itself asks nobody who connects: what it is told first is these few bytes, over the very
    connections that will carry tensors. A member that cannot prove itself ends the opening of the
    group, before it was sent anything of the model. Gives what seals the messages of each pair.
    """
    sealings = {
        other: Sealing(
            secret, f"{purpose} {min(rank, other)}-{max(rank, other)}", asks=rank > other
        )
        for other in others
    }
    for number, size in enumerate(_STEPS):
        works, kept = [], []
        rooms: dict[int, torch.Tensor] = {}
        for other, sealing in sealings.items():
            if (rank > other) == (number % 2 == 0):
                kept.append(torch.frombuffer(bytearray(sealing.take_output()), dtype=torch.uint8))
                works.append(group.send([kept[-1]], other, _TAG))
            else:
                rooms[other] = torch.empty(size, dtype=torch.uint8)
                works.append(group.recv([rooms[other]], other, _TAG))
        for work in works:
            work.wait()
        for other, room in rooms.items():
            try:
                sealings[other].feed(bytes(room.tolist()))
            except UnknownPeerError as error:
                raise WorkerError(
                    f"member {other} of {purpose} does not belong to this run ({error}): somebody"
                    " else on the network has taken its place; keep strangers off that network"
                ) from None
    return sealings


def open_network(context: RankContext, hosts: Sequence[str], *, deadline: float) -> Network:
    """Join the leaders of all nodes; every leader calls it.

    The leader of the first node listens at `context.address:context.port`.
    """
    if context.backend == "mpi4py":
        from paceline.backends.mpi import open_group

        return Network(
            open_group(context.node, context.nodes, deadline), hosts, backend=context.backend
        )
    timeout = datetime.timedelta(seconds=deadline)
    store = open_store(context, deadline=deadline)
    try:
        group, _ = gloo_group("nodes", store, context, timeout)
    except RuntimeError as error:
        if missing := late_hosts(error, hosts):
            raise DeadlineError(
                f"{missing} did not come within the {deadline:.0f} s of train.deadline after"
                f" {hosts[context.node]}: its process is slow to start, or hangs"
            ) from None
        raise
    return Network(group, hosts, backend=context.backend, store=store)


def late_hosts(error: RuntimeError, hosts: Sequence[str]) -> str:
    """Whom a store has waited for in vain; nobody where the error says something else."""
    found = _LATE.match(str(error))
    return hosts[int(found[1])] if found and int(found[1]) < len(hosts) else ""


def open_late(context: RankContext, hosts: Sequence[str], *, deadline: float) -> Network:
    """The network of a node that comes to a training under way: parts of it can be opened alone."""
    store = open_store(context, deadline=deadline, serves=False)
    return Network(None, hosts, backend=context.backend, rank=context.node, store=store)


def open_part(
    context: RankContext,
    network: Network,
    members: Sequence[int],
    name: str,
    *,
    hosts: Sequence[str],
    deadline: float,
    hopeless: Callable[[], str] | None = None,
    opened: Callable[[Network], None] = lambda network: None,
) -> Network:
    """A network of some of the nodes of another, with connections of its own.

    Those nodes call it, and nobody else; `name` is one that no other part had, `hosts` are those of
    the members. What breaks it leaves the whole network as it was. `hopeless` says why there is no
    use in waiting for a member; `opened` gets the network before its members have proved anything.
    """
    place = list(members).index(network.rank)
    if network.backend == "mpi4py":
        from paceline.backends.mpi import open_part as open_mpi_part

        group = open_mpi_part(members, place, name, deadline)
        part = Network(group, hosts, backend=network.backend)
        opened(part)
        return part
    timeout = datetime.timedelta(seconds=deadline)
    with network.rendezvous("parts", hopeless) as store:
        made = connected_group(name, store, context, timeout, (place, len(members)))
    part = Network(made, hosts, backend=network.backend)
    opened(part)
    others = [other for other in range(len(members)) if other != place]
    prove_members(made, place, others, context.secret, name)
    return part


def open_store(context: RankContext, *, deadline: float, serves: bool | None = None) -> SecureStore:
    """The place where leaders find each other; the first node serves it, unless told not to.

    Only who knows the run's secret is answered there.
    """
    if not context.secret:
        raise ConfigError(
            f"node {context.node} of {context.nodes} has no secret to prove itself with: set"
            " PACELINE_SECRET to the same text on all nodes (`openssl rand -hex 32` makes one)"
        )
    return SecureStore(
        context.address,
        context.port,
        context.secret,
        seconds=max(deadline, 30.0),
        serves=context.node == 0 if serves is None else serves,
    )


def open_watch_store(
    context: RankContext, *, deadline: float, serves: bool | None = None
) -> SecureStore:
    """A connection of its own to a store that all ranks reach, beside the network.

    Over Gloo it is the store where leaders met. Over MPI there was none: the first rank opens it,
    unless it is told that somebody has.
    """
    if serves is None:
        serves = context.backend == "mpi4py" and context.is_first
    return open_store(context, deadline=deadline, serves=serves)


def gloo_group(
    name: str,
    store: Store,
    context: RankContext,
    timeout: datetime.timedelta,
    members: tuple[int, int] = (0, 0),
) -> tuple[Any, dict[int, Sealing]]:
    """Gloo on the interface by which this host reaches the first node, and what seals each pair.

    `members`: this member's number and how many there are, where they are not all nodes.
    """
    rank, size = members if members[1] else (context.node, context.nodes)
    group = connected_group(name, store, context, timeout, (rank, size))
    others = [other for other in range(size) if other != rank]
    return group, prove_members(group, rank, others, context.secret, name)


def connected_group(
    name: str,
    store: Store,
    context: RankContext,
    timeout: datetime.timedelta,
    members: tuple[int, int],
) -> Any:
    """A group of Gloo whose members are connected, and have proved nothing."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(context))]
    return dist.ProcessGroupGloo(PrefixStore(name, store), *members, options)


def own_address(context: RankContext) -> str:
    """This host's address on the network that the first node listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((context.address, context.port or 1))  # sends nothing
        return str(probe.getsockname()[0])
