"""How processes that a person started by mpiexec, torchrun or srun agree before they train."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.config.environment import SECRET, Started, shared_secret
from paceline.errors import UserError
from paceline.launch.checks import free_port
from paceline.schema.plain import parse_json

if TYPE_CHECKING:
    from paceline.exchange.store import SecureStore

DEADLINE_SECONDS = 120.0
LEAVE_SECONDS = 10.0
"""How long the first process stays for those who have not yet read what it said."""
RACE_SECONDS = 1800.0
"""Some hosts may race far longer than others."""


class StartRendezvous(ABC):
    """All started processes; each is to be one node."""

    backend = "gloo"

    def __init__(self, started: Started) -> None:
        self.rank, self.size = started.rank, started.size

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every process's value (plain data), in the order of ranks, on every process."""

    def share(self, value: Any = None) -> Any:
        """The first process's value, on every process."""
        return self.gather(value)[0]

    @abstractmethod
    def rendezvous(self) -> tuple[str, int]:
        """Where the first node's leader can listen; every process asks."""

    @abstractmethod
    def close(self) -> None:
        """Leave, when all is agreed on."""


class MpiMeeting(StartRendezvous):
    """Over MPI's own messages; bytes of JSON, never pickled."""

    backend = "mpi4py"

    def __init__(self, started: Started) -> None:
        super().__init__(started)
        from paceline.backends import register_mpi

        register_mpi()
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        if self.size != started.size:
            raise UserError(
                f"mpiexec started {started.size} processes, but mpi4py sees {self.size}: they are"
                " of different MPIs; use the mpiexec that belongs to mpi4py's"
            )

    def gather(self, value: Any) -> list[Any]:
        from paceline.backends.mpi.wire import gather_numbers

        data = json.dumps(value).encode()
        sizes = gather_numbers(self._world, len(data))
        found = []
        for root, size in enumerate(sizes):
            room = bytearray(data if root == self.rank else bytes(size))
            self._world.Bcast([room, self._mpi.BYTE], root=root)
            found.append(parse_json(bytes(room)))
        return found

    def rendezvous(self) -> tuple[str, int]:
        from paceline.backends.mpi.wire import agree_on_master

        return agree_on_master(self._world)

    def close(self) -> None:
        """MPI ends with the process."""


class StoreMeeting(StartRendezvous):
    """Over a store that the first process opens, and answers only who knows the secret.

    The secret is PACELINE_SECRET, or the key in the user's cache folder. torchrun has a store of
    its own, which anybody can write: it tells the port and nothing else.
    """

    def __init__(self, started: Started) -> None:
        super().__init__(started)
        assert started.address is not None
        self._address = started.address
        try:
            self._store = self._open(started, shared_secret())
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(
                f"process {started.rank} of {started.size} cannot meet the others at"
                f" {started.address}: {str(error).splitlines()[0]}; hosts without a common home"
                f" folder need the same {SECRET} (`openssl rand -hex 32` makes one)"
            ) from None
        self._store.set_timeout(datetime.timedelta(seconds=RACE_SECONDS))
        self._round = 0
        self._is_left = False

    def _open(self, started: Started, secret: str) -> SecureStore:
        from paceline.exchange.store import SecureStore

        first = started.rank == 0
        if not started.has_store:
            port = started.port
            return SecureStore(self._address, port, secret, seconds=DEADLINE_SECONDS, serves=first)
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        seconds = datetime.timedelta(seconds=DEADLINE_SECONDS)
        hints = PrefixStore(
            "paceline",
            TCPStore(self._address, started.port, None, is_master=False, timeout=seconds),
        )
        if first:
            store = SecureStore(self._address, 0, secret, seconds=DEADLINE_SECONDS, serves=True)
            hints.set("port", str(store.place[1]))
            return store
        port = read_port(hints.get("port"))
        return SecureStore(self._address, port, secret, seconds=DEADLINE_SECONDS)

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        keys = [f"{self._round}/{rank}" for rank in range(self.size)]
        return [parse_json(self._store.get(key)) for key in keys]

    def rendezvous(self) -> tuple[str, int]:
        port = self.share(free_port() if self.rank == 0 else None)
        return self._address, int(port)

    def close(self) -> None:
        """Leave; the first process, which has the store, last of all."""
        if self._is_left:
            return
        self._is_left = True
        with contextlib.suppress(RuntimeError):  # the first one has gone: it has failed
            left = self._store.add("left", 1)
            end = time.monotonic() + LEAVE_SECONDS
            while self.rank == 0 and left < self.size and time.monotonic() < end:
                time.sleep(0.01)
                left = self._store.add("left", 0)
        self._store.close()


def read_port(text: bytes) -> int:
    """A port from what anybody may have written; ValueError for anything else."""
    if not text.isdigit() or len(text) > 5 or not 0 < int(text) < 2**16:
        raise ValueError(f"{text[:20]!r} is no port")
    return int(text)


def open_meeting(started: Started) -> StartRendezvous:
    """Meet the other processes that were started together with this one."""
    return MpiMeeting(started) if started.by == "mpi" else StoreMeeting(started)
