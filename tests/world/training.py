"""What people do with a backend: DDP with and without hooks, pipelines, objects, sub-groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add one check; it raises when something is wrong."""
    CHECKS[function.__name__] = function
    return function


def everything() -> dict[str, str]:
    """Run every check; for each, nothing or what went wrong."""
    found = {}
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def model() -> nn.Sequential:
    """The same small network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of 24."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 20, generator=generator)
    return inputs, torch.randint(0, 5, (24,), generator=generator)


def alone(steps: int = 4) -> nn.Sequential:
    """The network after training in one process on the global batch."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    return network


def together(hook: Any = None, state: Any = None, steps: int = 4) -> nn.Module:
    """The network after DDP, each rank on its part of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # A tiny bucket makes several all-reduces per step, in flight at the same time.
    network = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    if hook is not None:
        network.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = (part.chunk(size)[rank] for part in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    return network.module


def close(one: nn.Module, other: nn.Module, tolerance: float) -> None:
    """Assert that two networks have the same weights."""
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def equal_everywhere(network: nn.Module) -> None:
    """Assert that every rank has the same weights to the last bit."""
    flat = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    assert all(torch.equal(copies[0], other) for other in copies)


@check
def ddp() -> None:
    network = together()
    equal_everywhere(network)
    close(network, alone(), 1e-5)


@check
def ddp_bf16_hook() -> None:
    """Gradients travel as bf16; torch's own hook refuses CPUs, so this is ours."""

    def hook(_, bucket):  # type: ignore[no-untyped-def] # torch reads the annotation
        narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
        future = dist.all_reduce(narrow, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    network = together(hook)
    equal_everywhere(network)
    close(network, alone(), 0.05)


@check
def ddp_powersgd_hook() -> None:
    """Its callbacks start further collectives and wait for them.

    Off CUDA they do so on a thread of their own, beside backward, which starts the next bucket's:
    in which order is chance, on each rank another. So the hook ends before backward goes on.
    """

    def in_order(state, bucket):  # type: ignore[no-untyped-def] # torch reads the annotation
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=1
    )
    network = together(in_order, state, steps=6)
    equal_everywhere(network)
    close(network, alone(6), 0.2)


def _pipeline(schedule_class: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    network = model()
    layers = list(copy.deepcopy(network))
    cut = [layers[i * len(layers) // size : (i + 1) * len(layers) // size] for i in range(size)]
    stage = PipelineStage(nn.Sequential(*cut[rank]), rank, size, torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    inputs, targets = batch(0)
    for _ in range(2):  # the second time no shapes are exchanged any more
        stage.submod.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs, **({"target": targets, "losses": losses} if size == 1 else {}))
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
    loss = nn.functional.cross_entropy(network(inputs), targets)
    loss.backward()
    start = sum(len(list(nn.Sequential(*part).parameters())) for part in cut[:rank])
    wanted = list(network.parameters())[start:]
    for got, want in zip(stage.submod.parameters(), wanted, strict=False):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
    if rank == size - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())


@check
def pipeline_gpipe() -> None:
    _pipeline(ScheduleGPipe)


@check
def pipeline_1f1b() -> None:
    _pipeline(Schedule1F1B)


@check
def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(size)]
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=size - 1)
    assert shared == [f"from {size - 1}", size - 1]


@check
def functional_collectives() -> None:
    """The traceable kind, which reach the group through C++."""
    import warnings

    import torch.distributed._functional_collectives as functional

    warnings.simplefilter("ignore", FutureWarning)

    size = dist.get_world_size()
    summed = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert torch.equal(summed + 0, torch.full((3,), float(size)))
    gathered = functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    assert torch.equal(gathered + 0, torch.ones(2 * size))
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, dist.group.WORLD)
    assert torch.equal(scattered + 0, torch.full((2,), float(size)))
    swapped = functional.all_to_all_single(torch.ones(size), None, None, dist.group.WORLD)
    assert torch.equal(swapped + 0, torch.ones(size))


@check
def any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            place = torch.zeros(1)
            source = dist.recv(place)
            assert place.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    dist.barrier()


@check
def overlapping_groups() -> None:
    """Every pair of neighbours has a group, used at the same time, asynchronously."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [(left, left + 1) for left in range(size - 1)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    works = []
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            tensor = torch.full((1000,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(pair)))
    for work, tensor, total in reversed(works):
        work.wait()
        assert torch.equal(tensor, torch.full((1000,), float(total)))
        assert work.is_completed()


@check
def large_messages_without_waiting() -> None:
    """A large send must leave while its sender computes and waits for nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((2_000_000,), float(rank))
    place = torch.empty_like(tensor)
    works = [dist.irecv(place, (rank - 1) % size)] if size > 1 else []
    works += [dist.isend(tensor, (rank + 1) % size)] if size > 1 else []
    for work in works:
        work.wait()
    assert not works or torch.equal(place, torch.full_like(tensor, float((rank - 1) % size)))
