"""From a version's folder to something that computes: checked, warmed up, fitted to the machine.

A loader per format. Files are compared with their checksums before they are opened; nothing is
unpickled and no code of a model runs. How many threads compute one batch, and how many batches are
computed at once, is measured in a fraction of a second on the model itself.
"""

from __future__ import annotations

import contextlib
import io
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import ModelError, UnsupportedError, shortened
from paceline.local.cores import usable_cores
from paceline.schema.version import FILES, INPUT, OUTPUT, Version
from paceline.serve.inputs import Preparer
from paceline.serve.versions import read_version

Run = Callable[[np.ndarray], np.ndarray]
LARGEST_BATCH = 64
"""Samples of one batch: more gains nothing on CPUs, and the last of them would wait long."""
LONGEST_BATCH = 0.1
"""Seconds: a batch that takes longer must gain something, as every request waits for others."""
LONGEST_TRIAL = 1.0
"""Seconds: larger batches are not tried, or loading would take too long."""
NO_SLOWER = 0.9
"""A larger batch may give so many times the samples per second of the best: the rest is noise.
One that must gain gives more than the best divided by this."""
GROWTH = 4
"""Each batch that is tried is so many times the one before."""
BARRIER_SECONDS = 60.0
"""Only against a hang: workers begin a trial together."""
TRIAL_SECONDS = 0.08
"""How long each way to divide the cores is tried, after one run to warm up."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the cores are used."""

    workers: int
    """Batches that are computed at once."""
    threads: int
    """Threads of each."""
    batch: int
    """Samples of a batch at most."""
    samples_per_second: float


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

    def close(self) -> None:
        """Give back its threads; its memory goes with the last reference."""
        self.pool.shutdown(wait=True)


Maker = Callable[[int], tuple[Run, Callable[[], None]]]
"""For a number of threads: what computes, and what each worker's thread does first."""


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
    maker = _onnx(file, device) if about.kind == "onnx" else _safetensors(about, file, device)
    return prepare(about, maker, file.stat().st_size, most)


def prepare(about: Version, maker: Maker, size: int, most: int | None = None) -> Servable:
    """Choose how to use the cores, and check that outputs are what version.json says."""
    cores = usable_cores()
    best: tuple[Setup, Run, ThreadPoolExecutor] | None = None
    for workers, threads in sorted({(1, cores), (cores, 1)}):
        run, begin = maker(threads)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="paceline-serve", initializer=begin)
        try:
            found = _measured(about, run, pool, workers, threads, most or LARGEST_BATCH)
        except BaseException:
            pool.shutdown(wait=True)
            if best is not None:
                best[2].shutdown(wait=True)
            raise
        if best is None or found.samples_per_second > best[0].samples_per_second:
            if best is not None:
                best[2].shutdown(wait=True)
            best = (found, run, pool)
        else:
            pool.shutdown(wait=True)
    assert best is not None
    setup, run, pool = best
    preparer = Preparer(about.signature)
    if about.signature.pictures is not None:
        preparer.picture(_small_picture())  # the first one imports what scales pictures
    return Servable(
        about=about,
        preparer=preparer,
        run=run,
        pool=pool,
        setup=setup,
        size=size,
    )


def _measured(
    about: Version, run: Run, pool: ThreadPoolExecutor, workers: int, threads: int, most: int
) -> Setup:
    """The largest batch that is no slower per sample, and the samples per second with it.

    One that takes long must be faster. Of repeated times the shortest counts: what else the machine
    does makes none shorter.
    """
    best, count = Setup(workers=workers, threads=threads, batch=1, samples_per_second=0.0), 1
    while count <= most:
        inputs = np.zeros((count, *about.signature.shape), dtype=about.signature.dtype)
        _checked(about, pool.submit(run, inputs).result())
        barrier = threading.Barrier(workers)

        def repeat(inputs: np.ndarray = inputs, barrier: Any = barrier) -> float:
            barrier.wait(BARRIER_SECONDS)
            end, shortest = time.perf_counter() + TRIAL_SECONDS, math.inf
            while True:
                start = time.perf_counter()
                run(inputs)
                now = time.perf_counter()
                shortest = min(shortest, now - start)
                if now > end:
                    return shortest

        seconds = max(one.result() for one in [pool.submit(repeat) for _ in range(workers)])
        rate = count * workers / seconds
        is_long = count > 1 and seconds > LONGEST_BATCH
        if rate >= best.samples_per_second * (1 / NO_SLOWER if is_long else NO_SLOWER):
            fastest = max(rate, best.samples_per_second)
            best = Setup(workers=workers, threads=threads, batch=count, samples_per_second=fastest)
        elif is_long:  # a short one may have been disturbed: the next may still be as good
            break
        if seconds * GROWTH > LONGEST_TRIAL:
            break
        count *= GROWTH
    return best


def _checked(about: Version, outputs: np.ndarray) -> None:
    if tuple(outputs.shape[1:]) != tuple(about.output_shape):
        raise ModelError(
            f"the model gives outputs of shape {list(outputs.shape[1:])} per sample, where"
            f" version.json says {list(about.output_shape)}: export it again"
        )


def _onnx(file: Path, device: str) -> Maker:
    try:
        import onnxruntime
    except ImportError:
        raise UnsupportedError(
            "ONNX models need onnxruntime: pip install 'paceline[serve]'"
        ) from None
    providers = onnx_providers(onnxruntime, device)

    def make(threads: int) -> tuple[Run, Callable[[], None]]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Threads that wait by spinning take the cores from those who answer requests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
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

    return make


def onnx_providers(runtime: Any, device: str) -> list[str]:
    """Where onnxruntime computes; CUDA that is asked for and not there is refused."""
    there = "CUDAExecutionProvider" in runtime.get_available_providers()
    if device == "cuda" and not there:
        raise UnsupportedError(
            "--device cuda needs onnxruntime-gpu and a CUDA device, which are not here: use cpu or"
            " auto"
        )
    return ["CUDAExecutionProvider", "CPUExecutionProvider"][not there or device == "cpu" :]


def _safetensors(about: Version, file: Path, device: str) -> Maker:
    from paceline.serve.networks import build_network
    from paceline.training.device import choose_device

    if about.network is None:
        raise UnsupportedError(
            f"{file} holds weights of a model that is code of its own, which a server does not run:"
            " export it with --format onnx"
        )
    run = build_network(about.network, about.signature, file, str(choose_device(device, 0)))
    return lambda threads: (run, _torch_threads(threads))


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

    trained = open_trained(path, device=device)
    first = trained.outputs(np.zeros((1, *trained.signature.shape), trained.signature.dtype))
    size = (trained.checkpoint / "model.safetensors").stat().st_size
    about = describe_run(trained, first)
    return prepare(about, lambda n: (trained.outputs, _torch_threads(n)), size, most)


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
