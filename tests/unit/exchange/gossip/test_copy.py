"""Distributed Hogwild without a network: how two copies approach each other, and who is left."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UnsupportedError
from paceline.exchange import exchange_class
from paceline.exchange.gossip.copy import Mixture, Roll, part_of
from paceline.schema import ExchangeSettings, NodePlan, Plan
from paceline.schema.support import check_support


def weights(value: float) -> list[torch.Tensor]:
    whole = torch.full((2, 3, 2, 2), value).to(memory_format=torch.channels_last)
    return [whole, torch.full((5,), value)]


@pytest.mark.parametrize(("share", "other"), [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_mixing_keeps_the_mean_and_halves_the_distance(share: float, other: float) -> None:
    mine, theirs = weights(0.0), weights(8.0)
    asks, answers = Mixture(mine), Mixture(theirs)
    asks.show(3)
    answers.show(9)
    sent, clock = asks.copy()
    was, _ = answers.answer(sent, part_of(other, share))
    theirs[1] += 1.0  # an update while the answer is under way is not lost
    asks.show(5)
    asks.meet(sent, clock, was, part_of(share, other))
    answers.show(10)
    asks.show(6)
    mean = (share * mine[1][0] + other * (theirs[1][0] - 1.0)) / (share + other)
    assert float(mean) == pytest.approx(8.0 * other / (share + other))
    assert float(mine[1][0]) == pytest.approx(float(theirs[1][0] - 1.0))
    torch.testing.assert_close(mine[0], torch.full_like(mine[0], float(mine[1][0])))
    assert asks.staleness.encoded() == {"2": 1}


def test_what_mixing_came_to_is_taken_over_once() -> None:
    mine = weights(1.0)
    mixture = Mixture(mine)
    mixture.show(1)
    mixture.answer(torch.full((29,), 3.0), 0.5)
    assert mixture.copy()[0].tolist() == [2.0] * 29
    assert float(mine[1][0]) == 1.0  # not in the middle of an update
    for update in (2, 3):
        mixture.show(update)
        assert float(mine[1][0]) == 2.0
    mixture.become(torch.full((29,), 7.0))
    assert float(mine[0].sum()) == 7.0 * 24
    assert mixture.copy()[0].tolist() == [7.0] * 29


def test_the_roll_knows_who_is_left_and_what_all_came_to() -> None:
    roll = Roll({1: "b", 2: "c", 3: "d"})
    roll.hear(2, {"clock": 5, "staleness": {"1": 4}, "told": [1.0, 2.0, 3.0]})
    roll.lose(3, "was lost", 7)
    roll.lose(3, "was lost", 9)
    assert roll.news == ["node 3 on d was lost at update 7; going on with 3 nodes"]
    roll.finish(1, torch.tensor([4.0]), 1.0)
    roll.lose(1, "was lost", 9)  # it has ended: its connection closes
    assert (roll.training, roll.progress, len(roll.news)) == (1, 5, 1)
    roll.finish(2, torch.tensor([6.0]), 2.0)
    mean = roll.mean_with(torch.tensor([0.0]), 1.0)
    assert mean is not None
    assert mean.tolist() == [4.0]
    assert roll.mean_with(torch.tensor([0.0]), 1.0) is None
    assert roll.take_told() == [1.0, 2.0, 3.0]
    assert roll.take_told() == [0.0, 0.0, 0.0]


def test_what_hogwild_cannot_do_is_refused() -> None:
    several = NodePlan(host="b", strategy="processes", processes=2)
    idle = NodePlan(host="c", share=0.0)
    for nodes, words in (
        ((NodePlan(), several), r"host b: exchange.kind = 'hogwild' needs one rank per node"),
        ((NodePlan(), idle), r"a host with a share of 0 has none"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            check_support(Plan(nodes=nodes, exchange="hogwild"), ExchangeSettings(), "gloo")
    with pytest.raises(UnsupportedError, match=r"compression = 'bf16' does not work with"):
        exchange_class("hogwild", "bf16")
