"""From a version's folder to something that computes: checked, warmed up, fitted to the machine.

A loader per format. Files are compared with their checksums before they are opened; nothing is
unpickled and no code of a model runs. How many threads compute one batch, and how many batches are
computed at once, is measured in a fraction of a second on the model itself (`setup`).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import ModelError, UnsupportedError, shortened
from paceline.local.cores import usable_cores
from paceline.schema.version import FILES, INPUT, OUTPUT, Version
from paceline.serve.inputs import Preparer
from paceline.serve.setup import (
    LARGEST_BATCH,
    LONGEST_MEASURING,
    NO_SLOWER,
    UNKNOWN,
    Run,
    Setup,
    lone_gain,
    measured,
)
from paceline.serve.versions import read_version

LONE_GAIN = 1.15
"""A second session, in all cores, is kept for lone requests that it answers so many times as fast:
onnxruntime's takes the memory of the weights once more."""
INSTANT_SECONDS = 0.0002
"""A lone sample that takes no longer is computed by the event loop itself: handing it to a thread
and back takes about as long, and others wait no longer than while a few requests are read."""


@dataclass(frozen=True, kw_only=True)
class Servable:
    """A version that can answer."""

    about: Version
    preparer: Preparer
    run: Run
    pool: ThreadPoolExecutor
    setup: Setup
    size: int
    """Bytes of its files, which stand for its memory."""
    alone: tuple[Run, ThreadPoolExecutor] | None = None
    """Computes a batch in all cores, for when nothing else is computed."""

    def close(self) -> None:
        """Give back its threads; its memory goes with the last reference."""
        self.pool.shutdown(wait=True)
        if self.alone is not None:
            self.alone[1].shutdown(wait=True)


Maker = Callable[[int, bool], tuple[Run, Callable[[], None]]]
"""For a number of threads, and whether they are for lone requests: what computes, and what each
worker's thread does first."""


def load(folder: Path, device: str = "cpu", most: int | None = None) -> Servable:
    """Load a version; ModelError where that is not possible, with the reason.

    `most` is the largest batch that is wanted.
    """
    about = read_version(folder)
    file = folder / FILES[about.kind]
    if about.kind == "torch":
        raise UnsupportedError(
            f"{folder} is of the format 'torch', which cannot be read without unpickling: export"
            " it again with --format onnx"
        )
    if about.kind == "onnx":
        maker, on_cpu = _onnx(file, device)
    else:
        maker, on_cpu = _safetensors(about, file, device)
    return prepare(about, maker, file.stat().st_size, most, on_cpu=on_cpu)


@dataclass(kw_only=True, eq=False)
class _Way:
    """A version in as many sessions and threads, and what it was measured to do."""

    setup: Setup
    run: Run
    pool: ThreadPoolExecutor


def prepare(
    about: Version, maker: Maker, size: int, most: int | None = None, *, on_cpu: bool = False
) -> Servable:
    """Choose how to use the cores, and check that outputs are what version.json says.

    `on_cpu`: a run in one thread is timed by what it takes of the processor, which programs beside
    the server hardly change.
    """
    cores = usable_cores()
    ways: list[_Way] = []
    until = time.perf_counter() + LONGEST_MEASURING
    try:
        for workers, threads in sorted({(1, cores), (cores, 1)}, reverse=True):
            ways.append(_way(maker, workers, threads, lone=False))
            way = ways[-1]
            clock = time.thread_time if on_cpu and threads == 1 else time.perf_counter
            way.setup = measured(
                about,
                way.run,
                way.pool,
                workers=workers,
                threads=threads,
                most=most or LARGEST_BATCH,
                clock=clock,
                until=until,
            )
        best, alone = _chosen(ways), None
        _close(ways, but=[best])  # before there is a third one in memory
        is_slow = best.setup.lone_seconds > INSTANT_SECONDS
        if best.setup.workers > 1 and is_slow and time.perf_counter() < until:
            ways.append(_way(maker, 1, cores, lone=True))
            gain = lone_gain(about, (best.run, best.pool), (ways[-1].run, ways[-1].pool))
            alone = ways[-1] if gain >= LONE_GAIN else None
    except BaseException:
        _close(ways)
        raise
    _close(ways, but=[best, alone])
    preparer = Preparer(about.signature)
    if about.signature.pictures is not None:
        preparer.picture(_small_picture())  # the first one imports what scales pictures
    setup = best.setup
    if about.kind == "onnx" and on_cpu and setup.threads == 1:
        setup = replace(setup, is_instant=setup.lone_seconds <= INSTANT_SECONDS)
    return Servable(
        about=about,
        preparer=preparer,
        run=best.run,
        pool=best.pool,
        setup=setup,
        size=size if alone is None or alone.run is best.run else 2 * size,
        alone=None if alone is None else (alone.run, alone.pool),
    )


def _way(maker: Maker, workers: int, threads: int, *, lone: bool) -> _Way:
    run, begin = maker(threads, lone)
    return _Way(setup=UNKNOWN, run=run, pool=ThreadPoolExecutor(workers, "paceline-serve", begin))


def _close(ways: list[_Way], but: Sequence[_Way | None] = ()) -> None:
    for way in [one for one in ways if one not in but]:
        way.pool.shutdown(wait=True)
        ways.remove(way)


def _chosen(ways: list[_Way]) -> _Way:
    """What computes batches.

    A batch per core comes first: one batch in all cores must be clearly faster, as it leaves them
    idle while requests are read and answered.
    """
    first, last = ways[0], ways[-1]
    faster = last.setup.samples_per_second > first.setup.samples_per_second / NO_SLOWER
    return last if faster else first


def _onnx(file: Path, device: str) -> tuple[Maker, bool]:
    try:
        import onnxruntime
    except ImportError:
        raise UnsupportedError(
            "ONNX models need onnxruntime: pip install 'paceline[serve]'"
        ) from None
    providers = onnx_providers(onnxruntime, device)

    def make(threads: int, lone: bool) -> tuple[Run, Callable[[], None]]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Threads that wait by spinning take the cores from those who answer requests. While one
        # request is alone there are none; threads that sleep wake up too late for its short layers.
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(lone)))
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # onnxruntime has a class of its own for every cause
            raise ModelError(f"onnxruntime cannot load {file}: {shortened(str(error))}") from None
        ends = (session.get_inputs(), session.get_outputs())
        names = [[one.name for one in end] for end in ends]
        if names != [[INPUT], [OUTPUT]]:
            raise ModelError(
                f"{file} has the inputs and outputs {names}, not {INPUT!r} and {OUTPUT!r}: export"
                " it with `paceline export`"
            )
        return (lambda inputs: np.asarray(session.run([OUTPUT], {INPUT: inputs})[0])), _nothing

    return make, providers[0] == "CPUExecutionProvider"


def onnx_providers(runtime: Any, device: str) -> list[str]:
    """Where onnxruntime computes; CUDA that is asked for and not there is refused."""
    there = "CUDAExecutionProvider" in runtime.get_available_providers()
    if device == "cuda" and not there:
        raise UnsupportedError(
            "--device cuda needs onnxruntime-gpu and a CUDA device, which are not here: use cpu or"
            " auto"
        )
    return ["CUDAExecutionProvider", "CPUExecutionProvider"][not there or device == "cpu" :]


def _safetensors(about: Version, file: Path, device: str) -> tuple[Maker, bool]:
    from paceline.serve.networks import build_network
    from paceline.training.device import choose_device

    if about.network is None:
        raise UnsupportedError(
            f"{file} holds weights of a model that is code of its own, which a server does not run:"
            " export it with --format onnx"
        )
    chosen = str(choose_device(device, 0))
    run = build_network(about.network, about.signature, file, chosen)
    return (lambda threads, lone: (run, _torch_threads(threads))), chosen == "cpu"


def _torch_threads(threads: int) -> Callable[[], None]:
    """OpenMP keeps the number of threads per thread that asks."""

    def begin() -> None:
        import torch

        torch.set_num_threads(threads)

    return begin


def one_thread() -> None:
    """For threads that scale pictures: there are as many of them as cores."""
    _torch_threads(1)()


def _small_picture() -> bytes:
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "png")
    return file.getvalue()


def _nothing() -> None:
    return None


def load_run(path: Path, device: str = "cpu", most: int | None = None) -> Servable:
    """The best weights of a run, computed by PyTorch without an export."""
    from paceline.serve.export import describe_run
    from paceline.serve.trained import open_trained
    from paceline.training.device import choose_device

    trained = open_trained(path, device=device)
    first = trained.outputs(np.zeros((1, *trained.signature.shape), trained.signature.dtype))
    size = (trained.checkpoint / "model.safetensors").stat().st_size
    about = describe_run(trained, first)
    on_cpu = str(choose_device(device, 0)) == "cpu"

    def maker(threads: int, lone: bool) -> tuple[Run, Callable[[], None]]:
        return trained.outputs, _torch_threads(threads)

    return prepare(about, maker, size, most, on_cpu=on_cpu)


@contextlib.contextmanager
def explained(what: str) -> Any:
    """Whatever goes wrong in a library becomes a reason that can be named."""
    from paceline.errors import PacelineError

    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise ModelError(
            f"{what} cannot be loaded: {type(error).__name__}: {shortened(str(error))}"
        ) from error
