"""Loops of one's own: KINDS OUT [--epochs N] [--stop N] [--plain] [--shares 3,1].

KINDS (with commas between) train one after the other: what costs most is to start a process. OUT
has the weights as KIND.NAME. With --plain nothing of Paceline is in it: what one process makes of
the same batches.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import paceline
import paceline.pace.across
import paceline.pace.legs
from paceline.pace.compressed import Compressed
from paceline.pace.ranks import Ranks
from paceline.plan.pilot import Decision, Knowledge

KINDS = (
    "samples", "ignored", "sum", "accumulated", "norm", "gan", "shuffled", "own_parameter",
    "stream", "drawn", "uneven", "twice", "rare", "layout",
)  # fmt: skip


class Stream(IterableDataset[Any]):
    """The samples in order; in parts where a loader has several workers, as torch's docs say."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        whole = data()
        return (whole[number] for number in range(first, len(whole), every))


class Uneven(Sampler[list[int]]):
    """Batches of 4 to 16 samples, of a generator that is the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        order = torch.randperm(70, generator=self.generator).tolist()
        return iter([order[at : at + size] for at, size in ((0, 16), (16, 5), (21, 9), (30, 16),
                                                            (46, 4), (50, 13))])  # fmt: skip


class Twice(nn.Module):
    """A layer in two parts of the graph that are computed again in the backward pass, one inside
    the other's: its gradient arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs.requires_grad_()
        for _ in range(2):
            found = checkpoint(self.shared, found.tanh(), use_reentrant=True)
        return self.last(found)


class Rare(nn.Module):
    """A layer that only some samples reach: a part of a batch may have none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.last = nn.Linear(6, 6), nn.Linear(6, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        far = inputs[:, 0] > 1.5
        if far.any():
            inputs = torch.where(far[:, None], self.rare(inputs), inputs)
        return self.last(inputs)


class Plain:
    """What a plain loop has instead of `Pace`."""

    is_first = True

    def prepare(self, *things: Any) -> Any:
        return things

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None:
        loss.backward()

    def epochs(self, count: int) -> range:
        return range(count)

    def log(self, **values: Any) -> None:
        pass

    def stop(self) -> None:
        pass


def data() -> TensorDataset:
    """70 samples: four batches of 16, and one of 6; a third of the targets are ignored."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(70, 6, generator=generator)
    classes = torch.randint(0, 3, (70, 4), generator=generator)
    classes[torch.rand(70, 4, generator=generator) < 0.3] = -100
    return TensorDataset(inputs, classes, torch.randn(70, 4, generator=generator))


def net(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind in ("twice", "rare"):
        return Twice() if kind == "twice" else Rare()
    if kind == "layout":
        layers = (nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 4, 2, padding=1), nn.Flatten())
        found = nn.Sequential(*layers, nn.Linear(24, 12))
        return found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    middle = [nn.BatchNorm1d(8)] if kind == "norm" else []
    return nn.Sequential(nn.Linear(inputs, 8), *middle, nn.Tanh(), nn.Linear(8, outputs))


def loss_of(kind: str, outputs: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, Any]:
    scores = outputs.view(-1, 3, 4)
    if kind == "sum":
        return functional.cross_entropy(scores, classes, reduction="sum") / 50, "sum"
    if kind == "ignored":
        return functional.cross_entropy(scores, classes), (classes != -100).sum()
    return outputs.square().mean() + (outputs[:, 0] - 1).abs().mean(), None


def train(pace: Any, kind: str, epochs: int, stop: int | None) -> dict[str, torch.Tensor]:
    model = net(kind, 6, 12)
    scale = nn.Parameter(torch.ones(()))
    mine = [*model.parameters(), *([scale] if kind == "own_parameter" else [])]
    optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader = DataLoader(data(), batch_size=16, shuffle=kind != "samples")
    if kind == "stream":
        loader = DataLoader(Stream(), batch_size=16, num_workers=2)
    elif kind == "drawn":
        sampler = WeightedRandomSampler([0.5, 1.0] * 35, 64, generator=torch.Generator())
        loader = DataLoader(data(), batch_size=16, sampler=sampler)
    elif kind == "uneven":
        loader = DataLoader(data(), batch_sampler=Uneven())
    model, optimizer, scheduler, loader = pace.prepare(model, optimizer, scheduler, loader)
    for epoch in pace.epochs(epochs):
        for number, (inputs, classes, _) in enumerate(loader):
            if kind != "accumulated" or number % 2 == 0:
                optimizer.zero_grad()
            loss, weight = loss_of(kind, model(inputs) * scale, classes)
            pace.backward(loss, weight=weight)
            if kind != "accumulated" or number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            pace.log(loss=loss, weight=None if weight == "sum" else weight)
        scheduler.step()
        if stop == epoch + 1:
            pace.stop()
            if isinstance(pace, Plain):
                break
    return {**model.state_dict(), **({"scale": scale.detach()} if len(mine) > 4 else {})}


def train_gan(pace: Any, epochs: int) -> dict[str, torch.Tensor]:
    maker, judge = net("gan", 4, 6), net("gan", 6, 1)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=16, shuffle=True)
    maker, judge, of_maker, of_judge, loader = pace.prepare(
        maker, judge, of_maker, of_judge, loader
    )
    score = functional.binary_cross_entropy_with_logits
    for _ in pace.epochs(epochs):
        for real, _, noise in loader:
            ones = torch.ones(len(real), 1)
            made = maker(noise)
            of_judge.zero_grad()
            pace.backward(score(judge(real), ones))
            pace.backward(score(judge(made.detach()), 0 * ones))
            of_judge.step()
            of_maker.zero_grad()
            pace.backward(score(judge(made), ones))
            of_maker.step()
    return {
        **{f"maker.{name}": value for name, value in maker.state_dict().items()},
        **{f"judge.{name}": value for name, value in judge.state_dict().items()},
    }


def switch_every(updates: int) -> None:
    """Have the pilot name one team after the other, whatever is fast."""

    def next_leg(known: Knowledge) -> Decision:
        names = [option.name for option in known.options]
        name = names[-1 - len(known.legs) % len(names)]
        return Decision(name=name, updates=updates, role="trial", best=names[-1])

    paceline.pace.legs.next_leg = next_leg  # type: ignore[attr-defined]


def be_apart(per_host: int = 1) -> None:
    """Ranks as if on hosts of their own: gradients leave during the backward pass."""
    open_background = Ranks.open_background

    def open_apart(ranks: Ranks, hosts: Sequence[str]) -> None:
        open_background(ranks, [str(number // per_host) for number in range(len(hosts))])

    def counted(begin: Any) -> Any:
        def begins(*words: Any) -> Any:
            during.append(torch._C._current_graph_task_id() != -1)
            return begin(*words)

        return begins

    Ranks.open_background = open_apart  # type: ignore[method-assign]
    Ranks.begin_adding_up = counted(Ranks.begin_adding_up)  # type: ignore[method-assign]
    Compressed.begin = counted(Compressed.begin)  # type: ignore[method-assign]


def look_at_compressed(pace: Any, found: dict[str, torch.Tensor]) -> None:
    """All ranks have the same weights; what each has sent to other hosts is printed."""
    content = hashlib.sha256()
    for each in found.values():
        content.update(each.contiguous().view(-1).view(torch.uint8).numpy().data)
    assert len(set(pace._ranks.gather(content.hexdigest()))) == 1
    network = pace._compressed._network
    print(f"rank {pace.rank} sent {network.traffic.bytes_sent if network else 0}", flush=True)


def count_looks(*, none: bool) -> None:
    """At losses, whether they look across samples."""
    look = paceline.pace.across.looks_across

    def looks(*words: Any) -> bool:
        looked.append(not none)
        return not none and look(*words)

    paceline.pace.across.looks_across = looks


looked: list[bool] = []
during: list[bool] = []
"""Of every bucket that left, whether a backward pass was under way."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", type=lambda text: text.split(","))
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--run", help="with several kinds, the folder of their runs")
    parser.add_argument("--shares", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("--legs", action="store_true")
    parser.add_argument("--switch", type=int, help="another team every so many batches")
    parser.add_argument("--apart", action="store_true", help="ranks as if on hosts of their own")
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--looks", choices=("counted", "none"))
    options = parser.parse_args()
    if options.apart:
        be_apart(options.per_host)
    if options.looks:
        count_looks(none=options.looks == "none")
    if options.switch:
        switch_every(options.switch)
    every: dict[str, torch.Tensor] = {}
    for kind in options.kinds:
        assert kind in KINDS, kind
        torch.manual_seed(3)
        pace: Any = Plain()
        if not options.plain:
            legs = options.legs or options.switch is not None
            run = options.run
            if run is not None and len(options.kinds) > 1:
                run = f"{run}/{kind}"
            pace = paceline.Pace(
                run=run, shares=options.shares, legs=legs, compression=options.compression,
                compression_rank=1,
            )  # fmt: skip
        during.clear()
        if kind == "gan":
            found = train_gan(pace, options.epochs)
        else:
            found = train(pace, kind, options.epochs, options.stop)
        if options.apart and pace.ranks > options.per_host:
            assert any(during), f"{kind}: no gradient left during a backward pass"
        if options.compression != "none":
            look_at_compressed(pace, found)
        every |= {f"{kind}.{name}": value for name, value in found.items()}
    if pace.is_first:
        torch.save(every, options.out)
        if options.looks:
            print("looks", sum(looked))


if __name__ == "__main__":
    main()
