"""One matrix of collective x type x shape, the same for every backend.

`matrix` runs on the ranks: every case computes what it should get from the ranks' known inputs, and
compares bit for bit (the numbers are small enough to be exact in every type). Run as a program, it
prints the table of docs/backends.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DTYPES = {
    name: getattr(torch, name)
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
    ]
}
SHAPES = ("scalar", "odd", "empty", "strided", "cube")
# Long enough to be cut into blocks on the network path.
LONG_DTYPES = ("float32", "bfloat16")
LONG = 600_001

Check = Callable[[torch.dtype, str], bool]
COLLECTIVES: dict[str, Check] = {}


def collective(check: Check) -> Check:
    """Add one row to the matrix."""
    COLLECTIVES[check.__name__] = check
    return check


def cases() -> list[str]:
    """The name of every case: collective, type and shape, joined by slashes."""
    names = ["/".join(parts) for parts in itertools.product(COLLECTIVES, DTYPES, SHAPES)]
    return names + [
        "/".join(parts) for parts in itertools.product(COLLECTIVES, LONG_DTYPES, ["long"])
    ]


# -- inputs and comparison -------------------------------------------------------------------------


def given(rank: int, dtype: torch.dtype, shape: str, *, rows: int = 0) -> torch.Tensor:
    """What `rank` puts in: small whole numbers that differ by place and rank.

    With `rows`, a tensor of that many rows, each of the shape.
    """
    sizes = {
        "scalar": (),
        "odd": (7,),
        "empty": (0,),
        "strided": (4, 3),
        "cube": (2, 3, 4),
        "long": (LONG,),
    }[shape]
    if rows:
        sizes = (rows, *(sizes if shape != "long" else (LONG // 8,)))
    count = int(torch.Size(sizes).numel())
    values = ((torch.arange(count) + 3 * rank) % 7 % 3 + 1).reshape(sizes)
    made = values > 1 if dtype is torch.bool else values.to(dtype)
    if shape == "strided":
        wide = torch.zeros(*made.shape[:-1], made.shape[-1] * 2, dtype=dtype)
        wide[..., ::2] = made
        made = wide[..., ::2]
        assert not made.is_contiguous()
    return made


def room(like: torch.Tensor) -> torch.Tensor:
    """A place to receive into, as contiguous as `like`, with contents that are never right."""
    place = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return place.fill_(True if like.dtype is torch.bool else 99)


def here() -> tuple[int, int]:
    """Rank and world size."""
    return dist.get_rank(), dist.get_world_size()


def inputs(dtype: torch.dtype, shape: str, *, rows: int = 0) -> list[torch.Tensor]:
    """What every rank puts in."""
    return [given(rank, dtype, shape, rows=rows) for rank in range(dist.get_world_size())]


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in shape, type and every bit."""
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


def reduced(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """What a reduction should give, computed in a wide type."""
    dtype = tensors[0].dtype
    stack = torch.stack([tensor.contiguous() for tensor in tensors])
    if dtype is torch.bool:
        return stack.any(0) if name in ("SUM", "MAX") else stack.all(0)
    if not dtype.is_complex:
        stack = stack.double()
    outcome = {
        "SUM": lambda: stack.sum(0),
        "AVG": lambda: stack.sum(0) / len(tensors),
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0) if not dtype.is_complex else stack[0],
        "MAX": lambda: stack.amax(0) if not dtype.is_complex else stack[0],
    }[name]()
    return outcome.to(dtype)


# -- the collectives -------------------------------------------------------------------------------


def _all_reduce(dtype: torch.dtype, shape: str, name: str) -> bool:
    tensor = given(here()[0], dtype, shape)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    return same(tensor, reduced(inputs(dtype, shape), name))


@collective
def all_reduce_sum(dtype: torch.dtype, shape: str) -> bool:
    return _all_reduce(dtype, shape, "SUM")


@collective
def all_reduce_avg(dtype: torch.dtype, shape: str) -> bool:
    return _all_reduce(dtype, shape, "AVG")


@collective
def all_reduce_min(dtype: torch.dtype, shape: str) -> bool:
    return _all_reduce(dtype, shape, "MIN")


@collective
def all_reduce_max(dtype: torch.dtype, shape: str) -> bool:
    return _all_reduce(dtype, shape, "MAX")


@collective
def all_reduce_product(dtype: torch.dtype, shape: str) -> bool:
    return _all_reduce(dtype, shape, "PRODUCT")


@collective
def all_reduce_async(dtype: torch.dtype, shape: str) -> bool:
    """Two at once, waited for in the other order, one of them by its future."""
    rank = here()[0]
    first, second = given(rank, dtype, shape), given(rank + 1, dtype, shape)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    works[1].get_future().wait()
    works[0].wait()
    ranks = range(here()[1])
    return same(first, reduced([given(r, dtype, shape) for r in ranks], "SUM")) and same(
        second, reduced([given(r + 1, dtype, shape) for r in ranks], "SUM")
    )


@collective
def broadcast(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    tensor = given(rank, dtype, shape)
    dist.broadcast(tensor, size - 1)
    return same(tensor, given(size - 1, dtype, shape))


@collective
def reduce(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    tensor = given(rank, dtype, shape)
    dist.reduce(tensor, size - 1)
    return rank != size - 1 or same(tensor, reduced(inputs(dtype, shape), "SUM"))


@collective
def all_gather(dtype: torch.dtype, shape: str) -> bool:
    wanted = inputs(dtype, shape)
    places = [room(tensor) for tensor in wanted]
    dist.all_gather(places, given(here()[0], dtype, shape))
    return all(map(same, places, wanted))


@collective
def all_gather_uneven(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    wanted = [given(r, dtype, shape, rows=r + 1) for r in range(size)]
    places = [room(tensor) for tensor in wanted]
    dist.all_gather(places, given(rank, dtype, shape, rows=rank + 1))
    return all(map(same, places, wanted))


@collective
def all_gather_into_tensor(dtype: torch.dtype, shape: str) -> bool:
    source = given(here()[0], dtype, shape, rows=2)
    wanted = torch.cat(inputs(dtype, shape, rows=2))
    place = room(wanted)
    dist.all_gather_into_tensor(place, source)
    return same(place, wanted)


@collective
def all_gather_coalesced(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    first, second = inputs(dtype, shape), [given(r + 1, dtype, shape) for r in range(size)]
    places = [[room(first[r]), room(second[r])] for r in range(size)]
    dist.all_gather_coalesced(places, [given(rank, dtype, shape), given(rank + 1, dtype, shape)])
    return all(same(places[r][0], first[r]) and same(places[r][1], second[r]) for r in range(size))


@collective
def reduce_scatter(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    place = room(given(rank, dtype, shape))
    dist.reduce_scatter(place, [given(rank + piece, dtype, shape) for piece in range(size)])
    return same(place, reduced([given(r + rank, dtype, shape) for r in range(size)], "SUM"))


@collective
def reduce_scatter_tensor(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    everyone = [given(r, dtype, shape, rows=2 * size) for r in range(size)]
    wanted = reduced([tensor[2 * rank : 2 * rank + 2] for tensor in everyone], "SUM")
    place = room(wanted)
    dist.reduce_scatter_tensor(place, everyone[rank])
    return same(place, wanted)


@collective
def all_to_all_single(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    everyone = [given(r, dtype, shape, rows=2 * size) for r in range(size)]
    wanted = torch.cat([tensor[2 * rank : 2 * rank + 2] for tensor in everyone])
    place = room(wanted)
    dist.all_to_all_single(place, everyone[rank])
    return same(place, wanted)


@collective
def all_to_all_single_uneven(dtype: torch.dtype, shape: str) -> bool:
    """Rank r sends r + p rows to rank p, so that rank 0 sends itself nothing."""
    rank, size = here()
    splits = [[r + p for p in range(size)] for r in range(size)]
    total = [sum(row) for row in splits]
    # A request for no rows at all is for one, of which none is sent.
    everyone = [given(r, dtype, shape, rows=max(total[r], 1))[: total[r]] for r in range(size)]
    pieces = [torch.split(everyone[r], splits[r])[rank] for r in range(size)]
    wanted = torch.cat(pieces)
    place = room(wanted)
    dist.all_to_all_single(place, everyone[rank], [p + rank for p in range(size)], splits[rank])
    return same(place, wanted)


@collective
def all_to_all(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    wanted = [given(r + rank, dtype, shape) for r in range(size)]
    places = [room(tensor) for tensor in wanted]
    dist.all_to_all(places, [given(rank + p, dtype, shape) for p in range(size)])
    return all(map(same, places, wanted))


@collective
def gather(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    wanted = inputs(dtype, shape)
    places = [room(tensor) for tensor in wanted] if rank == size - 1 else None
    dist.gather(given(rank, dtype, shape), places, dst=size - 1)
    return places is None or all(map(same, places, wanted))


@collective
def scatter(dtype: torch.dtype, shape: str) -> bool:
    rank, size = here()
    place = room(given(rank, dtype, shape))
    pieces = inputs(dtype, shape) if rank == size - 1 else None
    dist.scatter(place, pieces, src=size - 1)
    return same(place, given(rank, dtype, shape))


@collective
def send_recv(dtype: torch.dtype, shape: str) -> bool:
    """Round the ring, one after the other; alone there is nobody to send to."""
    rank, size = here()
    if size == 1:
        return True
    source = given(rank, dtype, shape)
    place = room(source)
    before = (rank - 1) % size
    if rank % 2:
        dist.recv(place, before)
        dist.send(source, (rank + 1) % size)
    else:
        dist.send(source, (rank + 1) % size)
        dist.recv(place, before)
    return same(place, given(before, dtype, shape))


@collective
def isend_irecv(dtype: torch.dtype, shape: str) -> bool:
    """Receives from every rank posted first, tags out of order."""
    rank, size = here()
    others = [other for other in range(size) if other != rank]
    places = {other: room(given(other, dtype, shape)) for other in others}
    works = [dist.irecv(places[other], other, tag=rank) for other in others]
    source = given(rank, dtype, shape)
    works += [dist.isend(source, other, tag=other) for other in others]
    for work in reversed(works):
        work.wait()
    return all(same(places[other], given(other, dtype, shape)) for other in others)


_HALF: dict[int, Any] = {}


@collective
def sub_group(dtype: torch.dtype, shape: str) -> bool:
    """An all-reduce among the last half of the ranks, and a broadcast from a world rank."""
    rank, size = here()
    members = list(range(size // 2, size))
    if not _HALF:
        _HALF[0] = dist.new_group(members)
    if rank not in members:
        return True
    tensor = given(rank, dtype, shape)
    dist.all_reduce(tensor, group=_HALF[0])
    fine = same(tensor, reduced([given(r, dtype, shape) for r in members], "SUM"))
    tensor = given(rank, dtype, shape)
    dist.broadcast(tensor, size - 1, group=_HALF[0])
    return fine and same(tensor, given(size - 1, dtype, shape))


# -- running ---------------------------------------------------------------------------------------


def matrix(transports: list[str]) -> dict[str, dict[str, list[str]]]:
    """Run every case over each transport; for each, `passed`, `refused` or `wrong`, and why.

    Between transports the process group is destroyed and made anew in the same processes.
    """
    import warnings

    from paceline.backends import BACKEND_NAME, register_mpi

    warnings.simplefilter("ignore")
    found = {transports[0]: _once()}
    for transport in transports[1:]:
        dist.destroy_process_group()
        _HALF.clear()
        register_mpi(transport=transport)
        dist.init_process_group(BACKEND_NAME)
        found[transport] = _once()
    return found


def _once() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in cases():
        operation, dtype, shape = name.split("/")
        try:
            right = COLLECTIVES[operation](DTYPES[dtype], shape)
            found[name] = ["passed" if right else "wrong", ""]
        except Exception as error:
            found[name] = ["refused", (str(error) or type(error).__name__).splitlines()[0][:200]]
    dist.barrier()
    return found


def verdicts(engine: str, size: int) -> dict[str, dict[str, list[str]]]:
    """Launch the matrix; the verdict on every case, by transport."""
    from ranks import run_ranks

    transports = ["auto", "network"] if engine == "mpi" else ["auto"]
    job = run_ranks(engine, size, "conformance:matrix", {"transports": transports}, timeout=600)
    assert job.code == 0, job.output[-3000:]
    assert sorted(job.results) == list(range(size))
    return {
        transport: combined({rank: found[transport] for rank, found in job.results.items()})
        for transport in transports
    }


def combined(results: dict[int, dict[str, list[str]]]) -> dict[str, list[str]]:
    """One verdict per case out of the ranks': all must agree for `passed` and `refused`."""
    verdicts = {}
    for name in results[0]:
        per_rank = [results[rank][name] for rank in sorted(results)]
        kinds = {kind for kind, _ in per_rank}
        if len(kinds) == 1:
            verdicts[name] = per_rank[0]
        elif "wrong" not in kinds and name.startswith(("sub_group/", "reduce/")):
            # Ranks outside the sub-group have nothing to refuse.
            verdicts[name] = next(v for v in per_rank if v[0] == "refused")
        else:
            verdicts[name] = ["wrong", f"ranks differ: {per_rank}"]
    return verdicts


def main() -> None:
    """Run everything and print the table of docs/backends.md."""
    print("| backend | ranks | passed | refused | wrong |\n|---|---|---|---|---|")
    for engine in ("gloo", "mpi"):
        for size in (1, 2, 4):
            for transport, found in verdicts(engine, size).items():
                count = Counter(kind for kind, _ in found.values())
                label = engine if engine == "gloo" else f"mpi4py, transport {transport}"
                print(
                    f"| {label} | {size} | {count['passed']} | {count['refused']} "
                    f"| {count['wrong']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
