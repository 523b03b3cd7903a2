"""A checkpoint of a loop of one's own that does not fit the loop is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import RunDirectoryError
from paceline.pace.keeping import load_models, own_state, random_state

WHOLE: dict[str, Any] = {
    "others": [{"last_epoch": 1}],
    "generators": [[1, 2, 3]],
    "random": [random_state()],
    "shares": [1.0, 3.0],
}


def test_what_a_loop_saved_is_its_own() -> None:
    assert own_state(WHOLE, others=1, generators=1) == WHOLE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"others": []}, "it has 0 schedulers and the like, the loop 1"),
        ({"generators": [[1], [2]]}, "it has 2 generators of loaders, the loop 1"),
        ({"shares": [0.0, 0.0]}, "its shares are no shares"),
        ({"shares": ["1"]}, "shares is '1', not a finite number"),
        ({"random": [{"torch": [1]}]}, "python is missing"),
    ],
)
def test_another_loop_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RunDirectoryError, match="of another loop") as refused:
        own_state(WHOLE | changed, others=1, generators=1)
    assert said in str(refused.value)
    assert "name another run" in str(refused.value)


def test_a_training_of_another_kind_is_refused() -> None:
    with pytest.raises(RunDirectoryError, match="is None, not a table"):
        own_state(None, others=0, generators=0)


def test_a_parameter_that_was_not_saved_is_named() -> None:
    with pytest.raises(RunDirectoryError, match="scale"):
        load_models([], {"scale": torch.nn.Parameter(torch.ones(1))}, {})
