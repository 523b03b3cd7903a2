"""Which ways of using a machine are tried, and what a strategy asked for by name means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan import asked_node, asked_plan, refuse_foreign_options
from paceline.plan.candidates import candidate, structures, variants
from paceline.schema import Config, LocalSettings, NodePlan, Numerics, WorkloadSettings
from paceline.schema.strategies import describe


@given(
    cores=st.integers(1, 48),
    batch_size=st.integers(1, 512),
    elementwise=st.booleans(),
    many=st.booleans(),
)
def test_structures_use_the_cores_and_no_more(
    cores: int, batch_size: int, elementwise: bool, many: bool
) -> None:
    nodes = structures(cores, batch_size, elementwise=elementwise, many=many)
    assert nodes[0] == NodePlan(strategy="sequential")
    assert len({describe(node) for node in nodes}) == len(nodes), "every name is different"
    for node in nodes:
        concurrent = node.ranks * (node.replicas if node.strategy == "replicas" else 1)
        assert concurrent * node.threads <= cores
        assert node.strategy != "hogwild", "asynchronous: never chosen unless asked for"
        assert many or node.ranks == 1
        # Nobody is left without a sample of a full batch.
        parts = node.replicas if node.strategy == "replicas" else node.workers
        assert parts * node.micro_batches <= max(1, batch_size)


def test_two_cores() -> None:
    names = [describe(node) for node in structures(2, 64, elementwise=True)]
    assert names[:4] == ["sequential", "threads 2", "replicas 2x1", "processes 2x1"]
    assert "pipeline 2 stages x1" in names
    assert "pipeline 2 stages x8" in names


def test_one_core_has_one_way() -> None:
    assert [n.strategy for n in structures(1, 64, elementwise=True)] == ["sequential"]


def test_an_optimizer_of_ones_own_gets_whole_parameters() -> None:
    nodes = structures(4, 64, elementwise=False)
    assert {n.sync for n in nodes if n.strategy == "processes"} == {"ddp"}


def test_numerics_plain_first() -> None:
    assert variants(Numerics(), images=True)[0] == ("fp32", "contiguous")
    assert len(variants(Numerics(), images=True)) == 4
    assert variants(Numerics(), images=False) == [("fp32", "contiguous"), ("bf16", "contiguous")]
    fixed = Numerics(precision="bf16", memory_format="channels_last")
    assert variants(fixed, images=True) == [("bf16", "channels_last")]


def test_names_say_what_differs() -> None:
    assert candidate(NodePlan()).exact
    assert not candidate(NodePlan(), "bf16").exact


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategy": "sequential"}, NodePlan()),
        ({"strategy": "threads"}, NodePlan(strategy="threads", threads=8)),
        ({"strategy": "threads", "threads": 3}, NodePlan(strategy="threads", threads=3)),
        (
            {"strategy": "replicas", "replicas": 2},
            NodePlan(strategy="replicas", replicas=2, threads=4),
        ),
        ({"strategy": "processes"}, NodePlan(strategy="processes", processes=8, threads=1)),
        (
            {"strategy": "processes", "processes": 3},
            NodePlan(strategy="processes", processes=3, threads=2),
        ),
        (
            {"strategy": "processes", "processes": 2, "sync": "ddp"},
            NodePlan(strategy="processes", processes=2, threads=4, sync="ddp"),
        ),
        ({"strategy": "hogwild"}, NodePlan(strategy="hogwild", processes=8)),
        (
            {"strategy": "pipeline"},
            NodePlan(strategy="pipeline", stages=2, threads=4, micro_batches=4),
        ),
        (
            {"strategy": "pipeline", "split_at": ("a", "b"), "micro_batches": 1},
            NodePlan(strategy="pipeline", stages=3, threads=2, split_at=("a", "b")),
        ),
        (
            {"strategy": "hybrid", "schedule": "1f1b"},
            NodePlan(
                strategy="hybrid",
                replicas=4,
                stages=2,
                threads=1,
                micro_batches=4,
                schedule="1f1b",
            ),
        ),
    ],
)
def test_what_a_name_means_on_eight_cores(settings: dict[str, object], expected: NodePlan) -> None:
    assert asked_node(LocalSettings(**settings), 8) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "option", "value"),
    [
        ("threads", "processes", 2),
        ("sequential", "threads", 2),
        ("processes", "stages", 2),
        ("replicas", "micro_batches", 4),
        ("processes", "split_at", ("a",)),
        ("hogwild", "replicas", 2),
        ("pipeline", "replicas", 2),
    ],
)
def test_an_option_of_another_strategy_is_refused(
    strategy: str, option: str, value: object
) -> None:
    settings = LocalSettings(strategy=strategy, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"local\.{option} = .* means nothing to .*{strategy}"):
        asked_node(settings, 4)


def test_options_without_a_strategy_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local\.threads = 3 means nothing to .*'auto'"):
        refuse_foreign_options(LocalSettings(threads=3))
    refuse_foreign_options(LocalSettings())


def test_stages_that_contradict_the_cuts() -> None:
    settings = LocalSettings(strategy="pipeline", stages=2, split_at=("a", "b"))
    with pytest.raises(ConfigError, match=r"3 stages, but local\.stages = 2"):
        asked_node(settings, 4)


def test_plan_of_what_was_asked() -> None:
    config = Config(
        workload=WorkloadSettings(batch_per_worker=16),
        numerics=Numerics(precision="bf16", memory_format="channels_last"),
    )
    plan = asked_plan(config, NodePlan(strategy="processes", processes=3), "asked")
    assert (plan.batch_size, plan.precision) == (48, "bf16")
    assert (plan.memory_format, plan.reason) == ("channels_last", "asked")
    assert asked_plan(Config(), NodePlan(), "").precision == "fp32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "replicas", "replicas": 100000}, "local.replicas = 100000 .* at most 64"),
        ({"strategy": "processes", "processes": 100000}, "local.processes = 100000"),
        ({"strategy": "hogwild", "processes": 65}, "local.processes = 65 is more than 16 for each"),
        ({"strategy": "pipeline", "stages": 1000}, "local.stages = 1000"),
        ({"strategy": "threads", "threads": 10**9}, "local.threads = 1000000000"),
        (
            {"strategy": "hybrid", "replicas": 9, "stages": 9},
            r"local.stages = 9 \(81 with the other options of \[local\]\) .* at most 7",
        ),
        ({"strategy": "processes", "processes": 8, "threads": 9}, "local.threads = 9 .* at most 8"),
    ],
)
def test_crowds_of_workers_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked_node(LocalSettings(**settings), 4)  # type: ignore[arg-type]


def test_a_large_node_can_be_tried_on_a_small_machine() -> None:
    assert asked_node(LocalSettings(strategy="processes", processes=16), 1).processes == 16
