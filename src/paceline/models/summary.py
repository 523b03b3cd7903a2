"""What a model is made of, as data (no torch)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer, seen on one sample."""

    name: str
    kind: str
    output_shape: tuple[int, ...]
    """Without the batch."""
    parameters: int
    """Of this layer itself; a parameter that two layers share counts with the first."""
    flops: int
    """Multiply-adds of the forward pass for one sample."""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """All layers in the order they run, and the totals."""

    sample_shape: tuple[int, ...]
    layers: tuple[LayerSummary, ...]
    parameters: int
    parameter_bytes: int
    flops: int
    """Multiply-adds of the forward pass for one sample, outside layers included."""

    @property
    def megabytes(self) -> float:
        """Size of the parameters in units of 10^6 bytes: what one exchange moves."""
        return self.parameter_bytes / 1e6

    @property
    def gigaflops(self) -> float:
        """Multiply-adds in units of 10^9, the 'GFLOPs' of published tables."""
        return self.flops / 1e9
