"""What was proved already: `proof.json` of the run, and an entry of the cache.

An entry holds for the same plan of the same workload, data and settings, and for the very code
that was proved: its key has the sources of all modules of the user's own (and of Paceline, where it
is not installed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.config.cache import keep, kept, key_of, place_of
from paceline.config.environment import instruction_limit
from paceline.references import is_reference, resolve
from paceline.schema import Config, encode, write_json
from paceline.schema.proof import FORMAT, Proof
from paceline.training.assemble import Task
from paceline.training.outside import is_installed
from paceline.training.parts import Parts

FILE = "proof.json"


def proof_key(task: Task, parts: Parts) -> str:
    """The same for what need not be proved again; empty for objects without a name."""
    if task.given is not None:
        return ""
    config, plan = task.config, task.plan
    facts: dict[str, Any] = {
        "format": FORMAT,
        "versions": [metadata.version("paceline"), metadata.version("torch")],
        "instructions": instruction_limit(),
        "settings": [
            encode(part)
            for part in (config.workload, config.optimizer, config.numerics, config.exchange)
        ],
        "seed": config.seed,
        "device": config.train.device,
        "data": parts.dataset.fingerprint,
        # Shares follow what is measured, while a plan trains too: only none at all is another plan.
        "nodes": [
            encode(dataclasses.replace(node, share=float(node.share > 0))) for node in plan.nodes
        ],
        "plan": [
            plan.exchange, plan.partition, plan.feature_layers, plan.precision,
            plan.memory_format, plan.batch_size, plan.bucket_mb,
        ],
        "sources": sources(config),
    }  # fmt: skip
    return key_of(facts)


def sources(config: Config) -> dict[str, str]:
    """What the loaded modules of one's own contain, and those that the configuration names."""
    named = set()
    for what, text in (*config.workload.code.items(), ("optimizer.name", config.optimizer.name)):
        if is_reference(text):
            named.add(getattr(resolve(text, what), "__module__", ""))
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not str(file).endswith(".py"):
            continue
        if name in named or not is_installed(str(file)):
            with contextlib.suppress(OSError):
                found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def known(task: Task, key: str) -> Proof | None:
    """What was proved before, by this run or by another."""
    for path in (task.run.path / FILE, place_of("proofs", key)) if key else ():
        proof = kept(Proof, path)
        if proof is not None and proof.passed and proof.key == key:
            return proof
    return None


def record(task: Task, proof: Proof) -> None:
    """Leave word in the run, and keep what passed."""
    with contextlib.suppress(OSError):  # a full disk is said where it matters
        write_json(task.run.path / FILE, proof)
    if proof.passed and proof.key:
        keep(place_of("proofs", proof.key), proof)
