"""Linear layers split over nodes train to the weights of one process.

Most nodes here are threads of one process on real Gloo, so that many divisions can be tried;
whole runs in processes of their own, over Gloo and MPI, with checkpoints, come last.

Tolerance: rtol 1e-4 and atol 1e-5 in fp32 (Adam: atol 1e-4), as for other exchanges.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import gc
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from node_runs import state, train_nodes
from runs import assert_same, train_weights
from torch import nn
from torch._C._distributed_c10d import HashStore

from paceline.cost.split import Division, Placed, arrange, step_bytes
from paceline.data.sampler import apportion
from paceline.data.samples import Stacked
from paceline.errors import UnsupportedError, WorkerError
from paceline.exchange.allreduce import AllReduce
from paceline.exchange.base import ExchangeSetting
from paceline.exchange.network import Network
from paceline.exchange.tensor_parallel.chains import find_chains
from paceline.exchange.tensor_parallel.layers import Partition
from paceline.exchange.tensor_parallel.split_linear import SplitLinear
from paceline.exchange.tensor_parallel.splittable import SampleTrial, look_at
from paceline.local.base import Job
from paceline.local.single import Threads
from paceline.local.steps import Supervised
from paceline.schema import ExchangeSettings, NodePlan
from paceline.schema.machines import LinearLayer

Saved = tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]
DEADLINE = datetime.timedelta(seconds=20)


def on_nodes(count: int, work: Callable[[Network], Any]) -> list[Any]:
    """`work` on so many nodes of one network, each a thread; what they return."""
    store = HashStore()
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def node(rank: int) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = DEADLINE
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, count, options)
        network = Network(group, [f"host-{n}" for n in range(count)], backend="gloo")
        del group, options
        try:
            results[rank] = work(network)
        except BaseException as error:
            errors.append(error)
        finally:
            network.close()

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


WAYS = [
    Placed(layer=LinearLayer(name="x", inputs=7, outputs=9), way=way, enter=enter, leave=leave)
    for way in ("column", "row")
    for enter in ("batch", "feature")
    for leave in ("batch", "feature")
]


@pytest.mark.parametrize("placed", WAYS, ids=lambda p: f"{p.way} {p.enter} to {p.leave}")
@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0, 0.0)], ids=str)
@pytest.mark.parametrize("inner", [(), (2,)], ids=["flat", "tokens"])
def test_every_way_to_run_a_layer(
    placed: Placed, shares: tuple[float, ...], inner: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(7, 9)
    parts = apportion(10, shares)
    values = torch.randn(10, *inner, 7, requires_grad=True)
    slopes = torch.randn(10, *inner, 9)
    linear(values).backward(slopes)
    whole = linear(values).detach()

    def work(network: Network) -> dict[str, Any]:
        partition = Partition(network, (), shares, 10)
        split = SplitLinear(copy.deepcopy(linear), placed, partition, shares)
        partition.begin(parts[network.rank], 10)
        start = sum(parts[: network.rank])
        rows = slice(start, start + parts[network.rank])

        def own(tensor: torch.Tensor, state: str, features: list[int]) -> torch.Tensor:
            if state == "batch":
                return tensor[rows]
            first = sum(features[: network.rank])
            return tensor[..., first : first + features[network.rank]]

        entered = own(values.detach(), placed.enter, split._inputs).clone().requires_grad_()
        result = split(entered)
        torch.testing.assert_close(result, own(whole, placed.leave, split._outputs))
        result.backward(own(slopes, placed.leave, split._outputs).contiguous())
        assert values.grad is not None
        torch.testing.assert_close(entered.grad, own(values.grad, placed.enter, split._inputs))
        return {"split": split, **{n: split.part(n).grad for n in ("weight", "bias")}}

    results = on_nodes(len(shares), work)
    for entry, expected in (("weight", linear.weight.grad), ("bias", linear.bias.grad)):
        split = results[0]["split"]
        if split.is_split(entry):
            dim = 0 if entry == "bias" or placed.way == "column" else 1
            found = torch.cat([result[entry] for result in results], dim=dim)
        else:  # summed by the exchange later
            found = torch.stack([result[entry] for result in results]).sum(dim=0)
        torch.testing.assert_close(found, expected)


class Small(nn.Module):
    """Convolutions, then four linear layers with a dropout among them, then one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3)
        )
        self.classifier = nn.Sequential(
            nn.Linear(6 * 4, 40),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(40, 30, bias=False),
            nn.Tanh(),
            nn.Linear(30, 20),
            nn.ReLU(),
            nn.Linear(20, 16),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.flatten(self.features(images), 1)
        outputs: torch.Tensor = self.head(torch.relu(self.classifier(hidden)))
        return outputs


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    MODEL = Small()
ALL = tuple(f"classifier.{n}" for n in (0, 3, 5, 7))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to divide a training."""

    shares: tuple[float, ...] = (1.0, 1.0)
    layers: tuple[str, ...] = ALL
    optimizer: str = "sgd"
    clip_norm: float | None = None
    memory_format: str = "contiguous"
    precision: str = "fp32"


def make_job(case: Case, network: Network | None) -> Job:
    def build() -> nn.Module:
        # Threads share torch's generator: no node may draw while another does.
        return copy.deepcopy(MODEL)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if case.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01, fused=True)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

    exchange = partition = None
    if network is not None:
        setting = ExchangeSetting(network=network, options=ExchangeSettings(), shares=case.shares)
        exchange = AllReduce(setting)
        partition = Partition(network, case.layers, case.shares, 16)
    return Job(
        build_model=build,
        step=Supervised(loss=nn.functional.cross_entropy),
        build_optimizer=optimizer,
        elementwise=True,
        node=NodePlan(),
        clip_norm=case.clip_norm,
        memory_format=case.memory_format,
        precision=case.precision,
        exchange=exchange,
        partition=partition,
        first_worker=0 if network is None else network.rank,
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three of 16 samples and a smaller one."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(count, 3, 8, 8, generator=generator),
            torch.randint(5, (count,), generator=generator),
        )
        for count in (16, 16, 16, 7)
    ]


def train(case: Case, network: Network | None, steps: int = 4) -> Threads:
    """The strategy after a few updates."""
    strategy = Threads(make_job(case, network))
    run_steps(strategy, case, network, range(steps))
    return strategy


def run_steps(strategy: Threads, case: Case, network: Network | None, steps: range) -> None:
    """Some of the updates."""
    for step in steps:
        inputs, targets = batches()[step]
        rows = slice(0, len(targets))
        if network is not None:
            parts = apportion(len(targets), case.shares)
            start = sum(parts[: network.rank])
            rows = slice(start, start + parts[network.rank])
        strategy.update(Stacked(inputs[rows], targets[rows]), len(targets), step)


def flat_state(strategy: Threads) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, as a checkpoint has them."""
    strategy.prepare_evaluation()
    optimizer = strategy.optimizer_state()
    found = {name: tensor.clone() for name, tensor in strategy.model.state_dict().items()}
    for name, entries in optimizer.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}|{key}"] = value.clone()
    return found


CASES = {
    "equal": Case(),
    "3 to 1": Case(shares=(3.0, 1.0)),
    "one without samples": Case(shares=(1.0, 0.0)),
    "four nodes": Case(shares=(3.0, 1.0, 2.0, 0.0)),
    "adam": Case(optimizer="adam", shares=(2.0, 1.0, 1.0)),
    "one layer": Case(layers=("classifier.3",)),
    "a layer by itself": Case(layers=("head",)),
    "two with one between": Case(layers=("classifier.0", "classifier.5", "head")),
    "clipped": Case(clip_norm=0.05, shares=(3.0, 1.0)),
    "channels last": Case(memory_format="channels_last", shares=(3.0, 1.0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_weights_of_one_process(case: Case) -> None:
    expected = flat_state(train(case, None))
    found = on_nodes(len(case.shares), lambda network: flat_state(train(case, network)))
    assert_same(found[0], expected, atol=1e-4 if case.optimizer == "adam" else 1e-5)
    weights = {name: tensor for name, tensor in expected.items() if "|" not in name}
    for other in found[1:]:  # their optimizer state is not gathered
        assert_same({name: other[name] for name in weights}, weights, atol=1e-4)


def test_clipping_changes_the_result() -> None:
    """The case above would pass without a global norm if nothing were clipped."""
    clipped = flat_state(train(CASES["clipped"], None))
    free = flat_state(train(CASES["3 to 1"], None))
    assert not torch.allclose(clipped["head.weight"], free["head.weight"], atol=1e-4)


def test_state_goes_on_at_another_node_count() -> None:
    """Two updates on two nodes, one on three that split other layers, one on one node."""
    expected = flat_state(train(Case(optimizer="adam"), None))

    def go_on(case: Case, saved: Saved | None, steps: range, network: Network | None) -> Saved:
        strategy = Threads(make_job(case, network))
        if saved is not None:
            strategy.load_weights(saved[0])
            strategy.load_optimizer_state(saved[1])
        run_steps(strategy, case, network, steps)
        strategy.prepare_evaluation()
        return strategy.model.state_dict(), copy.deepcopy(strategy.optimizer_state())

    first = Case(optimizer="adam", shares=(3.0, 1.0))
    second = Case(optimizer="adam", shares=(1.0, 0.0, 2.0), layers=("classifier.7", "head"))
    saved = on_nodes(2, lambda network: go_on(first, None, range(2), network))[0]
    saved = on_nodes(3, lambda network: go_on(second, saved, range(2, 3), network))[0]
    weights, optimizer = go_on(Case(optimizer="adam"), saved, range(3, 4), None)
    found = {**weights, **{f"{n}|{k}": v for n, e in optimizer.items() for k, v in e.items()}}
    assert_same(found, expected, atol=1e-4)


def test_evaluation_sends_nothing_and_agrees() -> None:
    case = CASES["3 to 1"]
    images = batches()[0][0]
    plain = train(case, None).model.eval()(images)

    def work(network: Network) -> tuple[torch.Tensor, int]:
        strategy = train(case, network)
        strategy.prepare_evaluation()
        before = network.traffic.bytes_sent
        assert strategy.parameters == sum(p.numel() for p in Small().parameters())
        with torch.inference_mode():
            count = 3 if network.rank else 16  # as many as each likes
            return strategy.model.eval()(images[:count]), network.traffic.bytes_sent - before

    for outputs, sent in on_nodes(2, work):
        assert sent == 0
        torch.testing.assert_close(outputs, plain[: len(outputs)], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (3.0, 1.0, 2.0, 0.0)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_those_of_the_formula(shares: tuple[float, ...], precision: str) -> None:
    case = Case(shares=shares, precision=precision)
    chains = find_chains(Small())
    division = Division(parts=tuple(apportion(16, shares)), shares=shares)
    placed = [arrange(chain, division, split=frozenset(ALL)) for chain in chains]
    others = sum(p.numel() for p in Small().features.parameters())
    if precision == "bf16":
        division = Division(parts=division.parts, shares=shares, value_bytes=2)
    expected = step_bytes(placed, division, other_parameters=others)

    def work(network: Network) -> tuple[int, int]:
        train(case, network, steps=1)
        return network.traffic.bytes_sent, network.traffic.bytes_received

    found = on_nodes(len(shares), work)
    assert [sent for sent, _ in found] == pytest.approx(expected, abs=len(shares) * 2)
    assert sum(sent for sent, _ in found) == sum(received for _, received in found)


def test_chains_of_a_model() -> None:
    inputs, targets = batches()[-1]
    trial = SampleTrial(inputs=inputs, targets=targets, loss=nn.functional.cross_entropy)
    found = [[layer.name for layer in chain] for chain in find_chains(Small(), trial)]
    assert found == [["head"], [*ALL]] or found == [[*ALL], ["head"]]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert find_chains(tied) == []
    frozen = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    assert [[each.name for each in chain] for chain in find_chains(frozen)] == [["1"]]


def test_a_layer_that_cannot_be_split_is_refused() -> None:
    case = Case(layers=("classifier.9",))
    with pytest.raises(UnsupportedError, match=r"'classifier\.9' cannot be split over 2 nodes"):
        on_nodes(2, lambda network: train(case, network, steps=1))


class ReadsItsWeight(Small):
    """Uses a weight outside its layer."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(images)
        return outputs + self.head.weight.sum()


@pytest.mark.parametrize("kind", ["hook", "read"])
def test_a_layer_that_something_else_knows_is_refused(kind: str) -> None:
    """A plan by hand too: what nobody has tried before is refused when it is trained."""

    def build() -> nn.Module:
        model = ReadsItsWeight() if kind == "read" else Small()
        if kind == "hook":
            model.head.register_forward_hook(lambda module, values, output: output * 2)
        return model

    def work(network: Network) -> None:
        job = dataclasses.replace(make_job(Case(layers=("head",)), network), build_model=build)
        inputs, targets = batches()[0]
        Threads(job).update(Stacked(inputs[:8], targets[:8]), 16, 0)

    words = "because it has a forward hook" if kind == "hook" else "uses its weights outside"
    with pytest.raises(UnsupportedError, match=f"the layer 'head' .*{words}"):
        on_nodes(2, work)


def refusal(work: Callable[[Network], None]) -> str:
    """What one of two nodes says, which then leaves the other alone."""

    def said(network: Network) -> str:
        try:
            work(network)
        except UnsupportedError as error:
            return str(error)
        except WorkerError:
            return ""  # lost the other one
        return "nothing"

    found = on_nodes(2, said)
    gc.collect()  # what failed holds on to its network
    return max(found, key=len)


class TakesTurns(nn.Module):
    """Two layers of one shape, whose order the first sample decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 192)
        self.second = nn.Linear(192, 192)
        self.skips = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if float(images[0].sum()) > 0:
            return self.second(torch.tanh(self.first(images.flatten(1))))
        if self.skips:
            return self.first(images.flatten(1))
        return self.first(torch.tanh(self.second(images.flatten(1))))


@pytest.mark.parametrize("skips", [False, True])
def test_nodes_that_call_other_layers_are_refused_and_not_mixed_up(skips: bool) -> None:
    """As stochastic depth does, and experts: what is sent for one layer would be another's."""
    layers = ("first", "second")

    def build() -> nn.Module:
        model = TakesTurns()
        model.skips = skips
        return model

    def work(network: Network) -> None:
        images = torch.full((8, 3, 8, 8), 1.0 if network.rank == 0 else -1.0)
        targets = torch.zeros(8, dtype=torch.int64)
        trial = SampleTrial(
            inputs=torch.ones(2, 3, 8, 8), targets=targets[:2], loss=nn.functional.cross_entropy
        )
        partition = Partition(network, layers, (1.0, 1.0), 16, look_at(build(), trial))
        job = make_job(Case(layers=layers), network)
        job = dataclasses.replace(job, build_model=build, partition=partition)
        Threads(job).update(Stacked(images, targets), 16, 0)

    words = "does not call second" if skips else "calls second where first was due"
    assert f"the model {words} in this update: layers that are left out" in refusal(work)


class TwoOutputs(Small):
    """Scores, and the length of a weight, which a node without samples must not add again."""

    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images), self.features[0].weight.square().sum()


def test_a_node_without_samples_adds_nothing_to_outputs_of_any_structure() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = TwoOutputs()

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs[0], targets) + 0.1 * outputs[1]

    def work(network: Network | None) -> dict[str, torch.Tensor]:
        case = Case(shares=(1.0, 0.0))
        job = dataclasses.replace(
            make_job(case, network),
            build_model=lambda: copy.deepcopy(model),
            step=Supervised(loss=loss, weighs=True),
        )
        strategy = Threads(job)
        run_steps(strategy, case, network, range(3))
        return flat_state(strategy)

    expected = work(None)
    assert_same(on_nodes(2, work)[0], expected)


class Viewing(Small):
    """Cannot compute a batch of 0 samples, as many a model."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.features(images)
        return self.head(torch.relu(self.classifier(hidden.view(hidden.shape[0], -1))))


def test_a_model_that_cannot_compute_0_samples_is_refused_where_a_node_may_have_none() -> None:
    inputs, targets = batches()[0]
    trial = SampleTrial(inputs=inputs[:2], targets=targets[:2], loss=nn.functional.cross_entropy)
    assert not look_at(Viewing(), trial).obstacles
    told = look_at(Viewing(), dataclasses.replace(trial, without_samples=True)).obstacles["head"]
    assert told.startswith("the model could not be tried on 0 samples (RuntimeError: cannot resh")
    assert not look_at(Small(), dataclasses.replace(trial, without_samples=True)).obstacles

    def work(network: Network) -> None:
        case = Case(shares=(1.0, 0.0))
        job = dataclasses.replace(make_job(case, network), build_model=Viewing)
        run_steps(Threads(job), case, network, range(1))

    assert "the model cannot compute 0 samples (RuntimeError: cannot reshape" in refusal(work)


# --- whole runs -----------------------------------------------------------------

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.05")
ADAM = ("optimizer.name=adam",)
BOTH = ("classifier.1", "classifier.3")
_numbers = itertools.count()


def alone(folder: Path, *changes: str) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of one process."""
    folder = folder / f"alone-{next(_numbers)}"
    train_weights(folder, *changes)
    return state(next(folder.iterdir()))


@pytest.mark.slow
def test_checkpoint_goes_on_in_one_process(tmp_path: Path) -> None:
    """One epoch on two nodes, another one without the second node and without a partition."""
    # The rate must not depend on the number of epochs.
    constant = ("optimizer.schedule=constant", "optimizer.warmup=0.0")
    changes = (*SGD, *constant, "data.options.samples=60")
    expected = alone(tmp_path, *changes, "train.epochs=2")
    run = tmp_path / "run"
    nodes = [NodePlan(share=3.0), NodePlan()]
    train_nodes(run, nodes, *changes, feature_layers=BOTH)
    assert_same(train_nodes(run, [NodePlan()], *changes, "train.epochs=2"), expected)


@pytest.mark.slow
def test_dropout_has_a_state_per_shard_and_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between split layers each node drops values of its own features, the same in every run."""
    model = Path(__file__).with_name("masked_model.py")
    changes = (f"workload.model={model}:build", "data.options.samples=48")
    masks, found = [], []
    for name in ("first", "second"):
        folder = tmp_path / f"masks-{name}"
        folder.mkdir()
        monkeypatch.setenv("MASKS", str(folder))
        nodes = [NodePlan(), NodePlan()]
        found.append(
            train_nodes(
                tmp_path / name,
                nodes,
                *SGD,
                *changes,
                "workload.model_options={}",
                feature_layers=("1", "3"),
            )
        )
        noted = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
        # Before it trains, a node tries on two samples which layers can be split.
        masks.append([mask for mask in noted if len(mask) > 2])
    assert [tuple(mask.shape) for mask in masks[0]] == [(24, 16)] * 4  # two updates, two nodes
    for one, other in itertools.combinations(masks[0], 2):
        assert not torch.equal(one, other)
    assert_same(found[0], found[1], rtol=0.0, atol=0.0)
