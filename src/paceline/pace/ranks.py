"""The processes that train together, whoever started them, and the few things they agree on."""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.backends import BACKEND_NAME, register_mpi
from paceline.config.environment import named_variables, started_by
from paceline.errors import PacelineError, RunDirectoryError, UserError, shown
from paceline.gloo import settle
from paceline.local.cores import usable_cores


class Ranks:
    """This process's place among all ranks: alone, or as paceline run, torchrun, mpiexec or srun
    say. A process group that the script has opened itself is used as it is."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            _open()
        grouped = dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.size = dist.get_world_size() if grouped else 1
        self.members: tuple[int, ...] = tuple(range(self.size))
        """Who works now, the first rank always; the others wait in their loaders."""
        self._groups: dict[tuple[int, ...], Any] = {self.members: None}
        self._background: dict[tuple[int, ...], Any] = {}
        self.hosts: list[str] = []
        """Of every rank, once something is prepared."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def place(self) -> int:
        """This rank's among those who work now."""
        return self.members.index(self.rank)

    def open_background(self, hosts: Sequence[str]) -> None:
        """By the host of each rank: between hosts a second way, for what travels meanwhile.

        Between ranks of one machine there is nothing to hide behind. Every rank calls it.
        """
        self.hosts = list(hosts)
        if len(set(hosts)) > 1 and not self._background:
            self._background = {each: _group_of(each) for each in self._groups}

    @property
    def has_background(self) -> bool:
        """Whether `begin_adding_up` may go on while ranks ask each other other things."""
        return self._background.get(self.members) is not None

    def make_team(self, members: tuple[int, ...]) -> None:
        """Some ranks that may work without the others; every rank calls it, in the same order."""
        if members not in self._groups:
            self._groups[members] = _group_of(members)
            if self._background:
                self._background[members] = _group_of(members)

    def use(self, members: tuple[int, ...]) -> None:
        """Let all that follows be among these ranks, a team that was made."""
        assert members in self._groups, "make_team comes first"
        self.members = members

    @property
    def _group(self) -> Any:
        return self._groups[self.members]

    @property
    def _is_alone(self) -> bool:
        return len(self.members) == 1

    def sum(self, numbers: Iterable[float]) -> list[float]:
        """Each number added up over all ranks."""
        found = torch.tensor(list(numbers), dtype=torch.float64)
        if found.numel():
            self.add_up(found)
        return [float(number) for number in found]

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor added up over all ranks, in place."""
        if not self._is_alone:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def begin_adding_up(self, tensor: torch.Tensor) -> Any:
        """As `add_up`, but done only when what it returns was waited for."""
        group = self._background.get(self.members, self._group)
        return dist.all_reduce(tensor, group=group, async_op=True)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """The first rank's values into everybody's tensors."""
        if self._is_alone:
            return
        for tensor in tensors:
            plain = tensor.detach()
            if plain.is_contiguous():
                dist.broadcast(plain, 0, group=self._group)
            else:
                copy = plain.contiguous()
                dist.broadcast(copy, 0, group=self._group)
                plain.copy_(copy)

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor on every rank; it only travels where they differ."""
        if self._is_alone:
            return tensor
        plain = tensor.detach().cpu().contiguous()
        content: Any = plain.reshape(-1).view(torch.uint8).numpy()
        mine = [str(plain.dtype), list(plain.shape), hashlib.sha256(content).hexdigest()]
        found = self.gather(mine)
        if any(other[:2] != mine[:2] for other in found):
            raise UserError(
                f"ranks have different tensors to divide: {shown(found[0][:2])} on the first,"
                f" {shown(mine[:2])} on rank {self.rank}; make it in the same way on every rank"
            )
        if all(other == mine for other in found):
            return tensor
        copy = plain.clone()
        dist.broadcast(copy, 0, group=self._group)
        return copy.to(tensor.device)

    def spread_bytes(self, content: bytes) -> bytes:
        """The first rank's bytes, on every rank."""
        if self._is_alone:
            return content
        length = torch.tensor([len(content)], dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        buffer = torch.zeros(max(1, int(length)), dtype=torch.uint8)
        if self.is_first and content:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=self._group)
        return bytes(buffer.numpy())[: int(length)]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can hold, in the order of ranks."""
        if self._is_alone:
            return [value]
        mine = json.dumps(value).encode()
        lengths = torch.zeros(len(self.members), dtype=torch.int64)
        lengths[self.place] = len(mine)
        self.add_up(lengths)
        # As rows of one table that is added up: parts of different lengths need no other operation.
        table = torch.zeros(len(self.members), int(lengths.max()), dtype=torch.int32)
        table[self.place, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.add_up(table)
        rows = table.to(torch.uint8).numpy()
        return [
            json.loads(bytes(row)[:length])
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What the first rank's `work` gives (JSON), on every rank; so is a mistake that it finds.

        Others would wait for ever for a rank that has given up.
        """
        if self._is_alone:
            return work()
        found: dict[str, Any] = {}
        if self.is_first:
            try:
                found = {"value": work()}
            except PacelineError as error:
                self.spread_bytes(json.dumps({"error": str(error)}).encode())
                raise
        found = json.loads(self.spread_bytes(json.dumps(found).encode()))
        if "error" in found:
            raise RunDirectoryError(found["error"])
        return found["value"]


def _group_of(members: tuple[int, ...]) -> Any:
    return dist.new_group(list(members)) if len(members) > 1 else None


def _open() -> None:
    """Join those who were started together; nothing where this process was started alone."""
    started = started_by()
    if started is None or started.size == 1:
        return
    if started.by == "mpi":
        register_mpi()
        dist.init_process_group(BACKEND_NAME)
    elif started.by == "slurm":
        where = f"tcp://{started.address}:{started.port}"
        dist.init_process_group(
            "gloo", init_method=where, rank=started.rank, world_size=started.size
        )
    elif started.address is None:
        raise UserError(
            f"RANK = {started.rank} and WORLD_SIZE = {started.size} are set, but not MASTER_ADDR:"
            " start the script with paceline run, torchrun, mpiexec or srun, or plainly"
        )
    else:
        dist.init_process_group("gloo")
    if started.by != "torchrun" and "OMP_NUM_THREADS" not in named_variables(()):
        # Where cores are not bound, every rank would use all of them.
        torch.set_num_threads(max(1, usable_cores() // max(1, started.local_size)))
    atexit.register(_close)


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    settle(ending=True)
