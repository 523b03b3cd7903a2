"""The network between nodes, seen from one node's leader: messages and sums, counted.

Every exchange talks through `Network`, so that all are counted alike and a
failure names the host, the operation and the update. The group underneath is
Gloo's or MPI's own object, made directly and not as torch's default group: the
ranks inside a node may have a default group of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.errors import DeadlineError, UnsupportedError, WorkerError
from paceline.exchange.store import SecureStore

_ALL_TO_ALL = 1901
"""Messages of all-to-alls; other messages between nodes have other numbers."""
_ABORT = 1902
"""A message that nobody sends."""
_LOST = ("onnection", "eset by peer", "roken pipe", "ocket", "nreachable")


@dataclass
class Traffic:
    """What one node has sent and received, and what time went into it."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0
    """While at least one operation was under way, hidden under computing or not."""
    waited: float = 0.0
    """Of those, what the computation stood still for."""
    told: float = 0.0
    """Of the waiting, what `Network.on_wait` was told of."""

    @property
    def hidden(self) -> float:
        """Seconds of communication that computing did not wait for."""
        return max(0.0, self.seconds - self.waited)

    def take(self) -> Traffic:
        """What was counted so far; counting begins anew."""
        taken = Traffic(**{f.name: getattr(self, f.name) for f in fields(self)})
        for field in fields(self):
            setattr(self, field.name, type(getattr(self, field.name))(0))
        return taken

    def less(self, other: Traffic) -> Traffic:
        """What was counted since `other`."""
        names = [field.name for field in fields(self)]
        return Traffic(**{name: getattr(self, name) - getattr(other, name) for name in names})

    def add(self, other: Traffic) -> None:
        """Count what was taken elsewhere."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Pending:
    """An operation under way."""

    def __init__(
        self,
        network: Network,
        operation: str,
        work: Any,
        keep: object = None,
        ended: Sequence[float] = (),
    ) -> None:
        """`ended` gets the time (perf_counter) of the operation's end, where that is told."""
        self._network, self._operation, self._work = network, operation, work
        self._keep = keep  # tensors must live until the operation has ended
        self._started = time.perf_counter()
        self._ended = ended

    def wait(self) -> None:
        """Return when it has ended; raise what went wrong, in the user's words."""
        with self._network.explaining(self._operation):
            before = time.perf_counter()
            self._work.wait()
            now = time.perf_counter()
        # When an operation ended is not always told: until now at the latest.
        ended = self._ended[0] if self._ended and self._ended[0] < before else now
        self._network.count_time(
            seconds=ended - self._started,
            waited=now - before,
            operation=self._operation,
            ended=ended,
        )
        self._keep = None

    def settle(self) -> None:
        """Like `wait`, for a thread beside the computation that counts its time itself."""
        with self._network.explaining(self._operation):
            self._work.wait()
        self._keep = None


class _Together:
    """Several operations that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Network:
    """The leaders of all nodes."""

    on_wait: Callable[[str, float, float], None] | None = None
    """Told of every wait: the operation, when (perf_counter) and how long one waited."""
    _aborted = False
    _covered = 0.0
    """Until when (perf_counter) communication is in `traffic.seconds`."""

    def __init__(
        self,
        group: Any,
        hosts: Sequence[str],
        *,
        backend: str,
        rank: int | None = None,
        store: SecureStore | None = None,
    ) -> None:
        """`rank` is this node's number where there is no group of all that knows it."""
        self.group = group
        self._store = store
        self.hosts = list(hosts)
        self.backend = backend
        self.rank: int = group.rank() if rank is None else rank
        self.size = len(self.hosts)
        self.traffic = Traffic()
        self.place = "start-up"
        """What the run is doing, for messages: "update 12"."""
        self._lock = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """All nodes can sum and broadcast together; else there are connections of two alone."""
        return self.group is not None

    def store(self, purpose: str) -> PrefixStore:
        """Where nodes can find each other for another group of theirs."""
        if self._store is None:
            raise UnsupportedError(f"there is no store for {purpose} over {self.backend}")
        return PrefixStore(purpose, self._store)

    @contextlib.contextmanager
    def rendezvous(
        self, purpose: str, hopeless: Callable[[], str] | None = None
    ) -> Iterator[PrefixStore]:
        """The same, for a meeting that is given up once there is a reason not to wait any more."""
        store = self.store(purpose)
        assert self._store is not None
        self._store.hopeless = hopeless
        try:
            yield store
        finally:
            self._store.hopeless = None

    # --- messages -------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        """Begin to send to one node."""
        self.count(sent=tensor.nbytes)
        with self.explaining(f"a message to {self.hosts[peer]}"):
            work = self.group.send([tensor], peer, tag)
        return Pending(self, f"a message to {self.hosts[peer]}", work, tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        """Begin to receive from one node."""
        self.count(received=tensor.nbytes)
        with self.explaining(f"a message from {self.hosts[peer]}"):
            work = self.group.recv([tensor], peer, tag)
        return Pending(self, f"a message from {self.hosts[peer]}", work, tensor)

    # --- all together ---------------------------------------------------------

    def sum(self, tensor: torch.Tensor, name: str = "a sum") -> Pending:
        """Begin to add up a contiguous tensor over all nodes, in place.

        Counted as the ring that libraries use: 2 (N-1)/N of the bytes each way.
        """
        moved = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.count(sent=moved, received=moved, messages=2 * (self.size - 1))
        with self.explaining(name):
            work = self.group.allreduce([tensor], dist.AllreduceOptions())
        return Pending(self, name, work, tensor, self._end_of(work))

    def broadcast(self, tensor: torch.Tensor, root: int = 0, name: str = "a broadcast") -> None:
        """Give every node `root`'s tensor."""
        if self.rank == root:
            self.count(sent=tensor.nbytes * (self.size - 1), messages=self.size - 1)
        else:
            self.count(received=tensor.nbytes)
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self.explaining(name):
            Pending(self, name, self.group.broadcast([tensor], options), tensor).wait()

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        name: str = "an exchange of activations",
    ) -> Pending:
        """Begin to send each node its part of the first dimension of `sent`; sizes may differ."""
        own = self.rank
        # A node may have nothing to send, or nothing to receive.
        width = max(
            sent.nbytes // max(1, sum(sent_sizes)), received.nbytes // max(1, sum(received_sizes))
        )
        self.count(
            sent=(sum(sent_sizes) - sent_sizes[own]) * width,
            received=(sum(received_sizes) - received_sizes[own]) * width,
            messages=self.size - 1,
        )
        with self.explaining(name):
            if self.backend == "gloo":
                work: Any = self._parts(received, sent, received_sizes, sent_sizes)
            else:
                work = self.group.alltoall_base(
                    received, sent, list(received_sizes), list(sent_sizes), dist.AllToAllOptions()
                )
        return Pending(self, name, work, (received, sent))

    def _parts(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> _Together:
        """One message per pair, with every receive posted before the first send.

        Gloo sends nothing before the receiver has said that it is ready. Its own all-to-all sends
        first, and that word waits behind the data: the two directions of a link take turns.
        """
        into = torch.split(received, list(received_sizes))
        out = torch.split(sent, list(sent_sizes))
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self.group.recv([into[p]], p, _ALL_TO_ALL) for p in peers if received_sizes[p]]
        works += [self.group.send([out[p]], p, _ALL_TO_ALL) for p in peers if sent_sizes[p]]
        into[self.rank].copy_(out[self.rank])
        return _Together(works)

    def barrier(self, name: str = "a barrier") -> None:
        self.total([0.0], name)

    def total(self, values: Sequence[float], name: str) -> list[float]:
        """A few numbers, added up over all nodes, the same everywhere to the last bit."""
        mine = torch.zeros(self.size, len(values), dtype=torch.float64)
        mine[self.rank] = torch.tensor(list(values), dtype=torch.float64)
        # Every row has one node's values and zeros: whatever order a library adds in, the rows are
        # exact, and their sum is then taken in the same order on every node.
        self.sum(mine, name).wait()
        return [float(value) for value in mine.sum(dim=0)]

    # --- counting and failing -------------------------------------------------

    def _end_of(self, work: Any) -> list[float]:
        """Gets the time when a sum ends; stays empty where the library does not tell."""
        ended: list[float] = []
        if self.backend == "gloo":  # a future of MPI's costs more than it tells
            # Holds nothing but the list, or the operation and its tensors would never be freed.
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
        return ended

    def count(self, *, sent: int = 0, received: int = 0, messages: int = 1) -> None:
        """Add to the traffic; exchanges of several threads count together."""
        with self._lock:
            self.traffic.bytes_sent += sent
            self.traffic.bytes_received += received
            self.traffic.messages_sent += messages if sent else 0
            self.traffic.messages_received += messages if received else 0

    def count_time(
        self,
        *,
        seconds: float = 0.0,
        waited: float = 0.0,
        operation: str = "an exchange",
        ended: float | None = None,
    ) -> None:
        """Count an operation of `seconds` that ended just now, and how long computing stood still.

        Operations run side by side: time that an earlier one has covered is not counted again.
        """
        now = time.perf_counter()
        end = now if ended is None else ended
        with self._lock:
            if seconds:
                self.traffic.seconds += max(0.0, end - max(end - seconds, self._covered))
                self._covered = max(self._covered, end)
            self.traffic.waited += waited
            if waited and self.on_wait is not None:
                self.traffic.told += waited
        if waited and self.on_wait is not None:
            self.on_wait(operation, now - waited, waited)

    def take(self) -> Traffic:
        """What was counted since the last call."""
        with self._lock:
            return self.traffic.take()

    @contextlib.contextmanager
    def explaining(self, operation: str) -> Iterator[None]:
        """Turn what a library raises into who, where and what."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            who = f"rank {self.rank} on {self.hosts[self.rank]}"
            if self._aborted:
                raise WorkerError(
                    f"{who} lost another host in {operation} of {self.place}"
                ) from error
            if "imed out" in text or "imeout" in text:
                raise DeadlineError(
                    f"{who} waited too long in {operation} of {self.place}: another host hangs,"
                    " is cut off, or is far slower; raise train.deadline if it only needs time"
                ) from error
            if any(part in text for part in _LOST):
                raise WorkerError(
                    f"{who} lost another host in {operation} of {self.place}: {_short(text)}"
                ) from error
            raise

    def abort(self) -> None:
        """End whatever waits in this network, now; it cannot be used any more.

        May be called from another thread: the host that is waited for may never answer, and its
        connection stays open where its power failed.
        """
        group, self._aborted = self.group, True
        if self.backend != "gloo" or group is None or self.size == 1:
            return
        # Gloo closes all pairs of a group when one wait of it runs out of time. Where a node has
        # closed its connection the wait does not begin: only one with who is silent ends the rest.
        for peer in (peer for peer in range(self.size) if peer != self.rank):
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _ABORT).wait(datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        if self.backend == "mpi4py":
            self.group.shutdown()
        self.group = None
        if self._store is not None:
            self._store.close()


def _short(text: str) -> str:
    """The part of a library's message that says something: without its file names."""
    return text.strip().splitlines()[0].rpartition("] ")[2][:200]
