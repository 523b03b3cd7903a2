"""What ranks print on its way to the terminal of whoever started them."""

from __future__ import annotations

import io

import pytest

from paceline.launch.local import _relay


def test_nothing_that_a_rank_prints_steers_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = "epoch 1: 98 %\n\x1b]0;title\x07\x1b[2Jgone\né\u202e\n".encode()
    assert _relay(io.BytesIO(printed), 3)
    assert capsys.readouterr().out == (
        "[rank 3] epoch 1: 98 %\n[rank 3] \\x1b]0;title\\x07\\x1b[2Jgone\n[rank 3] é\\u202e\n"
    )
