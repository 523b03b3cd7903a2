"""The trained model of a run: its weights, what it takes, and what it says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from paceline.config import load_config
from paceline.config.environment import data_root
from paceline.data.feed import evaluation_batches
from paceline.data.images import SUFFIXES
from paceline.data.listing import TEST_NAMES
from paceline.errors import (
    DataError,
    ModelError,
    PacelineError,
    RunDirectoryError,
    UnsupportedError,
    UserError,
    is_out_of_memory,
    shortened,
    shown,
)
from paceline.local.base import StepResult
from paceline.local.steps import Supervised, are_classes
from paceline.local.values import full_precision, scored
from paceline.models.extra_state import load_model
from paceline.references import OBJECT, is_object, is_reference
from paceline.run import RunDirectory, open_run
from paceline.schema import Config
from paceline.schema.checkpoint import TrainState, checkpoints_in, read_state
from paceline.schema.signature import Signature
from paceline.serve.answers import TOP, Guess, top_guesses
from paceline.serve.inputs import Preparer, read_inputs
from paceline.training.carried import CARRIED
from paceline.training.device import choose_device
from paceline.training.given import Given, refuse_without_objects
from paceline.training.parts import make_parts, model_factory
from paceline.training.team import means_of

Weights = Literal["best", "latest"]
CROSS_ENTROPY = frozenset(
    {
        "cross_entropy",
        "torch.nn.functional:cross_entropy",
        "object:torch.nn.functional.cross_entropy",
        "object:partial(torch.nn.functional.cross_entropy)",
        "object:torch.nn.modules.loss.CrossEntropyLoss()",
    }
)
"""What a run calls the losses that train scores of which softmax makes probabilities."""
BATCH = 64
"""Samples that are computed together: far fewer than memory allows, enough for all cores."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model in evaluation mode, and everything that its answers need."""

    run: RunDirectory
    checkpoint: Path
    config: Config
    state: TrainState
    signature: Signature
    model: nn.Module

    @property
    def tells_classes(self) -> bool:
        """Whether outputs are scores of classes, of which softmax makes probabilities."""
        known = self.signature.classes or self.config.workload.classes
        work = self.config.workload
        return work.loss in CROSS_ENTROPY and not work.step and bool(known)

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """What the model gives for a batch of inputs, in float32 and without dropout."""
        blocks = []
        with torch.no_grad():
            device = next(iter(self.model.parameters()), torch.empty(0)).device
            for start in range(0, len(inputs), BATCH):
                part = np.require(inputs[start : start + BATCH], requirements=["C", "W"])
                block = torch.from_numpy(part)
                found = full_precision(self._computed(block.to(device)))
                if not isinstance(found, torch.Tensor):
                    raise ModelError(
                        f"the model gives a {type(found).__name__}, not one tensor: what it says"
                        " cannot be told, exported or served"
                    )
                blocks.append(found.cpu().numpy())
        return np.concatenate(blocks)

    def _computed(self, block: torch.Tensor) -> Any:
        try:
            return scored(self.model, block)
        except Exception as error:
            if isinstance(error, PacelineError) or is_out_of_memory(error):
                raise
            takes = "; only models of one input are predicted, exported and served"
            several = isinstance(error, TypeError) and "missing" in str(error)
            raise ModelError(
                f"{self.config.workload.model} cannot compute inputs of shape {list(block.shape)}:"
                f" {shortened(str(error)) or type(error).__name__}{takes if several else ''}"
            ) from error

    def guesses(self, inputs: np.ndarray, count: int = TOP) -> list[list[Guess]]:
        """The likeliest classes of each input."""
        return top_guesses(self.outputs(inputs), self.signature, count)


def open_trained(
    path: Path,
    *,
    weights: Weights | None = None,
    device: str = "cpu",
    factory: Callable[..., nn.Module] | None = None,
) -> Trained:
    """The best weights of a run (the latest where none is the best yet), or those asked for.

    `factory` makes the model where it came as an object of a Python program.
    """
    run = open_run(path)
    if not run.config.is_file():
        raise RunDirectoryError(
            f"{path} is no run directory (it has no config.toml): `paceline runs` lists them"
        )
    config = load_config(run.config)
    checkpoint = find_checkpoint(run, weights)
    state = read_state(checkpoint)
    if factory is None and is_object(config.workload.model):
        raise ModelError(
            f"the model of {path} came as an object of a Python program"
            f" ({config.workload.model.removeprefix(OBJECT)}): use result.predict there, or train"
            " with a model that can be named as 'module:callable'"
        )
    signature = state.signature or _signature_of_data(config, path)
    model = build_model(config, signature, factory)
    try:
        model.load_state_dict(load_model(checkpoint / "model.safetensors"))
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(
            f"the weights of {checkpoint} do not fit {config.workload.model}:"
            f" {shortened(str(error))}"
        ) from None
    model.to(choose_device(device, 0)).eval()
    return Trained(
        run=run,
        checkpoint=checkpoint,
        config=config,
        state=state,
        signature=signature,
        model=model,
    )


def build_model(
    config: Config, signature: Signature, factory: Callable[..., nn.Module] | None = None
) -> nn.Module:
    """The model of a configuration with untrained weights, without its data."""
    bare = dataclasses.replace(config.workload, weights=None, freeze=False)
    kind = getattr(torch, signature.dtype)
    return model_factory(
        dataclasses.replace(config, workload=bare),
        signature,
        factory,
        lambda model: model(torch.zeros((1, *signature.shape), dtype=kind)),
    )()


def find_checkpoint(run: RunDirectory, weights: Weights | None) -> Path:
    """The checkpoint with the best or the latest weights."""
    best = run.checkpoints / "best"
    if weights != "latest" and best.is_dir():
        return best.resolve()
    if weights == "best":
        raise RunDirectoryError(
            f"{run.path} has no best weights: no evaluation has come yet; use the latest ones"
        )
    found = checkpoints_in(run.checkpoints)
    if not found:
        raise RunDirectoryError(f"{run.path} has no checkpoint yet: train it first")
    return found[-1]


def _signature_of_data(config: Config, path: Path) -> Signature:
    """From the data itself, for checkpoints that are older than signatures."""
    try:
        dataset = make_parts(config).dataset
    except UserError as error:
        raise DataError(
            f"the checkpoints of {path} do not say what the model takes, as new ones do, and its"
            f" data cannot be asked: {error}"
        ) from None
    dataset.close()
    return dataset.signature


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model does on labelled samples."""

    samples: int
    loss: float
    accuracy: float | None
    top5: float | None
    data: str


def evaluate_run(trained: Trained, data: Path | None = None) -> Evaluation:
    """Score a model on the run's own test data, or on pictures in folders of the classes' names.

    `data` may also be the folder of data sets that `paceline train --data` takes.
    """
    folder = class_folder(trained, data) if data is not None else None
    if folder is not None:
        return _sums(trained, _labelled(trained.signature, folder), str(folder))
    config = trained.config
    root = data or (Path(config.data.root) if config.data.root else None) or data_root()
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, root=str(root) if root else None)
    )
    parts = make_parts(config)
    try:
        batches = (
            (batch.inputs.numpy(), batch.targets)
            for batch in evaluation_batches(
                parts.dataset.test, batch_size=BATCH, worker=0, shares=[1.0]
            )
        )
        step = parts.step
        if not isinstance(step, Supervised):
            raise UnsupportedError(
                "a run with a step of its own is scored by its training alone: see test_loss in"
                f" {trained.run.metrics}"
            )
        return _sums(trained, batches, f"{parts.dataset.name} (test)", step)
    finally:
        parts.dataset.close()


def _sums(
    trained: Trained,
    batches: Iterator[tuple[np.ndarray, torch.Tensor]],
    name: str,
    step: Supervised | None = None,
) -> Evaluation:
    step = step or Supervised(loss=nn.functional.cross_entropy)
    total, losses, weights, first, among = 0, 0.0, 0.0, 0.0, 0.0
    classes = True
    with torch.no_grad():
        for inputs, targets in batches:
            outputs = torch.from_numpy(trained.outputs(inputs))
            loss, weight = step.of(outputs, targets).loss_and_weight(len(inputs))
            losses, weights = losses + loss, weights + weight
            total += len(inputs)
            classes = classes and are_classes(outputs, targets)
            if classes:
                best = outputs.topk(min(TOP, outputs.shape[1]), dim=1).indices
                hits = best == targets.unsqueeze(1)
                first, among = first + float(hits[:, 0].sum()), among + float(hits.any(1).sum())
    return Evaluation(
        samples=total,
        loss=losses / weights,
        accuracy=first / total if classes else None,
        top5=among / total if classes else None,
        data=name,
    )


def class_folder(trained: Trained, data: Path) -> Path | None:
    """Where the folders of the classes are: in `data`, or in its test part.

    None where `data` holds the run's data set as a folder of that name, which a class may have.
    """
    if not data.is_dir():
        raise DataError(f"{data} is not a folder: give one with a folder of pictures per class")
    classes, name = trained.signature.classes, trained.config.workload.data
    can_be_inside = not (Path(name).is_absolute() or is_reference(name))
    if can_be_inside and _test_part(data / name, classes):
        return None
    place = _test_part(data, classes)
    if place is None and classes and not (can_be_inside and (data / name).is_dir()):
        raise DataError(
            f"{data} holds no folder of a class ({shortened(', '.join(classes))}), nor the run's"
            f" data set {shown(name)}: give a folder of pictures per class"
        )
    return place


def _test_part(folder: Path, classes: tuple[str, ...]) -> Path | None:
    for place in (*(folder / name for name in TEST_NAMES), folder):
        if any((place / name).is_dir() for name in classes):
            return place
    return None


def _labelled(signature: Signature, folder: Path) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Pictures below the folders of the classes, in batches."""
    numbers = {name: number for number, name in enumerate(signature.classes)}
    unknown = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in numbers
    )
    if unknown:
        raise DataError(
            f"{folder} holds the class {unknown[0]!r}, which the model does not know; it knows:"
            f" {shortened(', '.join(signature.classes))}"
        )
    files = [
        (path, number)
        for name, number in numbers.items()
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise DataError(f"{folder} holds no picture in the folders of the classes")
    preparer = Preparer(signature)
    for start in range(0, len(files), BATCH):
        block = files[start : start + BATCH]
        yield (
            np.stack([_prepared(preparer, path) for path, _ in block]),
            torch.tensor([number for _, number in block]),
        )


def _prepared(preparer: Preparer, path: Path) -> np.ndarray:
    try:
        return preparer.picture(path.read_bytes())
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {error}: take it out, or mend it") from None


def predict_any(trained: Trained, inputs: Any) -> list[list[Guess]]:
    """The likeliest classes of pictures (by path), pixels (uint8), or what the model takes."""
    refuse_other_answers(trained)
    preparer = Preparer(trained.signature)
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if not len(inputs):
        return []
    if isinstance(inputs[0], str | Path):
        values = np.stack([one for _, one in read_inputs(preparer, [Path(p) for p in inputs])])
        return trained.guesses(values)
    if not isinstance(inputs, torch.Tensor) and isinstance(inputs[0], torch.Tensor):
        inputs = torch.stack(list(inputs))
    return trained.guesses(preparer.given(np.asarray(inputs)))


def refuse_other_answers(trained: Trained) -> None:
    """Outputs that are no scores of classes are not made into probabilities."""
    if not trained.tells_classes:
        work = trained.config.workload
        how = f"by the step {work.step}" if work.step else f"with the loss {work.loss}"
        raise ModelError(
            f"the outputs of {work.model} are not known to be scores of classes (it was trained"
            f" {how.replace(OBJECT, '')}): read them with `paceline predict --json`, or load the"
            " weights with result.load_model"
        )


def score(path: Path, given: Given | None, *, data: Any, weights: Weights) -> dict[str, float]:
    """Means over the run's test data, or over `data`, of everything that evaluations report.

    `given`: what the run was trained with as objects of a Python program.
    """
    trained = open_trained(path, weights=weights, factory=given.model if given else None)
    refuse_without_objects(trained.config, given)
    if data is not None:
        given = dataclasses.replace(given or Given(), data=(data, data))
    parts = make_parts(trained.config, given)
    found, size = StepResult(), BATCH
    if CARRIED in read_state(trained.checkpoint).optimizer_numbers:  # it may want batches alike
        size = trained.config.workload.global_batch(1)
    try:
        with torch.no_grad():
            for batch in evaluation_batches(parts.dataset.test, batch_size=size):
                measure = parts.step(trained.model, batch.samples.values)
                found += StepResult.of(measure, batch.count, 0.0)
    finally:
        parts.dataset.close()
    means = {name: value for name, value in means_of(found.sums).items() if value is not None}
    if not math.isnan(found.correct):
        means = {"accuracy": found.correct / found.samples, **means}
    return {
        "samples": found.samples,
        "loss": found.loss_sum / found.weight if found.weight else math.nan,
        **means,
    }
