"""A gradient that is not finite while the loss is: refused before it touches weights, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = """
import os
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.seen = 0

    def forward(self, images):
        scores = self.fc(images.flatten(1))
        self.seen += self.training
        if self.seen > 12 and os.environ.get("PACELINE_LOCAL_RANK") == "1":
            scores = scores + (self.fc.weight.sum() * 0).abs().sqrt()  # 0, with a slope of NaN
        return scores


def build(**options):
    return Odd()
"""
SETTINGS = (
    "workload.data=synthetic",
    "workload.batch_size=16",
    "data.options.shape=[1, 8, 8]",
    "data.options.samples=640",
    "data.options.test_samples=16",
    "train.epochs=1",
    "numerics.precision=fp32",
    "local.strategy=processes",
    "local.processes=2",
    "local.threads=1",
)


def test_the_rank_that_has_it_is_named(call_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(MODEL)
    words = [word for each in SETTINGS for word in ("--set", each)]
    words += ["--set", f"workload.model={tmp_path / 'odd.py'}:build"]
    done = call_cli("train", *words, "--run", tmp_path / "run")
    assert done.returncode == 1, done.stderr
    assert "rank 1 has a gradient of fc." in done.stderr
    assert "are not finite: its training has diverged" in done.stderr
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
