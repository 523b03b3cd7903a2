"""From a version's folder to something that computes: checked, warmed up, fitted to the machine.

A loader per format. Files are compared with their checksums before they are opened; nothing is
unpickled and no code of a model runs. How many threads compute one batch, and how many batches are
computed at once, is measured in a fraction of a second on the model itself (`setup`).
"""

from __future__ import annotations

import contextlib
import io
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
from paceline.serve.setup import LARGEST_BATCH, NO_SLOWER, UNKNOWN, Run, Setup, measured
from paceline.serve.versions import read_version

LONE_GAIN = 1.5
"""A second session, in all cores, is kept for lone requests that it answers so many times as fast:
onnxruntime's takes the memory of the weights once more."""


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
    if about.kind == "onnx":
        maker, on_cpu = _onnx(file, device)
    else:
        maker, on_cpu = _safetensors(about, file, device)
    return prepare(about, maker, file.stat().st_size, most, on_cpu=on_cpu)


@dataclass(kw_only=True)
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
    try:
        for workers, threads in sorted({(1, cores), (cores, 1)}, reverse=True):
            run, begin = maker(threads)
            pool = ThreadPoolExecutor(workers, "paceline-serve", begin)
            clock = time.thread_time if on_cpu and threads == 1 else time.perf_counter
            # What is in the list is closed, whatever happens.
            ways.append(_Way(setup=UNKNOWN, run=run, pool=pool))
            ways[-1].setup = measured(
                about,
                run,
                pool,
                workers=workers,
                threads=threads,
                most=most or LARGEST_BATCH,
                clock=clock,
            )
        best, alone = _chosen(ways)
    except BaseException:
        for way in ways:
            way.pool.shutdown(wait=True)
        raise
    for way in ways:
        if way is not best and way is not alone:
            way.pool.shutdown(wait=True)
    preparer = Preparer(about.signature)
    if about.signature.pictures is not None:
        preparer.picture(_small_picture())  # the first one imports what scales pictures
    return Servable(
        about=about,
        preparer=preparer,
        run=best.run,
        pool=best.pool,
        setup=best.setup,
        size=size if alone is None or alone.run is best.run else 2 * size,
        alone=None if alone is None else (alone.run, alone.pool),
    )


def _chosen(ways: list[_Way]) -> tuple[_Way, _Way | None]:
    """What computes batches, and what computes lone requests where that is worth its memory.

    A batch per core comes first: one batch in all cores must be clearly faster, as it leaves them
    idle while requests are read and answered.
    """
    first, last = ways[0], ways[-1]
    if last.setup.samples_per_second > first.setup.samples_per_second / NO_SLOWER:
        return last, None
    lone = last.setup.lone_seconds * LONE_GAIN <= first.setup.lone_seconds
    return first, (last if lone else None)


def _onnx(file: Path, device: str) -> tuple[Maker, bool]:
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
    return (lambda threads: (run, _torch_threads(threads))), chosen == "cpu"


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
    return prepare(about, lambda n: (trained.outputs, _torch_threads(n)), size, most, on_cpu=on_cpu)


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
