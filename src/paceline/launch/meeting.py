"""How processes that a person started by mpiexec, torchrun or srun agree before they train."""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from typing import Any

from paceline.config.environment import Started
from paceline.errors import UserError
from paceline.launch.checks import free_port

DEADLINE_SECONDS = 120.0
RACE_SECONDS = 1800.0
"""Some hosts may race far longer than others."""


class Meeting(ABC):
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


class MpiMeeting(Meeting):
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
            found.append(json.loads(bytes(room)))
        return found

    def rendezvous(self) -> tuple[str, int]:
        from paceline.backends.mpi.rendezvous import agree_on_master

        return agree_on_master(self._world)


class StoreMeeting(Meeting):
    """Over a store: torchrun's own, or one that the first process of a Slurm step opens."""

    def __init__(self, started: Started) -> None:
        super().__init__(started)
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        assert started.address is not None
        self._address = started.address
        try:
            store = TCPStore(
                started.address,
                started.port,
                None,
                is_master=started.rank == 0 and not started.has_store,
                timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
                wait_for_workers=False,
            )
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"process {started.rank} of {started.size} cannot meet the others at"
                f" {started.address}:{started.port}: {str(error).splitlines()[0]}"
            ) from None
        self._store = PrefixStore("paceline", store)
        self._store.set_timeout(datetime.timedelta(seconds=RACE_SECONDS))
        self._round = 0

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps(value))
        keys = [f"{self._round}/{rank}" for rank in range(self.size)]
        return [json.loads(self._store.get(key)) for key in keys]

    def rendezvous(self) -> tuple[str, int]:
        port = self.share(free_port() if self.rank == 0 else None)
        return self._address, int(port)


def open_meeting(started: Started) -> Meeting:
    """Meet the other processes that were started together with this one."""
    return MpiMeeting(started) if started.by == "mpi" else StoreMeeting(started)
