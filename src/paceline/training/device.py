"""Which device a rank computes on, decided in one place."""

from __future__ import annotations

import torch
import torch.utils.deterministic

from paceline.errors import ConfigError


def choose_device(asked: str, local_rank: int) -> torch.device:
    """One GPU per rank where CUDA is there and wanted, else the CPU."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError(
            "train.device = 'cuda' needs a CUDA device, and torch sees none: use 'cpu' or 'auto'"
        )
    if asked == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def use_deterministic(wanted: bool) -> None:
    """Ask torch for operations that give the same result every time."""
    # Not use_deterministic_algorithms: the same, but it imports torch's compiler (see `lean`).
    torch.set_deterministic_debug_mode("warn" if wanted else "default")
    # Filling fresh memory is for finding bugs; it would slow every step down.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
