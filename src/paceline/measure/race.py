"""`race`: find the fastest way to train a workload on this machine, or remember it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from paceline.config import dump_config
from paceline.config.environment import cache_root, instruction_limit
from paceline.cost.crossing import crossing_mb
from paceline.cost.memory import Footprint, estimate_mb
from paceline.errors import PacelineError, WorkerError
from paceline.local.cores import quota_cores, usable_cores, visible_cores
from paceline.local.memory import MEMORY_PART, available_mb
from paceline.measure.choice import decided
from paceline.measure.contest import RULES, Contest
from paceline.measure.race_rank import ALTERNATING, RaceResult, RaceTask
from paceline.plan.candidates import candidate, structures, variants
from paceline.references import is_reference
from paceline.run import RunDirectory
from paceline.schema import (
    Candidate,
    Config,
    NodePlan,
    Plan,
    Race,
    decode,
    encode,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    from paceline.train.parts import Given, Parts

BUSY = 0.15
"""Part of the cores in use by others above which times are doubtful."""
ATTEMPTS = 4
"""How often ranks are started anew after a candidate brought them down."""


@dataclass(frozen=True, kw_only=True)
class RaceRequest:
    """What to race, and how."""

    config: Config
    batch_size: int
    given: Given | None = None
    again: bool = False
    seconds: float = 40.0
    say: Callable[[str], None] = print
    quiet: bool = False
    thorough: bool = False
    """Measure every candidate to the end; the result is not kept."""


def run_race(request: RaceRequest) -> tuple[Race, bool]:
    """The race's result, and whether it came from the cache."""
    stored = _stored(fingerprint(request))
    if request.thorough:
        return _race(request), False
    if request.given is None and not request.again and stored.exists():
        kept = kept_race(stored)
        if kept is not None and (kept.busy <= BUSY or busy_cores() > BUSY):
            return kept, True
        if kept is not None:
            request.say("the race in the cache was run on a busy machine: racing again")
    race = _race(request)
    if request.given is None:
        keep(race, request.say)
    return race, False


def keep(race: Race, say: Callable[[str], None]) -> None:
    """Put a race into the cache, under its fingerprint."""
    stored = _stored(race.fingerprint)
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(stored, race)
    except OSError as error:
        say(f"the race's result could not be kept in {stored.parent}: {error.strerror}")


def _stored(name: str) -> Path:
    return cache_root() / "races" / f"{name}.json"


def kept_race(stored: Path) -> Race | None:
    """A race of the cache; None where it is another version's, or damaged: race anew."""
    try:
        race = read_json(Race, stored)
        for chosen in (entry for entry in race.candidates if entry.chosen):
            numerics = {key: getattr(chosen, key) for key in ("precision", "memory_format")}
            decode(Plan, {**numerics, "batch_size": race.batch_size})  # what it will be trained by
            return race
    except PacelineError:
        pass
    return None


def fingerprint(request: RaceRequest) -> str:
    """The same for the same machine, model, batch and versions."""
    config = request.config
    work = encode(config.workload)
    for key in ("batch_size", "batch_per_worker"):
        work.pop(key)
    facts: dict[str, Any] = {
        "machine": [processor_name(), usable_cores(), quota_cores(), psutil.virtual_memory().total],
        "workload": work,
        "sources": [_source_hash(text) for text in (config.workload.model, config.workload.loss)],
        "optimizer": [config.optimizer.name, config.optimizer.momentum, config.optimizer.clip_norm],
        "numerics": encode(config.numerics),
        "image_size": config.data.image_size,
        "data_options": config.data.options,
        "device": config.train.device,
        "instructions": instruction_limit(),
        "batch": request.batch_size,
        "rules": RULES,
        "versions": [metadata.version("paceline"), metadata.version("torch")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _race(request: RaceRequest) -> Race:
    from paceline.train.parts import make_parts

    start = time.monotonic()
    config = request.config
    busy = busy_cores()
    parts = make_parts(config, request.given)
    footprint = measure_footprint(parts, config, request.batch_size)
    cores = usable_cores()
    nodes = structures(
        cores,
        request.batch_size,
        elementwise=parts.elementwise,
        many=request.given is None and config.train.device != "cuda",
    )
    numerics = variants(config.numerics, images=len(parts.dataset.sample_shape) == 3)
    fitting, refused, estimates = _fit(nodes, numerics, footprint, request.batch_size)
    if request.given is None:
        parts.dataset.close()
        results = race_in_ranks(request, fitting, numerics)
    else:
        results = _race_here(request, parts, fitting, numerics)
    results = [
        dataclasses.replace(
            entry,
            estimated_mb=estimates.get(entry.name),
            crossing_mb=crossing_mb(footprint, entry.node, batch_size=request.batch_size),
        )
        for entry in results
    ] + refused
    race = Race(
        fingerprint=fingerprint(request),
        workload=f"{config.workload.model} on {config.workload.data}",
        batch_size=request.batch_size,
        cores=cores,
        seconds=time.monotonic() - start,
        busy=busy,
        warnings=_warnings(busy, results),
        candidates=tuple(results),
        gradient_mb=footprint.parameter_mb,
        made=datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    return decided(race, config)


def _fit(
    nodes: list[NodePlan],
    numerics: list[tuple[Any, Any]],
    footprint: Footprint,
    batch_size: int,
) -> tuple[list[NodePlan], list[Candidate], dict[str, float]]:
    """Structures that fit into memory, candidates that do not, and every estimate."""
    limit = MEMORY_PART * available_mb()
    fitting, refused, estimates = [], [], {}
    for node in nodes:
        for precision, memory_format in numerics:
            entry = candidate(node, precision, memory_format)
            estimates[entry.name] = estimate_mb(
                footprint, node, batch_size=batch_size, precision=precision
            )
        plain = candidate(node, *numerics[0])
        if estimates[plain.name] <= limit:
            fitting.append(node)
        else:
            refused.append(
                dataclasses.replace(
                    plain,
                    estimated_mb=estimates[plain.name],
                    reason=f"needs about {estimates[plain.name]:,.0f} MB, of {limit:,.0f} free",
                )
            )
    return fitting, refused, estimates


def _race_here(
    request: RaceRequest, parts: Parts, nodes: list[NodePlan], numerics: list[tuple[Any, Any]]
) -> list[Candidate]:
    """In this process: for objects that have no name another process could find them by."""
    from paceline.measure.ground import make_ground
    from paceline.measure.trial import RankAlternation

    room_mb = MEMORY_PART * available_mb()
    ground = make_ground(request.config, request.batch_size, parts=parts)
    before = usable_cores()
    alternation = RankAlternation(ground)
    contest = Contest(
        ground.run,
        batch_size=request.batch_size,
        seconds=request.seconds,
        say=_progress(request),
        alternation=alternation,
        room_mb=room_mb,
    )
    try:
        return contest.run(nodes, numerics)
    finally:
        from paceline.local.cores import set_threads

        alternation.close()
        set_threads(before)


def race_in_ranks(
    request: RaceRequest, nodes: list[NodePlan], numerics: list[tuple[Any, Any]]
) -> list[Candidate]:
    """In processes of its own, started anew when a candidate brings them down."""
    task = _task(request, nodes, numerics)
    return list(_in_ranks(request.config, task).candidates)


def time_sizes(
    request: RaceRequest, entry: Candidate, sizes: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Seconds of the updates of one candidate at several batch sizes, timed in turns."""
    task = _task(request, [entry.node], [(entry.precision, entry.memory_format)])
    task = dataclasses.replace(task, sizes=tuple(sizes), entry=entry)
    return {int(size): times for size, times in _in_ranks(request.config, task).times.items()}


def _task(request: RaceRequest, nodes: list[NodePlan], numerics: list[tuple[Any, Any]]) -> RaceTask:
    return RaceTask(
        nodes=tuple(nodes),
        numerics=tuple(numerics),
        batch_size=request.batch_size,
        seconds=request.seconds,
        quiet=request.quiet,
        thorough=request.thorough,
        room_mb=MEMORY_PART * available_mb(),
    )


def _in_ranks(config: Config, task: RaceTask) -> RaceResult:
    from paceline.launch.local import run_ranks

    folder = Path(tempfile.mkdtemp(prefix="paceline-race-"))
    run = RunDirectory(folder)
    ranks = max(node.ranks for node in task.nodes)
    try:
        run.config.write_text(dump_config(config))
        for attempt in range(ATTEMPTS):
            write_json(folder / "race-task.json", task)
            try:
                run_ranks(
                    run,
                    NodePlan(strategy="processes", processes=ranks),
                    module="paceline.measure.race_rank",
                )
                return read_json(RaceResult, folder / "race-result.json")
            except WorkerError as error:
                current, alternating = folder / "race-current.json", folder / ALTERNATING
                if attempt + 1 == ATTEMPTS or not current.exists():
                    raise
                if alternating.exists():  # each alone did not
                    task = dataclasses.replace(task, alternate=False)
                    alternating.unlink()
                    continue
                entry = read_json(Candidate, current)
                reason = f"brought its processes down: {str(error).splitlines()[0]}"
                broken = dataclasses.replace(entry, reason=reason)
                task = dataclasses.replace(task, known=(*task.known, broken))
                current.unlink()
        raise AssertionError("unreachable")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _progress(request: RaceRequest) -> Callable[[str], None]:
    if request.quiet:
        return lambda text: None
    return lambda text: request.say(f"  {text}")


def measure_footprint(parts: Parts, config: Config, batch_size: int) -> Footprint:
    """What the model takes: parameters counted, activations seen on one sample."""
    from paceline.models import summarise

    model = parts.build_model()
    shape = parts.dataset.sample_shape
    parameters = sum(p.numel() for p in model.parameters())
    try:
        layers = summarise(model, shape).layers
        activations = sum(_elements(layer.output_shape) for layer in layers)
    except Exception:
        activations = 0  # a model whose layers cannot be watched: its trial will tell
    slots = {"sgd": 1 if config.optimizer.momentum else 0}.get(config.optimizer.name, 2)
    sample = _elements(shape)
    return Footprint(
        parameter_mb=parameters * 4 / 1e6,
        activation_mb=(activations + sample) * 4 / 1e6,
        optimizer_slots=slots,
        batch_mb=sample * batch_size * 4 / 1e6,
    )


def _elements(shape: Any) -> int:
    total = 1
    for size in shape or ():
        total *= int(size)
    return total


def busy_cores(seconds: float = 0.4) -> float:
    """Part of the cores we may use that anything used just now, while we sleep.

    Other cores do not matter: several hosts may be emulated on one machine, a core each.
    """
    used: list[float] = psutil.cpu_percent(interval=seconds, percpu=True)
    own = [used[core] for core in visible_cores() if core < len(used)] or used
    return sum(own) / len(own) / 100.0


def _warnings(busy: float, candidates: list[Candidate]) -> tuple[str, ...]:
    warnings = []
    if busy > BUSY:
        warnings.append(
            f"other programs used {busy:.0%} of the cores before the race: its times are doubtful;"
            " run it again with --again when the machine is quiet"
        )
    timed = [c for c in candidates if c.images_per_second and c.low and c.high and c.trials > 3]
    wide = [c for c in timed if (c.high or 0) > 1.4 * (c.low or 1)]
    if timed and len(wide) > len(timed) / 2:
        warnings.append("times of the same candidate differ by more than 40%: the machine is noisy")
    return tuple(warnings)


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or os.uname().machine


def _source_hash(reference: str) -> str:
    """The contents of the user's file, so that a changed model is raced again."""
    if not is_reference(reference):
        return ""
    place = Path(reference.rpartition(":")[0])
    if place.suffix == ".py" and place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    return ""
