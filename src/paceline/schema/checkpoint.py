"""What a checkpoint says of itself, and whether it can be trusted; without torch.

    state.json    position, sums of the epoch, the settings and the plan it was trained with,
                  SHA-256 of every other file, and a digest of all that

A bit that flipped, an edited number or another run's file makes one of these sums wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ConfigError, RunDirectoryError, shortened
from paceline.run import point
from paceline.schema.codec import decode, encode
from paceline.schema.config import Config, Train
from paceline.schema.plain import read_json_file
from paceline.schema.schedule import first_other_rate
from paceline.schema.signature import Signature

FORMAT = 2
"""1 had no sums."""
DAMAGED = "damaged-"
"""What the name of a checkpoint begins with that was found damaged and put aside."""

MAY_CHANGE = (
    "name", "versions", "observe", "data.root", "data.cache", "data.processes", "workload.unit",
    "train.epochs", "train.steps", "train.lengths", "train.until", "train.deadline",
    "train.evaluate_every", "train.checkpoint_every", "train.keep",
    "train.checkpoint_seconds", "train.silence", "train.restarts",
)  # fmt: skip
"""What may be different when a run is continued: how long, not what."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in the training we are."""

    epoch: int = 0
    """Whole epochs done."""
    step: int = 0
    """Updates done in the current epoch."""
    update: int = 0
    """Updates done in all."""

    def after_update(self) -> Position:
        return Position(epoch=self.epoch, step=self.step + 1, update=self.update + 1)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a checkpoint says besides tensors."""

    format: int = FORMAT
    position: Position = field(default_factory=Position)
    updates: int = 0
    """How many updates the training was to have, which rates may follow."""
    lengths: dict[str, int] = field(default_factory=dict)
    """`train.lengths`, where it was made longer before."""
    batch_size: int = 0
    samples: int = 0
    tally: dict[str, float] = field(default_factory=dict)
    """Sums over the current epoch, so that its metrics come out whole after a resume."""
    seconds: float = 0.0
    """Time spent on the run so far, in all sessions."""
    best_accuracy: float | None = None
    best_loss: float | None = None
    best_value: float | None = None
    """Of what train.monitor names."""
    since_best: int = 0
    """Evaluations since the best one."""
    optimizer_numbers: dict[str, dict[str, object]] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    """The settings that must not change, by dotted key."""
    plan: dict[str, object] = field(default_factory=dict)
    signature: Signature | None = None
    """What the model takes; None in checkpoints that are older than it."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every other file of the checkpoint."""
    digest: str = ""
    """SHA-256 of everything above."""


def digest_of(data: Mapping[str, Any]) -> str:
    """The digest of what state.json holds, however it is laid out."""
    content = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sum_of(path: Path) -> str:
    """SHA-256 of a file (of one just written, from memory: 500 MB take 0.4 s)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """All whole checkpoints of a run, the newest last."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted((path for path in found if path.is_dir() and any(path.iterdir())), key=update_of)


def update_of(path: Path) -> int:
    """The number of updates that a checkpoint's name says."""
    return int(path.name.removeprefix("step-"))


def read_state(path: Path) -> TrainState:
    """What a checkpoint says of itself; RunDirectoryError where its files are not those it names.

    One that is older than sums (`format` 1) is read as it is: whoever asks says so.
    """
    try:
        data = read_json_file(path / "state.json")
        state = decode(TrainState, data)
        if "digest" in data or state.format != 1:
            _verify(path, data, state)
        elif state.batch_size:  # format 1 took an epoch that train.steps cut short for a whole one
            epoch, step = divmod(state.position.update, -(-state.samples // state.batch_size))
            state = replace(state, position=replace(state.position, epoch=epoch, step=step))
    except (OSError, ValueError, ConfigError) as error:
        reason = shortened(str(error))
        raise RunDirectoryError(f"the checkpoint {path} is damaged ({reason})") from None
    return state


def newest_good(folder: Path, say: Callable[[str], None]) -> tuple[Path, TrainState] | None:
    """The newest checkpoint that is not damaged; newer ones are named and put aside.

    None where there is no checkpoint at all.
    """
    found = checkpoints_in(folder)
    damaged: list[str] = []
    for path in reversed(found):
        try:
            state = read_state(path)
        except RunDirectoryError as error:
            damaged.append(str(error))
            continue
        for text, other in zip(damaged, reversed(found), strict=False):
            aside = other.with_name(f"{DAMAGED}{other.name}")
            shutil.rmtree(aside, ignore_errors=True)
            other.rename(aside)
            say(f"warning: {text}; it is {aside.name} now")
        if damaged:
            point(folder / "latest", path.name)
        if state.format == 1:
            say(f"warning: {path} was written without checksums: whether it is whole is not known")
        return path, state
    if damaged:
        raise RunDirectoryError(f"{'; '.join(damaged)}: there is no other to continue from")
    return None


def _verify(path: Path, data: Mapping[str, Any], state: TrainState) -> None:
    if state.format != FORMAT:
        raise ValueError(f"it has the format {state.format}, known here is {FORMAT}")
    if digest_of(data) != state.digest:
        raise ValueError("state.json is not what was written")
    if state.position.update != update_of(path):
        raise ValueError(f"it is of update {state.position.update}")
    for name, expected in state.files.items():
        if sum_of(path / name) != expected:
            raise ValueError(f"{name} is not what was written")


def fixed_settings(config: Config) -> dict[str, object]:
    """The settings that say what is trained, by dotted key."""
    flat = flat_settings(encode(config))
    return {
        key: value
        for key, value in flat.items()
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    }


def flat_settings(data: Mapping[str, Any], above: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def planned_updates(train: Train, steps_per_epoch: int) -> int:
    """Updates of the whole training."""
    planned = train.epochs * steps_per_epoch
    return min(planned, train.steps or planned)


class SamplerState(Protocol):
    """What a sampler says of itself."""

    samples: int
    batch_size: int


def check_continued(
    path: Path, state: TrainState, config: Config, sampler: SamplerState | None = None
) -> None:
    """Refuse to go on from a checkpoint that is not of the training that `config` describes.

    With `sampler`, also one that was made with other batches.
    """
    other = other_settings(state.settings, fixed_settings(config)) if state.settings else []
    if other:
        raise RunDirectoryError(
            f"{path} was trained with other settings than the run has now: {', '.join(other)}; put"
            " them back in config.toml, or start a new run"
        )
    if sampler is not None and (state.batch_size, state.samples) != (
        sampler.batch_size,
        sampler.samples,
    ):
        raise RunDirectoryError(
            f"{path} was made with batch {state.batch_size} on {state.samples} samples, but this"
            f" run has batch {sampler.batch_size} on {sampler.samples}: a run is continued with"
            " what it began"
        )
    done, now = state.position.update, _updates_now(state, config)
    if now < done:
        raise RunDirectoryError(
            f"{path} has {done} updates, more than the {now} that train.epochs and train.steps ask"
            " for now: a run cannot become shorter than it is"
        )
    before = (state.updates or now, state.lengths)
    update = first_other_rate(config.optimizer, done, before, (now, config.train.lengths))
    if update is not None:
        raise RunDirectoryError(
            f"{path} had another learning rate in update {update + 1} than config.toml asks for"
            " now: put train.epochs, train.steps and train.lengths back as they were"
        )


def with_lengths(config: Config, state: TrainState) -> Config:
    """`config` with what the rates of a run have followed so far.

    Where they would have been others, had the run been as long as it is to be from the start,
    `train.lengths` says so, and the same run from its config.toml repeats them.
    """
    done, now, lengths = state.position.update, _updates_now(state, config), state.lengths
    before = (state.updates or now, lengths)
    if first_other_rate(config.optimizer, done, before, (now, lengths)) is not None:
        lengths = {**lengths, str(done): state.updates}
    return replace(config, train=replace(config.train, lengths=lengths))


def _updates_now(state: TrainState, config: Config) -> int:
    return planned_updates(config.train, -(-state.samples // max(1, state.batch_size)))


def other_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The keys of settings that differ, as "key (was 1, now 2)"; one left out is as by default."""
    usual = fixed_settings(Config())
    return [
        f"{key} (was {was!r}, now {new!r})"
        for key in sorted(before.keys() | now.keys())
        if (was := before.get(key, usual.get(key))) != (new := now.get(key, usual.get(key)))
    ]
