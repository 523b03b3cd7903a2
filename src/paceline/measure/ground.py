"""Where trials run: the data, one batch of it, and the model's factory."""

from __future__ import annotations

import torch

from paceline.data.sampler import GlobalSampler
from paceline.local.board import Arena, Board
from paceline.local.memory import keep_freed_memory
from paceline.measure.trial import TrialGround
from paceline.schema import Config
from paceline.train.device import choose_device, use_deterministic
from paceline.train.parts import Given, Parts, make_parts


def make_ground(
    config: Config,
    batch_size: int,
    *,
    given: Given | None = None,
    parts: Parts | None = None,
    board: Board | None = None,
    arena: Arena | None = None,
) -> TrialGround:
    """Open the workload and read one real global batch."""
    use_deterministic(config.train.deterministic)
    keep_freed_memory()
    parts = parts or make_parts(config, given)
    sampler = GlobalSampler(
        samples=len(parts.dataset.train), batch_size=batch_size, seed=config.seed
    )
    torch.set_num_threads(1)
    inputs, targets = parts.dataset.train.fetch(sampler.batch(0, 0), epoch=0, augment=False)
    return TrialGround(
        parts=parts,
        inputs=inputs,
        targets=targets,
        clip_norm=config.optimizer.clip_norm,
        local_batch_norm="local_batch_norm" in config.numerics.allow,
        seed=config.seed,
        device=choose_device(config.train.device, 0),
        compile=config.numerics.compile,
        board=board,
        arena=arena,
    )
