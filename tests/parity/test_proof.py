"""The proof of plans: right ones pass, wrong ones are refused in a sentence with the cause."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from node_runs import train_nodes

# isort: split
from proofs import HERE, Claim, run_proofs, verdict

from paceline import api
from paceline.config import load_config
from paceline.config.environment import cache_root
from paceline.errors import ProofError
from paceline.local import replicas
from paceline.observe.ledger import ledger_of
from paceline.schema import NodePlan, read_json, write_json
from paceline.schema.proof import Proof

SGD = ("optimizer.name=sgd", "optimizer.learning_rate=0.1")
MOMENTUM = (*SGD, "optimizer.momentum=0.9")
ADAM = ("optimizer.name=adam", "optimizer.clip_norm=0.5")
ADAMW = ("optimizer.name=adamw", "optimizer.weight_decay=0.01")
NOT_A_MEAN = ("the loss is not a mean over samples", "local.strategy = 'threads'")
REPLICAS = {"strategy": "replicas", "replicas": 2}
PROCESSES = {"strategy": "processes", "processes": 2}
DDP = {**PROCESSES, "sync": "ddp"}
PIPELINE = {"strategy": "pipeline", "stages": 2, "micro_batches": 2}
HYBRID = {"strategy": "hybrid", "replicas": 2, "stages": 2, "micro_batches": 2}


def claims(node: dict[str, object]) -> list[Claim]:
    """What is asked of every strategy that divides batches."""
    return [
        Claim(node=node, loss="smoothed", changes=SGD),
        Claim(node=node, changes=ADAMW),
        Claim(node=node, loss="weighted", changes=SGD, said=("other weights for", *NOT_A_MEAN)),
        Claim(node=node, loss="ignoring", changes=MOMENTUM, said=NOT_A_MEAN),
        Claim(node=node, loss="summed", changes=ADAM, said=NOT_A_MEAN),
        Claim(node=node, model="Centred", changes=SGD, said=("depends on the rest of the batch",)),
    ]


TWO_RANKS = [
    *claims(PROCESSES),
    Claim(node=PROCESSES, model="Chance", changes=MOMENTUM),
    Claim(node=PROCESSES, model="Parameters", changes=ADAM),
    Claim(node=PROCESSES, memory_format="channels_last", model="Viewing", changes=SGD),
    Claim(node=PROCESSES, precision="bf16", changes=(*MOMENTUM, "numerics.precision=bf16")),
    Claim(node=PROCESSES, broken=True, changes=SGD, said=("other weights for 1.weight (0.0",)),
    Claim(node=PROCESSES, broken=True, changes=ADAM, said=("for 1.weight",)),
    # Decay does not move a weight that takes no part in updates.
    Claim(node=PROCESSES, model="Parameters", changes=(*SGD, "optimizer.weight_decay=0.1")),
    Claim(node=DDP, changes=ADAM),
    Claim(node=DDP, loss="weighted", changes=SGD, said=NOT_A_MEAN),
    Claim(
        node=DDP,
        model="RunAgain",
        changes=SGD,
        said=("fails in two updates on a copy (RuntimeError", "use local.sync = 'shared'"),
    ),
    Claim(node=PROCESSES, model="RunAgain", changes=SGD),
    *claims(PIPELINE),
    Claim(node=PIPELINE, model="Chance", changes=SGD),
]
FOUR_RANKS = [*claims(HYBRID)[:4], Claim(node={**PROCESSES, "processes": 4}, changes=ADAM)]
ALONE = [
    *claims(REPLICAS),
    Claim(node=REPLICAS, model="Chance", changes=MOMENTUM),
    Claim(node=REPLICAS, model="Parameters", changes=ADAM),
    Claim(node=REPLICAS, broken=True, changes=SGD, said=("other weights for 1.weight (0.0",)),
    Claim(node={"strategy": "threads"}, loss="weighted", memory_format="channels_last"),
    Claim(
        node={"strategy": "threads"},
        model="Viewing",
        memory_format="channels_last",
        said=("RuntimeError: view size", "memory_format = 'contiguous'"),
    ),
]


def check(claims: list[Claim], found: list[str]) -> None:
    for claim, text in zip(claims, found, strict=True):
        assert bool(text) == bool(claim.said), f"{claim}: {text}"
        for part in claim.said:
            assert part in text, f"{claim}: {text}"


def test_one_process(tmp_path: Path) -> None:
    check(ALONE, [verdict(claim, tmp_path / str(n)) for n, claim in enumerate(ALONE)])


def test_batch_norm_of_parts_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(node=REPLICAS, model="Parameters", changes=SGD)
    with monkeypatch.context() as without_sums:
        without_sums.setattr(replicas, "whole_batch", lambda *_, **__: None)
        refusal = verdict(claim, tmp_path / "parts")
    assert "norm.running_mean: the layer does not see the whole batch" in refusal
    assert not verdict(claim, tmp_path / "whole")
    allowed = dataclasses.replace(claim, changes=(*SGD, 'numerics.allow=["local_batch_norm"]'))
    assert not verdict(allowed, tmp_path / "allowed")


@pytest.mark.world_size(2)
def test_two_ranks(tmp_path: Path) -> None:
    two = [claim for claim in TWO_RANKS if claim.model != "Viewing"]
    check(two, run_proofs(tmp_path, two))


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_four_ranks(tmp_path: Path) -> None:
    check(FOUR_RANKS, run_proofs(tmp_path, FOUR_RANKS))


def start(folder: Path, *changes: str) -> api.TrainingStart:
    claim = Claim(node={}, changes=("train.epochs=1", *changes))
    config, run, plan = api.begin(load_config(None, claim.settings()), run=folder)
    return api.TrainingStart(config=config, run=run, plan=plan, silent=True, say=lambda text: None)


def loss(name: str) -> str:
    return f"workload.loss={HERE}/proof_models.py:{name}"


@pytest.mark.parametrize("strategy", ["replicas", "processes"])
def test_a_strategy_that_was_asked_for_is_refused_and_nothing_is_trained(
    tmp_path: Path, strategy: str
) -> None:
    asked = start(tmp_path / "run", loss("weighted"), f"local.strategy={strategy}")
    with pytest.raises(ProofError, match=f"`{strategy}` gives other weights for .* not a mean"):
        api.run_training(asked)
    assert ProofError.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_passed_proof_is_kept(tmp_path: Path) -> None:
    for attempt in range(2):
        folder = tmp_path / f"{attempt}"
        asked = start(folder, loss("smoothed"), "local.strategy=processes")
        assert api.run_training(asked).exit_code == 0
        proof = read_json(Proof, folder / "proof.json")
        assert proof.passed
        kept = cache_root() / "proofs" / f"{proof.key}.json"
        if attempt == 0:
            assert ledger_of(folder).total("proof") > 0
            write_json(kept, dataclasses.replace(proof, largest=0.125))
        else:
            assert proof.largest == 0.125


@pytest.mark.world_size(2)
def test_between_nodes(tmp_path: Path) -> None:
    nodes = [NodePlan(strategy="threads", share=0.75), NodePlan(strategy="threads", share=0.25)]
    train_nodes(tmp_path / "right", nodes, loss("smoothed"), timeout=300)
    proof = read_json(Proof, tmp_path / "right" / "proof.json")
    assert proof.passed
    assert proof.tensors > 12
    # Shares follow speeds while a plan trains, too: with others it need not be proved again.
    kept = cache_root() / "proofs" / f"{proof.key}.json"
    write_json(kept, dataclasses.replace(proof, largest=0.125))
    fairer = [dataclasses.replace(nodes[0], share=0.625), dataclasses.replace(nodes[1], share=1.0)]
    train_nodes(tmp_path / "fairer", fairer, loss("smoothed"), timeout=300)
    assert read_json(Proof, tmp_path / "fairer" / "proof.json").largest == 0.125
    sentence = "`threads` on 2 nodes gives other weights for .* not a mean over samples .* one host"
    with pytest.raises(AssertionError, match=sentence):
        train_nodes(tmp_path / "wrong", nodes, loss("weighted"), timeout=300)
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists()
