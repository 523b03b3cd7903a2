"""From a trained run to a version that can be served, its outputs compared with the model's.

What `torch.export` records of a model is compared with the model on real samples, in batches of
several sizes; an export that says anything else is refused and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import logging
import subprocess
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline import models
from paceline.errors import (
    DataError,
    ModelError,
    PacelineError,
    UnsupportedError,
    UserError,
    shortened,
)
from paceline.models.extra_state import has_extra_state
from paceline.schema.checkpoint import sum_of
from paceline.schema.codec import write_json
from paceline.schema.plain import parse_json
from paceline.schema.version import (
    FILES,
    INPUT,
    OUTPUT,
    Architecture,
    Compared,
    Kind,
    Origin,
    Version,
)
from paceline.serve.inputs import Preparer, read_inputs
from paceline.serve.networks import build_network
from paceline.serve.trained import Trained
from paceline.serve.versions import write_next
from paceline.training.parts import data_request

SAMPLES = 32
"""Real samples that are compared: a fault of the export shows in any of them."""
TOLERANCE = 1e-4
"""Of the largest output. Other kernels sum in another order: 1e-6 is usual, 2e-5 was seen."""
Run = Callable[[np.ndarray], np.ndarray]


def export(
    trained: Trained, kind: Kind, to: Path, *, samples: tuple[Path, ...] = ()
) -> tuple[Path, Version]:
    """Write the next version of the model in the folder `to`."""
    inputs = real_samples(trained, samples)
    expected = trained.outputs(inputs)
    made: list[Version] = []

    def fill(folder: Path) -> None:
        file = folder / FILES[kind]
        run = _WRITERS[kind](trained, file)
        version = _described(trained, kind, expected, compared(run, inputs, expected))
        version = dataclasses.replace(version, files={file.name: sum_of(file)})
        write_json(folder / "version.json", version)
        made.append(version)

    return write_next(to, fill), made[0]


def real_samples(trained: Trained, files: tuple[Path, ...]) -> np.ndarray:
    """Inputs from the files, or from the run's own test data."""
    if files:
        found = [one for _, one in read_inputs(Preparer(trained.signature), files)]
        return np.stack(found[:SAMPLES])
    from paceline.data import open_dataset

    try:
        dataset = open_dataset(data_request(trained.config))
    except UserError as error:
        raise DataError(
            f"an export is compared with the model on real samples, and the run's data is not here"
            f" ({error}): give some with --samples"
        ) from None
    try:
        count = min(SAMPLES, len(dataset.test))
        inputs, _ = dataset.test.fetch(np.arange(count), epoch=0, augment=False)
    finally:
        dataset.close()
    return np.ascontiguousarray(inputs.numpy())


def compared(run: Run, inputs: np.ndarray, expected: np.ndarray) -> Compared:
    """Run the export on all samples, on one, and on some; ModelError where it differs."""
    scale = float(np.abs(expected).max()) or 1.0
    largest = 0.0
    for count in sorted({len(inputs), 1, (len(inputs) + 1) // 2}):
        try:
            found = run(inputs[:count])
        except Exception as error:
            raise ModelError(
                f"the export cannot compute a batch of {count}: {shortened(str(error))}; write the"
                " model so that it takes batches of any size"
            ) from None
        if found.shape != expected[:count].shape:
            raise ModelError(
                f"the export gives outputs of shape {list(found.shape)} for a batch of {count}, the"
                f" model {list(expected[:count].shape)}: it is not exported"
            )
        apart = np.abs(found.astype(np.float64) - expected[:count].astype(np.float64)).max()
        largest = max(largest, float(apart) / scale) if np.isfinite(apart) else float("inf")
    if not largest <= TOLERANCE:
        raise ModelError(
            f"the export's outputs differ from the model's by {largest:.2g} of the largest output"
            f" (allowed: {TOLERANCE:g}): what torch.export recorded is not what the model does;"
            " it is not exported"
        )
    return Compared(samples=len(inputs), largest=largest, tolerance=TOLERANCE)


def _program(trained: Trained) -> torch.export.ExportedProgram:
    """The model as torch.export records it, for batches of any size."""
    signature = trained.signature
    # Two samples: torch.export takes the number 1 for a rule of the model.
    example = torch.zeros((2, *signature.shape), dtype=getattr(torch, signature.dtype))
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quiet():
            return torch.export.export(
                trained.model.cpu(), (example,), dynamic_shapes=({0: batch},), strict=False
            )
    except PacelineError:
        raise
    except Exception as error:
        raise ModelError(
            f"torch.export cannot record {trained.config.workload.model} for batches of any size:"
            f" {shortened(str(error))}; --format safetensors keeps the weights alone"
        ) from None


def _write_onnx(trained: Trained, file: Path) -> Run:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"ONNX needs the package {error.name}: pip install 'paceline[serve]'"
        ) from None
    program = _program(trained)
    try:
        with _quiet():
            torch.onnx.export(
                program,
                f=str(file),
                dynamo=True,
                external_data=False,
                input_names=[INPUT],
                output_names=[OUTPUT],
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:
        raise ModelError(
            f"torch.onnx cannot write {trained.config.workload.model}: {shortened(str(error))};"
            " --format torch or safetensors may"
        ) from None
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda inputs: np.asarray(session.run([OUTPUT], {INPUT: inputs})[0])


def _write_torch(trained: Trained, file: Path) -> Run:
    program = _program(trained)
    with _quiet():
        with _as_disk_errors():
            torch.export.save(program, file)
        module: Any = torch.export.load(file).module()

    def run(inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(module(torch.from_numpy(inputs)))

    return run


def _write_safetensors(trained: Trained, file: Path) -> Run:
    """Weights alone; a model of Paceline's own is built from its name to compare, and to serve."""
    if has_extra_state(trained.model):
        raise UnsupportedError(
            "the model keeps more than tensors (get_extra_state), which other readers of"
            " .safetensors do not know: use --format onnx"
        )
    tensors = trained.model.state_dict()
    state = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    with _as_disk_errors():
        save_file(state, file)
    network = network_of(trained)
    if network is not None:
        return build_network(network, trained.signature, file)
    return trained.outputs  # code of its own: the weights are all there is


_WRITERS: dict[str, Callable[[Trained, Path], Run]] = {
    "onnx": _write_onnx,
    "torch": _write_torch,
    "safetensors": _write_safetensors,
}


def network_of(trained: Trained) -> Architecture | None:
    """What the model is built from, where it is one of Paceline's own."""
    work = trained.config.workload
    if work.model not in models.names():
        return None
    classes = work.classes or len(trained.signature.classes)
    return Architecture(name=work.model, options=dict(work.model_options), classes=classes)


def _described(trained: Trained, kind: Kind, expected: np.ndarray, outcome: Compared) -> Version:
    position = trained.state.position
    packages = ["paceline", "torch", "numpy", *(["onnx", "onnxscript"] if kind == "onnx" else [])]
    return Version(
        kind=kind,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        signature=trained.signature,
        output_shape=tuple(expected.shape[1:]),
        output_dtype=str(expected.dtype),
        tells_classes=trained.tells_classes and expected.ndim == 2,
        network=network_of(trained),
        origin=Origin(
            run=str(trained.run.path),
            update=position.update,
            epoch=position.epoch,
            commit=_commit(),
            metrics=metrics_of(trained),
        ),
        compared=outcome,
        versions={name: metadata.version(name) for name in packages},
    )


def describe_run(trained: Trained, outputs: np.ndarray) -> Version:
    """What a version of the run would say that is served without an export."""
    itself = Compared(samples=0, largest=0.0, tolerance=TOLERANCE)
    return _described(trained, "safetensors", outputs, itself)


def metrics_of(trained: Trained) -> dict[str, float]:
    """The numbers of the run's last line of metrics that the checkpoint has."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        for text in trained.run.metrics.read_text().splitlines():
            line = parse_json(text)
            if line["epoch"] <= max(1, trained.state.position.epoch):
                found = {
                    key: float(line[key])
                    for key in ("test_accuracy", "test_top5", "test_loss", "train_loss")
                    if isinstance(line.get(key), int | float)
                }
    return found


def _commit() -> str | None:
    """The git commit of the current folder, where it is part of a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


@contextlib.contextmanager
def _as_disk_errors() -> Iterator[None]:
    """Libraries have errors of their own for a disk that takes no more."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(errno.EIO, shortened(str(error))) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say about themselves: users can do nothing about it."""
    names = ("torch.onnx", "torch.export", "torch.fx.experimental", "onnxscript")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # What cannot be traced is printed as a graph, too.
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
