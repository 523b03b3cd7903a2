"""The buyer's guide on made-up machines: rows, break-even, verdict."""

from __future__ import annotations

import dataclasses

import pytest
from cost_cases import chains, host
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost.transfer import described_link
from paceline.errors import ConfigError
from paceline.plan.answer import Prediction, Question
from paceline.plan.predict import predict, rate_text
from paceline.schema import ExchangeSettings, encode
from paceline.schema.machines import WorkloadFacts, exactly

USUAL = ExchangeSettings()
FACTS = WorkloadFacts(name="test", batch_size=128, samples=12_800, epochs=2)


def ask(
    nodes: tuple[int, ...] = (1, 2, 4),
    *,
    megabits: float = 1000.0,
    facts: WorkloadFacts = FACTS,
    parameters: float = 0.01,
    mix: tuple[float, ...] = (1.0,),
    price: float | None = None,
    exchange: ExchangeSettings = USUAL,
    split: bool = False,
) -> Prediction:
    link = described_link(megabits * 1e6, 2e-4)
    question = Question(nodes=nodes, link=link, mix=mix, price=price, exchange=exchange)
    if split:
        facts = dataclasses.replace(facts, chains=chains(parameters))
    return predict(host(spread=0.06, parameters=parameters), facts, question)


def test_one_node_is_what_was_measured() -> None:
    row = ask((1,), price=0.36).rows[0]
    assert row.exchange == "alone"
    assert row.images_per_second == pytest.approx(1280)
    assert row.low == pytest.approx(1280 / 1.03)
    assert row.high == pytest.approx(1280 / 0.97)
    assert row.speedup == row.efficiency == 1
    assert row.epoch_seconds == pytest.approx(10.0)
    assert row.end_seconds == pytest.approx(20.0)
    assert row.end_cost == pytest.approx(0.36 * 20 / 3600)
    assert "nothing to compare" in ask((1,)).verdict


def test_every_row_adds_up() -> None:
    for row in ask((1, 2, 8, 64)).rows:
        assert sum(row.terms.values()) == pytest.approx(row.step_seconds)
        assert row.low <= row.images_per_second <= row.high
        assert row.speedup_low <= row.speedup <= row.speedup_high
        assert row.images_per_second == pytest.approx(row.batch / row.step_seconds)
        assert row.efficiency <= 1.01


def test_rows_are_what_a_training_may_choose() -> None:
    names = {row.exchange for row in ask((2,), parameters=1.0, split=True).rows}
    assert names == {"allreduce", "ring", "reduce_broadcast", "allreduce, split layers"}
    asked = ExchangeSettings(kind="parameter_server", mode="async")
    found = ask((1, 3), exchange=asked)
    assert [row.exchange for row in found.rows] == ["alone", "parameter_server async x1"]
    assert not found.rows[1].exact
    assert any("parameter_server was asked for" in note for note in found.notes)


def test_the_three_verdicts() -> None:
    """Two hosts help; they hurt; and it flips when the batch grows."""
    helped = ask((1, 2))
    assert helped.worth_it
    assert helped.verdict.startswith("worth it: 2 nodes with allreduce")
    hurt = ask((1, 2), megabits=100)
    assert not hurt.worth_it
    assert hurt.verdict.startswith("not worth it")
    even = hurt.break_even
    assert even is not None
    assert even.batch is not None
    assert f"{even.batch:,}" in hurt.verdict
    flipped = WorkloadFacts(name="test", batch_size=4 * even.batch, samples=100_000)
    assert ask((1, 2), megabits=100, facts=flipped).worth_it


def test_the_break_even_link_is_where_it_turns() -> None:
    even = ask((1, 2), megabits=100).break_even
    assert even is not None
    assert even.link_bits_per_second is not None
    assert even.node_count is None

    def speedup(rate: float) -> float:
        goodput_to_rate = 1 / 0.83
        rows = ask((2,), megabits=rate * goodput_to_rate / 1e6).rows
        return max(row.speedup for row in rows if row.exact)

    assert speedup(even.link_bits_per_second * 1.05) > 1
    assert speedup(even.link_bits_per_second / 1.05) < 1


def test_a_slow_second_machine_is_not_worth_a_link() -> None:
    found = ask((1, 2), mix=(1.0, 1 / 21))
    assert not found.worth_it
    assert "1.05x the speed of the fastest" in found.verdict
    assert "similar speed" in found.verdict


def test_a_mixture_counts_what_it_has() -> None:
    """Two fast and two half as fast: three of the fast."""
    rows = ask((4,), megabits=1e6, mix=(1.0, 0.5)).rows
    best = max(rows, key=lambda row: row.images_per_second)
    assert 2 < best.speedup < 3
    assert best.efficiency == pytest.approx(best.speedup / 3)


def test_all_twenty_times_slower_is_as_good_as_the_measured_one() -> None:
    """Slow nodes profit more from each other, because the link is the same."""
    usual, slow = ask((1, 4)), ask((1, 4), mix=(1 / 20,))
    assert slow.rows[0].images_per_second == pytest.approx(64)
    assert slow.rows[1].efficiency > usual.rows[1].efficiency


def test_weak_scaling_keeps_every_node_busy() -> None:
    weak = WorkloadFacts(name="test", batch_per_worker=128, samples=12_800)
    row = next(r for r in ask((1, 64), facts=weak).rows if r.nodes == 64)
    assert row.batch == 64 * 128
    assert row.idle == 0
    strong = next(r for r in ask((1, 256)).rows if r.nodes == 256)
    assert strong.idle == 128
    assert any("without a sample" in note for note in ask((1, 256)).notes)


def test_memory_that_is_not_there() -> None:
    question = Question(nodes=(1, 2), link=described_link(1e9, 2e-4))
    found = predict(host(memory_mb=100), FACTS, question)
    assert not any(row.fits for row in found.rows)
    assert found.verdict.startswith("not possible")


@pytest.mark.slow
@given(st.floats(1, 1e5), st.floats(1, 100), st.sampled_from([0.01, 1.0]))
@settings(max_examples=8, deadline=None)
def test_a_faster_link_never_predicts_less(
    megabits: float, factor: float, parameters: float
) -> None:
    def fastest(rate: float) -> float:
        rows = ask((2,), megabits=rate, parameters=parameters).rows
        return max(row.images_per_second for row in rows)

    assert fastest(megabits * factor) >= fastest(megabits) * (1 - 1e-9)


def test_four_thousand_nodes() -> None:
    """Equal nodes are counted, not listed: a loop over them would meet the test's timeout."""
    found = ask((1, 2, 16, 256, 4096), parameters=1.0)
    assert {row.nodes for row in found.rows} == {1, 2, 16, 256, 4096}
    assert encode(found)["rows"][0]["nodes"] == 1


def test_questions_that_make_no_sense() -> None:
    link = described_link(1e9, 0.0)
    for wrong in (
        {"nodes": ()},
        {"nodes": (0,)},
        {"nodes": (2,), "mix": ()},
        {"nodes": (2,), "mix": (0.0,)},
        {"nodes": (2,), "price": -1.0},
    ):
        with pytest.raises(ConfigError, match="must be"):
            Question(link=link, **wrong)  # type: ignore[arg-type]
    assert rate_text(2.87e9) == "2.87 Gbit/s"
    assert exactly(1.0).low == 1.0
