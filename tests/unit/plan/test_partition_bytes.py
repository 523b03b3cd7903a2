"""What splitting linear layers sends, and which layers it pays for."""

from __future__ import annotations

import itertools

import pytest

from paceline.config import load_config
from paceline.cost.split import (
    Chain,
    Division,
    Placed,
    activation_bytes,
    allreduced,
    arrange,
    divide_features,
    held_parameters,
    step_bytes,
)
from paceline.errors import ConfigError
from paceline.plan.partition import PartitionChoice, choose_partition, obstacle, with_partition
from paceline.schema import ExchangeSettings, NodePlan, Plan
from paceline.schema.machines import LinearLayer
from paceline.workflow.partitioning import partitioned

CONVOLUTIONS = 2_469_696
"""Weights and biases of AlexNet's five convolutions."""


def alexnet(classes: int) -> Chain:
    return (
        LinearLayer(name="classifier.1", inputs=9216, outputs=4096),
        LinearLayer(name="classifier.4", inputs=4096, outputs=4096),
        LinearLayer(name="classifier.6", inputs=4096, outputs=classes),
    )


def equal(nodes: int, batch: int) -> Division:
    return Division(parts=(batch // nodes,) * nodes, shares=(1.0,) * nodes)


def test_alexnet_on_two_nodes_moves_a_fraction() -> None:
    """Rows of 9216 and 4096 gathered, partial sums of 10 scattered, both ways."""
    chain = alexnet(10)
    placed = arrange(chain, equal(2, 32))
    assert [each.way for each in placed] == ["column", "column", "row"]
    sent = step_bytes([placed], equal(2, 32), other_parameters=CONVOLUTIONS)
    replicated = CONVOLUTIONS + 10  # the last bias is added to own rows
    assert sent == [(9216 + 4096 + 10) * 32 * 4 + replicated * 4] * 2
    whole = allreduced(CONVOLUTIONS + sum(layer.parameters for layer in chain), 2)
    assert whole / 1e6 == pytest.approx(228.2, abs=0.1)
    assert sent[0] * 15 < whole


def test_the_last_layer_is_split_where_it_is_large() -> None:
    placed = arrange(alexnet(1000), equal(2, 32))
    assert all(each.way != "batch" for each in placed)
    assert placed[-1].leave == "batch"


def test_a_large_batch_of_small_layers_is_not_split() -> None:
    chain = (LinearLayer(name="a", inputs=512, outputs=10),)
    assert [each.way for each in arrange(chain, equal(2, 512))] == ["batch"]


def test_tokens_count_as_rows() -> None:
    layer = LinearLayer(name="a", inputs=1024, outputs=1024)
    long = LinearLayer(name="a", inputs=1024, outputs=1024, rows=512)
    assert arrange((layer,), equal(2, 8))[0].way != "batch"
    assert arrange((long,), equal(2, 8))[0].way == "batch"


def test_fewer_features_than_nodes_are_not_split() -> None:
    chain = (LinearLayer(name="a", inputs=100_000, outputs=3),)
    assert arrange(chain, equal(4, 4))[0].way == "batch"


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (1.0, 0.0), (5.0, 1.0, 2.0, 0.0)])
def test_features_add_up_and_everyone_has_one(shares: tuple[float, ...]) -> None:
    for features in (len(shares), 17, 4096):
        parts = divide_features(features, shares)
        assert sum(parts) == features
        assert min(parts) >= 1
        by_share = [part for _, part in sorted(zip(shares, parts, strict=True))]
        assert by_share == sorted(by_share)


@pytest.mark.parametrize("way", ["column", "row"])
@pytest.mark.parametrize("leave", ["batch", "feature"])
@pytest.mark.parametrize("enter", ["batch", "feature"])
def test_bytes_of_all_nodes_follow_the_formula(way: str, enter: str, leave: str) -> None:
    """Whole rows cost 2 (N-1) B X however shares are; a turn only what is not there already."""
    layer = LinearLayer(name="a", inputs=30, outputs=20)
    placed = Placed(layer=layer, way=way, enter=enter, leave=leave)  # type: ignore[arg-type]
    division = Division(parts=(6, 3, 1), shares=(6.0, 3.0, 1.0))
    spread, turned = (30, 20) if way == "column" else (20, 30)
    expected = 2 * 2 * 10 * spread
    if (leave if way == "column" else enter) == "batch":
        features = divide_features(turned, division.shares)
        stays = sum(b * x for b, x in zip(division.parts, features, strict=True))
        expected += 2 * (10 * turned - stays)
    assert sum(activation_bytes(placed, division)) == expected * 4


def test_the_arrangement_is_the_cheapest_of_all() -> None:
    """Against every combination that fits together, for given layers to split."""
    chain = tuple(
        LinearLayer(name=str(n), inputs=a, outputs=b)
        for n, (a, b) in enumerate(itertools.pairwise((9000, 700, 5000, 300, 4000)))
    )
    division = Division(parts=(24, 8), shares=(3.0, 1.0))
    found = arrange(chain, division, split=frozenset("0123"))
    best = sum(sum(activation_bytes(each, division)) for each in found)
    others = []
    for ways in itertools.product(("column", "row"), repeat=4):
        for states in itertools.product(("batch", "feature"), repeat=3):
            edges = ("batch", *states, "batch")
            every = [
                Placed(layer=layer, way=way, enter=edges[n], leave=edges[n + 1])  # type: ignore[arg-type]
                for n, (layer, way) in enumerate(zip(chain, ways, strict=True))
            ]
            others.append(sum(sum(activation_bytes(each, division)) for each in every))
    assert best <= min(others) * 1.3  # a change of hands has a price besides its bytes
    assert best < sorted(others)[len(others) // 8]


def test_held_weights_add_up() -> None:
    chain = alexnet(10)
    placed = arrange(chain, equal(4, 32), split=frozenset({"classifier.1", "classifier.4"}))
    held = held_parameters([placed], (1.0,) * 4)
    whole = sum(layer.parameters for layer in chain)
    assert sum(held) == whole + 3 * (chain[2].parameters + 4096)


def test_forced_layers_are_split_and_no_other() -> None:
    placed = arrange(alexnet(1000), equal(2, 32), split=frozenset({"classifier.4"}))
    assert [each.way != "batch" for each in placed] == [False, True, False]
    assert (placed[1].enter, placed[1].leave) == ("batch", "batch")


# --- the choice -------------------------------------------------------------------

ALL_WEIGHTS = CONVOLUTIONS + sum(layer.parameters for layer in alexnet(10))


def choice(**options: object) -> PartitionChoice:
    settings = ExchangeSettings(**options)  # type: ignore[arg-type]
    return choose_partition(settings, [alexnet(10)], equal(2, 32), parameters=ALL_WEIGHTS)


def test_the_reason_says_what_is_saved() -> None:
    assert choice().reason == (
        "classifier.1, classifier.4 and classifier.6 are split:"
        " 11.6 MB instead of 228.2 MB per update"
    )
    plan = with_partition(Plan(reason="threads 2"), choice())
    assert plan.partition == "feature"
    assert plan.feature_layers == ("classifier.1", "classifier.4", "classifier.6")
    assert plan.reason.startswith("threads 2; classifier.1, ")
    assert plan.predicted["bytes_per_update"] == pytest.approx(11.6e6, rel=0.01)


def test_layers_by_hand() -> None:
    assert choice(partition="manual", layers=("classifier.4",)).layers == ("classifier.4",)
    assert choice(partition="none") == PartitionChoice()
    with pytest.raises(ConfigError, match=r"'classifier\.5', which cannot be split over 2 nodes"):
        choice(partition="manual", layers=("classifier.5",))
    with pytest.raises(ConfigError, match="means nothing to exchange"):
        choice(layers=("classifier.4",))
    with pytest.raises(ConfigError, match=r"needs exchange\.layers"):
        choice(partition="manual")


def test_what_cannot_be_split_is_not() -> None:
    plan = Plan(nodes=(NodePlan(), NodePlan(host="b", strategy="processes", processes=2)))
    reason = obstacle(plan, ExchangeSettings(), elementwise=True)
    assert reason == "b uses processes, which needs whole weights"
    found = choose_partition(
        ExchangeSettings(), [alexnet(10)], equal(2, 32), parameters=ALL_WEIGHTS, possible=reason
    )
    assert found.layers == ()
    assert found.reason == f"no layer is split: {reason}"
    assert obstacle(Plan(), ExchangeSettings(), elementwise=True) == ""


def test_the_plan_of_two_nodes_gets_the_layers_of_its_model() -> None:
    changes = ("workload.model=alexnet", "workload.data=synthetic", "data.options.classes=10")
    config = load_config(None, (*changes, "data.options.shape=[3, 64, 64]"))
    two = Plan(nodes=(NodePlan(host="a"), NodePlan(host="b")), batch_size=32)
    plan = partitioned(config, two)
    assert plan.feature_layers == ("classifier.1", "classifier.4", "classifier.6")
    assert "11.6 MB instead of 228.2 MB" in plan.reason
    assert partitioned(config, Plan()) == Plan()
    several = Plan(nodes=(NodePlan(), NodePlan(strategy="processes", processes=2)))
    assert partitioned(config, several) == several
