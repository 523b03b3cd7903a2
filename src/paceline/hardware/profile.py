"""What planning has to know of this host: update times by batch size, layers, feeding, memory."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from paceline.config.cache import keep, kept, key_of, place_of
from paceline.errors import PacelineError
from paceline.hardware.footprint import measure_footprint
from paceline.hardware.kept_races import fingerprint
from paceline.hardware.machine import busy_cores, processor_name
from paceline.local.cores import quota_cores, usable_cores, visible_cores
from paceline.local.memory import available_mb
from paceline.schema import Candidate, Config, NodePlan, Plan, encode
from paceline.schema.machines import (
    BUSY,
    Layer,
    LinearLayer,
    Machines,
    Measured,
    MeasuredHost,
    UpdateTime,
    WorkloadFacts,
    exactly,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.training.parts import Parts

ROUNDS = 5
LAYER_BATCH = 32
"""Samples that layers are timed with, at most."""
COPY_MB = 64
NOISY = 0.3
"""Quartile distance of updates above which a machine is called noisy."""
CURVE_SECONDS = 8.0
"""About so long updates of all batch sizes together are timed."""
LAYERS_SECONDS = 4.0
"""Rounds of timing layers end after this."""
_VERSION = 3


class TimeSizes(Protocol):
    """Times the updates of a candidate at several batch sizes, in turns."""

    def __call__(
        self, config: Config, entry: Candidate, sizes: Sequence[int], *, seconds: float
    ) -> dict[int, tuple[float, ...]]: ...


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What to measure, with the candidate that won the race for it."""

    config: Config
    batch_size: int
    chosen: Candidate
    time_sizes: TimeSizes
    again: bool = False
    say: Callable[[str], None] = print


def figure(values: Sequence[float], how: str) -> Measured:
    """Median and quartiles of measurements."""
    if len(values) < 2:
        return dataclasses.replace(exactly(values[0], how), samples=len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Measured(median=middle, low=low, high=high, samples=len(values), how=how)


def batch_sizes(batch_size: int) -> list[int]:
    """Where updates are timed beside the batch itself: a half, a quarter, a sixteenth, at least 2.

    >>> batch_sizes(128), batch_sizes(6)
    ([64, 32, 8], [3, 2])
    """
    smaller = {max(2, batch_size // part) for part in (2, 4, 16)}
    return sorted((size for size in smaller if size < batch_size), reverse=True)


def profile(request: ProfileRequest) -> tuple[Machines, bool]:
    """This host as machines.json describes it, and whether that came from the cache."""
    stored = place_of("profiles", _fingerprint(request))
    if not request.again and (found := kept(Machines, stored)) is not None:
        return _for_config(found, request.config), True
    found = _measure(request)
    if trouble := keep(stored, found):
        request.say(trouble)
    return found, False


def _fingerprint(request: ProfileRequest) -> str:
    config = request.config
    same_race = fingerprint(config, request.batch_size)
    facts = [
        _VERSION,
        same_race,
        encode(request.chosen.node),
        request.chosen.precision,
        request.chosen.memory_format,
        # A race that was run again has other times, and the profile stands on them.
        request.chosen.images_per_second,
        config.data.limit,
        config.data.root,
    ]
    return key_of(facts)


def _for_config(found: Machines, config: Config) -> Machines:
    """What does not change a measurement is taken from the configuration at hand."""
    facts = dataclasses.replace(
        found.workload,
        batch_per_worker=config.workload.batch_per_worker,
        epochs=config.train.epochs,
        steps=config.train.steps,
    )
    return dataclasses.replace(found, workload=facts)


def _measure(request: ProfileRequest) -> Machines:
    from paceline.training.parts import make_parts

    config, chosen = request.config, request.chosen
    updates = _update_times(request)
    busy = busy_cores()
    parts = make_parts(config)
    try:
        taken = min(LAYER_BATCH, request.batch_size, len(parts.dataset.train))
        inputs, _ = parts.dataset.train.fetch(np.arange(taken), epoch=0, augment=False)
        layers = profile_layers(parts.build_model(), inputs)
        feed = _feeding(parts, request.batch_size)
        footprint = measure_footprint(parts, config, request.batch_size)
        facts = WorkloadFacts(
            name=f"{config.workload.model} on {config.workload.data}",
            batch_size=request.batch_size,
            samples=len(parts.dataset.train),
            optimizer_slots=footprint.optimizer_slots,
            sample_bytes=inputs[0].nbytes,
            chains=_chains(config, parts, request.batch_size),
            local_batch_norm="local_batch_norm" in config.numerics.allow,
        )
    finally:
        parts.dataset.close()
    host = MeasuredHost(
        name=platform.node(),
        processor=processor_name(),
        visible_cores=len(visible_cores()),
        usable_cores=usable_cores(),
        quota=quota_cores(),
        busy=busy,
        memory_mb=psutil.virtual_memory().total / 1e6,
        free_mb=available_mb(),
        memory_bandwidth=_copying(),
        node=chosen.node,
        precision=chosen.precision,
        memory_format=chosen.memory_format,
        updates=tuple(sorted(updates, key=lambda update: update.batch_size)),
        layers=layers,
        layer_batch=taken,
        feed=feed,
        warnings=_warnings(busy, updates),
    )
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    return _for_config(Machines(made=made, workload=facts, hosts=(host,)), config)


def _chains(config: Config, parts: Parts, batch_size: int) -> tuple[tuple[LinearLayer, ...], ...]:
    """Linear layers that nodes can split, as a training of several finds them."""
    from paceline.exchange.tensor_parallel.chains import find_chains
    from paceline.plan.partition import obstacle

    plan = Plan(nodes=(NodePlan(), NodePlan()), batch_size=batch_size)
    if obstacle(plan, config.exchange, elementwise=":" not in config.optimizer.name):
        return ()
    model = parts.build_model()
    return tuple(find_chains(model, parts.trial(plan, model)))


def _update_times(request: ProfileRequest) -> list[UpdateTime]:
    """Updates of the batch and of smaller ones by the strategy that won, timed in turns."""
    chosen = request.chosen
    sizes = [request.batch_size, *batch_sizes(request.batch_size)]
    sizes = [size for size in sizes if size >= chosen.node.workers]
    if not sizes:
        return [_raced(chosen, request.batch_size)]
    try:
        found = request.time_sizes(request.config, chosen, sizes, seconds=CURVE_SECONDS)
    except PacelineError as error:  # the race has shown that the batch itself can be trained
        request.say(f"smaller batches could not be timed: {error}")
        return [_raced(chosen, request.batch_size)]
    how = f"{chosen.name}, real updates in turns, warm-up dropped"
    return [
        UpdateTime(batch_size=size, seconds=figure(times, how))
        for size, times in found.items()
        if times
    ]


def _raced(entry: Candidate, batch_size: int) -> UpdateTime:
    middle = entry.images_per_second
    assert middle, "a chosen candidate has a time"
    ends = sorted(batch_size / (end or middle) for end in (entry.low, entry.high, middle))
    seconds = Measured(
        median=ends[1], low=ends[0], high=ends[2], samples=max(1, entry.trials), how="the race"
    )
    return UpdateTime(batch_size=batch_size, seconds=seconds)


@dataclass
class _Call:
    """What a layer was given, and what came out."""

    name: str
    layer: nn.Module
    inputs: tuple[Any, ...]
    output_bytes: int


def profile_layers(
    model: nn.Module,
    inputs: torch.Tensor,
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Layer, ...]:
    """Every layer on its own: forward and backward seconds, bytes of weights and activations.

    The model runs once and each layer's input is kept; then each layer is run alone on it,
    backward right after forward, a warm-up and `rounds` times (fewer where that would take
    long). Functions that are no
    module are not seen: costs use the layers' parts of the time, not their sum.
    """
    calls = _record(model, inputs)
    warm = [sum(_time_call(call, clock)) for call in calls]
    rounds = max(1, min(rounds, int(LAYERS_SECONDS / max(sum(warm), 1e-9))))
    counted: set[int] = set()
    rows: dict[str, Layer] = {}
    how = f"alone on {len(inputs)} samples, {rounds} rounds"
    for call in calls:
        own = [p for p in call.layer.parameters() if id(p) not in counted]
        counted.update(map(id, own))
        times = [_time_call(call, clock) for _ in range(rounds)]
        first = next((v for v in call.inputs if hasattr(v, "nbytes")), None)
        row = Layer(
            name=call.name,
            kind=type(call.layer).__name__,
            forward=figure([forward for forward, _ in times], how),
            backward=figure([backward for _, backward in times], how),
            parameter_bytes=sum(p.numel() * p.element_size() for p in own if p.requires_grad),
            input_bytes=first.nbytes // len(inputs) if first is not None else 0,
            activation_bytes=call.output_bytes // len(inputs),
        )
        name = next(
            n
            for i in itertools.count()
            if (n := call.name + (f"#{i + 1}" if i else "")) not in rows
        )
        rows[name] = dataclasses.replace(row, name=name)
    return tuple(rows.values())


def _record(model: nn.Module, inputs: torch.Tensor) -> list[_Call]:
    """One forward pass; every outermost layer with weights of its own, or without layers inside."""
    import torch

    calls: list[_Call] = []
    handles = []

    def watch(name: str, layer: nn.Module) -> None:
        kept: list[tuple[Any, ...]] = []

        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            # A copy: a layer that works in place would change what it was given.
            kept.append(tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args))

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            size = output.nbytes if isinstance(output, torch.Tensor) else 0
            calls.append(_Call(name, layer, kept.pop(), size))

        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))

    inside: list[str] = []
    for name, layer in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        has_own = next(layer.parameters(recurse=False), None) is not None
        if has_own or next(layer.children(), None) is None:
            inside.append(name)
            watch(name or type(layer).__name__, layer)
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _time_call(call: _Call, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one layer's forward and backward."""
    import torch

    def fresh(value: Any, leaf: bool) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        # A clone of the leaf, since operations in place may not write into one.
        return value.detach().requires_grad_(leaf).clone()

    with torch.enable_grad():
        given = [fresh(value, True) for value in call.inputs]
        start = clock()
        output = call.layer(*given)
        forward = clock() - start
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return forward, 0.0
        gradient = torch.ones_like(output)
        start = clock()
        torch.autograd.backward([output], [gradient])
        backward = clock() - start
    for parameter in call.layer.parameters():
        parameter.grad = None
    return forward, backward


def _feeding(parts: Parts, batch_size: int) -> Measured:
    """Samples per second that the data set gives, after one batch of warming up."""
    source = parts.dataset.train
    total = len(source)
    size = min(batch_size, total)
    rates = []
    for number in range(ROUNDS + 1):
        first = (number * size) % max(1, total - size + 1)
        start = time.perf_counter()
        source.fetch(np.arange(first, first + size), epoch=0, augment=True)
        seconds = time.perf_counter() - start
        if number:
            rates.append(size / max(seconds, 1e-9))
    return figure(rates, f"{ROUNDS} batches of {size}, augmented, one at a time")


def _copying() -> Measured:
    """Bytes per second that one core reads and writes."""
    source = np.ones(COPY_MB * 2**20 // 8)
    target = np.empty_like(source)
    rates = []
    for number in range(ROUNDS + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds = time.perf_counter() - start
        if number:
            rates.append(2 * source.nbytes / max(seconds, 1e-9))
    return figure(rates, f"one core copies {COPY_MB} MB, read and written bytes")


def _warnings(busy: float, updates: Sequence[UpdateTime]) -> tuple[str, ...]:
    found = []
    if busy > BUSY:
        found.append(
            f"other programs used {busy:.0%} of the cores while this host was measured: its times"
            " are doubtful"
        )
    widest = max(update.seconds.spread for update in updates)
    if widest > NOISY:
        found.append(f"updates of the same batch differ by {widest:.0%}: the host is noisy")
    return tuple(found)
