"""Every collective of torch, brought to flat host tensors and handed to a transport."""

# Torch declares several overloads of each method; it calls the one implemented here.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.backends.mpi.between_hosts import NetworkTransport
from paceline.backends.mpi.deadline import Deadline, GroupPlace
from paceline.backends.mpi.dtypes import host, move, put_back, reduction
from paceline.backends.mpi.node import NodeTransport
from paceline.backends.mpi.work import MpiWork
from paceline.errors import UnsupportedError

Tensors = list[torch.Tensor]


class Collectives(dist.ProcessGroup):
    """The collective half of a process group.

    Method names and arguments are torch's. Where torch has two names for one thing, the older is
    kept as an alias.
    """

    _place: GroupPlace
    _transport: NodeTransport | NetworkTransport

    def _launch(
        self, operation: str, call: Callable[[Deadline], None], tensors: Tensors, opts: Any
    ) -> MpiWork:
        """Run `call` now or later."""
        raise NotImplementedError

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce each tensor over all ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        flats = [host(tensor) for tensor in tensors]
        plans = [reduction(opts.reduceOp, flat.dtype) for flat in flats]

        def call(deadline: Deadline) -> None:
            for tensor, flat, how in zip(tensors, flats, plans, strict=True):
                self._transport.all_reduce(flat, how, deadline)
                put_back(tensor, flat)

        return self._launch("all_reduce", call, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MpiWork:
        (tensor,) = tensors
        flat, root = host(tensor), opts.rootRank
        how = reduction(opts.reduceOp, flat.dtype)

        def call(deadline: Deadline) -> None:
            self._transport.reduce(flat, how, root, deadline)
            if root == self._place.rank:
                put_back(tensor, flat)

        return self._launch("reduce", call, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> MpiWork:
        """Reduce list element i into the output of rank i."""
        opts = opts or dist.ReduceScatterOptions()
        (output,), (parts,) = outputs, inputs
        self._check_count("reduce_scatter", "input", parts)
        source = torch.cat([host(part) for part in parts])
        counts = [part.numel() for part in parts]
        return self._reduce_scatter([output], [source], [counts], "reduce_scatter", opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> MpiWork:
        """Reduce piece i of one tensor into the output of rank i."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        size = self._place.size
        counts = [[output.numel()] * size for output in outputs]
        return self._reduce_scatter(
            outputs, [host(one) for one in inputs], counts, "reduce_scatter_tensor", opts
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, outputs: Tensors, flats: Tensors, counts: list[list[int]], name: str, opts: Any
    ) -> MpiWork:
        plans = [reduction(opts.reduceOp, flat.dtype) for flat in flats]
        rooms = [host(output, read=False) for output in outputs]
        for flat, parts, room in zip(flats, counts, rooms, strict=True):
            if sum(parts) != flat.numel() or parts[self._place.rank] != room.numel():
                raise UnsupportedError(
                    f"{name}: an input of {flat.numel()} elements cannot fill outputs of "
                    f"{room.numel()} on {self._place.size} ranks"
                )

        def call(deadline: Deadline) -> None:
            for output, room, flat, parts, how in zip(
                outputs, rooms, flats, counts, plans, strict=True
            ):
                self._transport.reduce_scatter(room, flat, parts, how, deadline)
                put_back(output, room)

        return self._launch(name, call, outputs, opts)

    # -- moves -------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> MpiWork:
        (tensor,) = tensors
        root = opts.rootRank
        flat = host(tensor, read=root == self._place.rank)

        def call(deadline: Deadline) -> None:
            self._transport.broadcast(flat, root, deadline)
            if root != self._place.rank:
                put_back(tensor, flat)

        return self._launch("broadcast", call, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> MpiWork:
        """Every rank's tensor in a list; the sizes may differ between ranks."""
        return self._all_gather_lists(outputs, inputs, "all_gather", opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> MpiWork:
        """Several `allgather` as one operation; here `outputs[i]` is what came from rank i."""
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._all_gather_lists(by_tensor, inputs, "all_gather_coalesced", opts)

    def _all_gather_lists(
        self, outputs: list[Tensors], inputs: Tensors, name: str, opts: Any
    ) -> MpiWork:
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._check_count(name, "output", parts)
            self._check_piece(name, parts[self._place.rank], tensor)
        flats = [host(tensor) for tensor in inputs]
        counts = [[part.numel() for part in parts] for parts in outputs]

        def call(deadline: Deadline) -> None:
            for parts, flat, sizes in zip(outputs, flats, counts, strict=True):
                room = torch.empty(sum(sizes), dtype=flat.dtype)
                self._transport.all_gather(room, flat, sizes, deadline)
                _deal(room, parts)

        return self._launch(name, call, [part for parts in outputs for part in parts], opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> MpiWork:
        """Every rank's tensor, one after the other, in one."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MpiWork:
        name, size = "all_gather_into_tensor", self._place.size
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() != source.numel() * size or output.dtype != source.dtype:
                raise UnsupportedError(
                    f"{name}: an output of {output.numel()} elements of {output.dtype} cannot hold "
                    f"{source.numel()} elements of {source.dtype} from {size} ranks"
                )
        rooms = [host(output, read=False) for output in outputs]
        flats = [host(source) for source in inputs]

        def call(deadline: Deadline) -> None:
            for output, room, flat in zip(outputs, rooms, flats, strict=True):
                self._transport.all_gather(room, flat, [flat.numel()] * size, deadline)
                put_back(output, room)

        return self._launch(name, call, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
    ) -> MpiWork:
        """Rows to and from every rank; without splits the same number each."""
        name = "all_to_all_single"
        given = _row_counts(name, source, source_splits, self._place.size)
        kept = _row_counts(name, output, output_splits, self._place.size)
        flat, room = host(source), host(output, read=False)

        def call(deadline: Deadline) -> None:
            self._transport.all_to_all(room, flat, kept, given, deadline)
            put_back(output, room)

        return self._launch(name, call, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MpiWork:
        """Tensor i to rank i, and one from every rank."""
        self._check_count("all_to_all", "output", outputs)
        self._check_count("all_to_all", "input", inputs)
        source = torch.cat([host(tensor) for tensor in inputs])
        given = [tensor.numel() for tensor in inputs]
        kept = [tensor.numel() for tensor in outputs]

        def call(deadline: Deadline) -> None:
            room = torch.empty(sum(kept), dtype=source.dtype)
            self._transport.all_to_all(room, source, kept, given, deadline)
            _deal(room, outputs)

        return self._launch("all_to_all", call, outputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> MpiWork:
        """Every rank's tensor in a list of the root."""
        (tensor,) = inputs
        flat, root = host(tensor), opts.rootRank
        parts = outputs[0] if root == self._place.rank else []
        if parts:
            self._check_count("gather", "output", parts)
            self._check_piece("gather", parts[root], tensor)
        counts = [part.numel() for part in parts]

        def call(deadline: Deadline) -> None:
            room = torch.empty(sum(counts), dtype=flat.dtype) if parts else None
            self._transport.gather(room, flat, counts, root, deadline)
            if room is not None:
                _deal(room, parts)

        return self._launch("gather", call, parts or inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> MpiWork:
        """Tensor i of the root's list to rank i."""
        (output,) = outputs
        root = opts.rootRank
        parts = inputs[0] if root == self._place.rank else []
        if parts:
            self._check_count("scatter", "input", parts)
            self._check_piece("scatter", parts[root], output)
        room = host(output, read=False)
        source = torch.cat([host(part) for part in parts]) if parts else None
        counts = [part.numel() for part in parts]

        def call(deadline: Deadline) -> None:
            self._transport.scatter(room, source, counts, root, deadline)
            put_back(output, room)

        return self._launch("scatter", call, outputs, opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._launch("barrier", self._transport.barrier, [], opts)

    # -- checks -----------------------------------------------------------------------------------

    def _check_count(self, name: str, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._place.size:
            raise UnsupportedError(
                f"{name}: the {kind} list has {len(tensors)} tensors, "
                f"but the group has {self._place.size} ranks; give one per rank"
            )

    def _check_piece(self, name: str, piece: torch.Tensor, tensor: torch.Tensor) -> None:
        if piece.numel() != tensor.numel() or piece.dtype != tensor.dtype:
            raise UnsupportedError(
                f"{name}: this rank's own piece has {piece.numel()} elements of {piece.dtype} on "
                f"one side and {tensor.numel()} of {tensor.dtype} on the other; make them equal"
            )


def _deal(room: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Distribute one flat tensor over a list of tensors of any shape and place."""
    position = 0
    for part in parts:
        piece = room[position : position + part.numel()]
        position += part.numel()
        if part.device.type == "cpu" and part.is_contiguous():
            move(part.detach().view(-1), piece)
        else:
            put_back(part, piece)


def _row_counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements go to or come from each rank, from numbers of rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise UnsupportedError(
                f"{name}: {rows} rows cannot be divided evenly over {size} ranks; give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise UnsupportedError(
            f"{name}: split sizes {list(splits)} must be {size} numbers that add up to {rows} rows"
        )
    width = tensor.numel() // rows if rows else 0
    return [count * width for count in splits]
