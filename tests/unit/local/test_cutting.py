"""Where a model is cut: the choice by table and invariant, the graph by models that are odd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline import models
from paceline.errors import StrategyError
from paceline.local import cut_measure
from paceline.local.cut_graph import ModelGraph, trace
from paceline.local.cut_measure import Room, balanced_cuts, operation_times
from paceline.local.cutting import choose_cuts, micro_batch_count

INF = math.inf


@pytest.fixture(autouse=True)
def compiler_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """`torch.export` sets this variable and leaves it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("times", "cut_bytes", "stages", "speed", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 1, INF, []),
        ([1, 1, 1, 1], [0, 0, 0, 0], 2, INF, [2]),
        ([1, 1, 1, 1], [0, 0, 0, 0], 4, INF, [1, 2, 3]),
        ([5, 1, 1, 1], [0, 0, 0, 0], 2, INF, [1]),
        ([1, 1, 1, 5], [0, 0, 0, 0], 2, INF, [3]),
        # A thin cut wins over a slightly better balance.
        ([3, 1, 3, 1], [0, 10, 100, 10], 2, 50, [1]),
        # ... and loses where the link is fast.
        ([3, 1, 3, 1], [0, 10, 100, 10], 2, 1e6, [2]),
        # No stage may begin in the middle of a block.
        ([2, 2, 2, 2], [0, 0, INF, 0], 2, INF, [1]),
        # Equally fast: fewer bytes.
        ([1, 0, 1], [0, 9, 5], 2, INF, [2]),
    ],
)
def test_cuts_by_table(
    times: list[float], cut_bytes: list[float], stages: int, speed: float, expected: list[int]
) -> None:
    assert choose_cuts(times, cut_bytes, [0.0] * len(times), stages, speed) == expected


def test_memory_decides_where_it_is_short() -> None:
    times, memory = [1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 8.0, 1.0]
    assert choose_cuts(times, [0.0] * 4, memory, 2) == [3]
    assert choose_cuts(times, [0.0] * 4, memory, 2, memory_limit=9.5) == [2]


@pytest.mark.parametrize(
    ("stages", "cut_bytes", "limit", "message"),
    [
        (4, [0, 0, 0], INF, "3 layers cannot be cut into 4 stages"),
        (3, [0, INF, 0], INF, "in 1 places, which is too few for 3 stages"),
        (2, [0, 0, 0], 1.0, "no cut into 2 stages leaves each below"),
    ],
)
def test_no_cut_is_one_sentence(
    stages: int, cut_bytes: list[float], limit: float, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        choose_cuts([1, 1, 1], cut_bytes, [1e6] * 3, stages, 1.0, limit)


positive = st.floats(min_value=0.0, max_value=100.0)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(st.tuples(positive, positive), min_size=2, max_size=8),
    stages=st.integers(min_value=1, max_value=4),
)
def test_no_other_cut_has_a_faster_slowest_stage(
    layers: list[tuple[float, float]], stages: int
) -> None:
    times, sizes = [t for t, _ in layers], [b for _, b in layers]
    stages = min(stages, len(layers))

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(times))
        ends = {0: 0.0, len(times): 0.0} | {cut: sizes[cut] / 10.0 for cut in cuts}
        return max(sum(times[a:b]) + ends[a] + ends[b] for a, b in itertools.pairwise(bounds))

    found = choose_cuts(times, sizes, [0.0] * len(times), stages, 10.0)
    assert len(found) == stages - 1
    assert found == sorted(set(found))
    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(times)), stages - 1))
    assert slowest(tuple(found)) == pytest.approx(best, abs=1e-6)


@given(samples=st.integers(1, 300), wanted=st.integers(1, 16), least=st.integers(1, 3))
def test_micro_batches_are_equal_parts(samples: int, wanted: int, least: int) -> None:
    count = micro_batch_count(samples, wanted, least)
    assert samples % count == 0
    assert 1 <= count <= 2 * wanted
    assert count == 1 or samples // count >= least


def test_more_micro_batches_than_samples_are_one_sample_each() -> None:
    assert micro_batch_count(6, 10**12) == 6


# --- graphs -------------------------------------------------------------------


def cut_points(model: nn.Module, sample: torch.Tensor) -> list[str]:
    """The names that `local.split_at` may hold: where one tensor alone crosses."""
    graph = trace(model, sample, stages=2)
    return [graph.name_at(position) for position in graph.positions(single=True)]


def test_studies_cuts_are_cut_points() -> None:
    """AlexNet after its 4th convolution, VGG16 after its 8th."""
    alexnet = models.build("alexnet", classes=10, channels=3, options={})
    assert {"features.9", "features.10", "classifier"} <= set(
        cut_points(alexnet, torch.zeros(1, 3, 64, 64))
    )
    features = models.build("vgg16", classes=10, channels=3).features
    assert isinstance(features, nn.Sequential)
    assert [n for n, layer in enumerate(features) if isinstance(layer, nn.Conv2d)][7] == 17
    assert "18" in cut_points(features, torch.zeros(1, 3, 32, 32))


def test_residual_blocks_are_cut_between_and_named() -> None:
    resnet = models.build("resnet18", classes=10, channels=1, options={"stem": "small"})
    points = cut_points(resnet, torch.zeros(2, 1, 28, 28))
    assert {"layer1", "layer2", "layer2.1", "layer4.1", "avgpool", "fc"} <= set(points)
    # Inside a block the skip connection crosses as well.
    assert not {"layer2.1.conv2", "layer2.0.bn1"} & set(points)
    assert all(int(m.num_batches_tracked) == 0 for m in resnet.modules() if hasattr(m, "momentum"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.layer(torch.relu(self.layer(inputs)))))


def test_one_parameter_is_never_used_on_two_sides() -> None:
    graph = trace(Tied(), torch.zeros(2, 8), stages=2)
    assert [graph.name_at(p) for p in graph.positions(single=False)] == ["relu_1", "other"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) if float(inputs.sum()) > 0 else inputs


def test_what_cannot_be_traced_is_one_sentence() -> None:
    with pytest.raises(StrategyError, match=r"Branching cannot be cut into 2 stages") as caught:
        trace(Branching(), torch.ones(2, 8), stages=2)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def cnn() -> ModelGraph:
    model = models.build(
        "mnist_cnn", classes=10, channels=1, image_size=28, options={"dropout": 0.5}
    )
    return trace(model, torch.zeros(4, 1, 28, 28), stages=2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("features.33",), r"unknown layer in local.split_at 'features.33'.*Valid.*features\.3"),
        (("features",), "the first stage would be empty"),
        (("features.6", "features.3"), "in the order in which they run"),
    ],
)
def test_bad_split_is_one_sentence(cnn: ModelGraph, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        cnn.resolve(names)


def test_stages_in_a_row_are_the_model_and_share_its_weights(cnn: ModelGraph) -> None:
    cuts = cnn.resolve(("features.3", "classifier"))
    bounds = [0, *cuts, len(cnn.order)]
    stages = [cnn.stage(a, b) for a, b in itertools.pairwise(bounds)]
    inputs = torch.randn(4, 1, 28, 28)
    torch.manual_seed(0)
    values: tuple[torch.Tensor, ...] = (inputs,)
    for stage in stages:
        values = stage(*values)
    torch.manual_seed(0)
    assert torch.equal(values[0], cnn.module(inputs))
    owned = [id(p) for stage in stages for p in stage.parameters()]
    assert sorted(owned) == sorted(id(p) for p in cnn.module.parameters())


class Taking(nn.Module):
    """A layer that takes a known time of a clock that only such layers move."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        if float(inputs.detach().sum()) > 1e30:  # keeps the layer whole: no tracer follows this
            return inputs
        return inputs * self.scale


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_cut_balances_layers_that_take_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = Clock(), (0.25, 0.25, 0.5, 0.5, 0.5)
    monkeypatch.setattr(cut_measure, "time", clock)
    model = nn.Sequential(*(Taking(clock, each) for each in seconds))
    sample = torch.ones(2, 3)
    graph = trace(model, sample, stages=2)
    assert operation_times(graph, sample) == list(seconds)
    cuts = balanced_cuts(graph, sample, 2, Room())
    assert [graph.name_at(cut) for cut in cuts] == ["3"]
    assert all(parameter.grad is None for parameter in model.parameters())
