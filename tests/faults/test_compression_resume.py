"""Compressed gradients: what compressing took off comes back after a resume, bit for bit."""

from __future__ import annotations

import pytest
from nodes import MakeNodes, make_nodes
from safetensors.torch import load_file

__all__ = ["make_nodes"]
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_a_killed_run_goes_on_to_the_same_weights(compression: str, make_nodes: MakeNodes) -> None:
    options = {
        "exchange__kind": "allreduce",
        "exchange__compression": compression,
        "exchange__rebalance": "false",
        "exchange__bucket_mb": 0.05,
        "optimizer__name": "sgd",
        "optimizer__learning_rate": 0.05,
    }
    whole, killed = make_nodes(2, 0, **options), make_nodes(2, 0, **options)
    whole.start()
    for node in (0, 1):
        code, output = whole.ends(node)
        assert code == 0, output
    killed.pace.write_text("0.02")
    killed.start()
    # PowerSGD sends the first ten updates whole.
    killed.until(lambda: killed.position() >= 15)
    for node in (0, 1):
        killed.kill(node)
    saved = load_file(killed.run / "checkpoints" / "latest" / "optimizer.safetensors")
    errors = [saved[f".exchange|{node}/error-0"] for node in (0, 1)]
    assert all(float(error.abs().sum()) > 0 for error in errors)
    assert not errors[0].equal(errors[1])  # each node has its own
    assert 15 <= killed.position() < 40
    killed.pace.unlink()
    killed.start()
    for node in (0, 1):
        code, output = killed.ends(node)
        assert code == 0, output
    assert killed.position() == whole.position() == 40
    assert killed.weights() == whole.weights()
