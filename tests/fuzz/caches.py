"""Targets for what Paceline has written for itself: caches, legs, proofs, and a checkpoint's state.

Whatever is in a cache, damaged or not, costs no more than making it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import torch
from readers import FaultError, Random, Target, host, measured_machines, nothing
from safetensors.torch import save_file

from paceline.config import load_config
from paceline.errors import UserError
from paceline.schema import Config, Plan, encode


def _bad_files(random: Random, folder: Path) -> None:
    """Which files of a folder cannot be used, as it was found before."""
    from paceline.data.listing import find_bad_files, list_folder

    photos = folder / "photos"
    for name in ("cat/a.png", "cat/b.png", "dog/c.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"x")
    listing = list_folder(photos)
    check = {"a.png": "damaged"}.get

    def look() -> Any:
        return find_bad_files(listing, folder, "key", 1, lambda path: check(path.name))

    shutil.rmtree(folder / "checks", ignore_errors=True)
    look()
    kept = next((folder / "checks").glob("*.json"))
    kept.write_bytes(mutations.damaged_json(random, kept.read_text()))
    names = {file.path for file in listing.files}
    for found in look():
        if found.path not in names:
            raise FaultError(f"{found.path!r} is left out, which is not there")


def _legs(random: Random, folder: Path) -> None:
    from paceline.schema.legs import Leg, merged, read_legs

    whole = [Leg(name=name, updates=5, seconds=1.0, update_seconds=0.2) for name in "ab"]
    text = "".join(json.dumps(encode(leg)) + "\n" for leg in whole)
    path = folder / "legs.jsonl"
    path.write_bytes(mutations.damaged_json_lines(random, text))
    merged(read_legs(path))


def _lesson(random: Random, folder: Path) -> None:
    from paceline.plan.hopes import options
    from paceline.plan.pilot import Knowledge, next_leg
    from paceline.schema.legs import Lesson
    from paceline.workflow.alone import _read_lesson

    whole = Lesson(best="threads 2", factors={"replicas": 0.9, "processes": 0.8})
    path = folder / "lesson.json"
    path.write_bytes(mutations.damaged_json(random, json.dumps(encode(whole))))
    lesson = _read_lesson(path)
    config = load_config(None)
    found = options(
        config, cores=4, batch_size=16, elementwise=True, images=True, many=True, divisible=True,
        rounds=True,
        learned=lesson.factors,
    )  # fmt: skip
    for updates in (10, 100_000):
        known = Knowledge(options=[option for option, _ in found], updates=updates, start=None)
        if next_leg(known).name not in [option.name for option, _ in found]:
            raise FaultError("a plan that nobody offered")


def _proof(random: Random, folder: Path) -> None:
    from paceline.schema import read_json
    from paceline.schema.proof import Proof
    from paceline.training.proof_record import FILE, known

    task: Any = SimpleNamespace(run=SimpleNamespace(path=folder))
    whole = Proof(key="k", passed=True, tolerance=1e-4, tensors=3, samples=(3, 2))
    damaged = mutations.damaged_json(random, json.dumps(encode(whole)))
    (folder / FILE).write_bytes(damaged)
    found = known(task, "k")
    if found is not None and not (found.passed and found.key == "k"):
        raise FaultError("what was not proved was taken for proved")
    with contextlib.suppress(UserError):
        read_json(Proof, folder / FILE)


def _plans(random: Random, folder: Path) -> None:
    """The plan for hosts that were measured, as it was found before."""
    from paceline.workflow.machines import plan_machines

    machines = measured_machines(host("a"), host("b"))
    before = os.environ.get("PACELINE_CACHE")
    os.environ["PACELINE_CACHE"] = str(folder / "plan-cache")
    try:
        plan_machines(load_config(None), machines)
        kept = next((folder / "plan-cache" / "plans").glob("*.json"))
        whole = kept.read_text()
        kept.write_bytes(mutations.damaged_json(random, whole))
        plan, _ = plan_machines(load_config(None), machines)
        json.dumps(encode(plan), allow_nan=False)
        kept.write_text(whole)
    finally:
        if before is None:
            del os.environ["PACELINE_CACHE"]
        else:
            os.environ["PACELINE_CACHE"] = before


def _prepare_state(folder: Path) -> None:
    from paceline.training.checkpoint import Checkpoints, TrainState

    weights = {"layer.weight": torch.ones(3, 2), "_extra_state": {"seen": (1, torch.ones(2))}}
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=False)
    memory: Any = {"layer.weight": {"step": 3, "odd": [1.5, (2, 3)], "rows": sparse, "c": 1j}}
    made = Checkpoints(folder / "checkpoints", keep=2).save(TrainState(), weights, memory)  # type: ignore[arg-type]
    shutil.copytree(made, folder / "whole")


def _state(random: Random, folder: Path) -> None:
    """state.json with a digest that is right, as whoever edits it by a program would leave it."""
    from paceline.schema.checkpoint import digest_of, newest_good
    from paceline.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    newest = checkpoints.newest()
    if newest is None:  # what was damaged was put aside
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(folder / "whole", folder / "checkpoints" / "step-00000000")
        newest = folder / "checkpoints" / "step-00000000"
    data = mutations.damaged_data(random, json.loads((folder / "whole" / "state.json").read_text()))
    with contextlib.suppress(TypeError, ValueError, RecursionError, AttributeError):
        data = data | {"digest": digest_of(data)}
    try:
        with contextlib.suppress(RecursionError):
            (newest / "state.json").write_bytes(mutations._json(data))
        _, weights, memory = checkpoints.load(newest)
        for values in (weights, *memory.values()):
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    value.to_dense().sum()
        newest_good(folder / "checkpoints", lambda text: None)
    finally:
        if newest.exists():
            shutil.copyfile(folder / "whole" / "state.json", newest / "state.json")


def _extra_state(random: Random, folder: Path) -> None:
    """What a module saves besides tensors, in the header of a safetensors file."""
    from paceline.models.extra_state import ENTRY, load_model, separate

    tensors, entries = separate({"w": torch.ones(2), "_extra_state": {"seen": (1, torch.ones(2))}})
    assert entries is not None
    text = mutations.damaged_json(random, entries[ENTRY]).decode(errors="replace")
    save_file(tensors, folder / "x.safetensors", metadata={ENTRY: text})
    with contextlib.suppress(ValueError):
        load_model(folder / "x.safetensors")


def _instructions(random: Random, folder: Path) -> None:
    """Whether the matrix unit works, as it was found before; asking again starts a process."""
    from paceline.hardware import instructions

    def asked_again(*words: Any, **more: Any) -> Any:
        return SimpleNamespace(returncode=0, stdout="")

    before = instructions.subprocess
    instructions.subprocess = SimpleNamespace(run=asked_again)  # type: ignore[assignment]
    root: Callable[[], Path] = instructions.cache_root
    instructions.cache_root = lambda: folder  # type: ignore[assignment]
    try:
        (folder / "amx.json").unlink(missing_ok=True)
        instructions.try_amx()
        whole = (folder / "amx.json").read_text()
        (folder / "amx.json").write_bytes(mutations.damaged_json(random, whole))
        instructions.try_amx()
    finally:
        instructions.subprocess = before
        instructions.cache_root = root  # type: ignore[assignment]


def _resume_word(random: Random, folder: Path) -> None:
    """Which checkpoint the ranks of a node go on from, as their leader has left it."""
    from paceline.training.assemble import agreed_checkpoint

    run = SimpleNamespace(path=folder, checkpoints=folder / "checkpoints")
    context = SimpleNamespace(nodes=2, node=1)
    task: Any = SimpleNamespace(
        run=run, context=context, network=None, board=None, config=Config(), plan=Plan()
    )
    (folder / "node-1").mkdir(exist_ok=True)
    text = json.dumps(str(folder / "checkpoints" / "step-00000004"))
    (folder / "node-1" / "resume.json").write_bytes(mutations.damaged_json(random, text))
    agreed_checkpoint(task)


def caches() -> list[Target]:
    """All of these."""
    return [
        Target("listing of data", nothing, _bad_files),
        Target("legs.jsonl", nothing, _legs),
        Target("lesson", nothing, _lesson),
        Target("proof", nothing, _proof),
        Target("plan cache", nothing, _plans),
        Target("state.json", _prepare_state, _state),
        Target("extra state", nothing, _extra_state),
        Target("amx.json", nothing, _instructions),
        Target("resume.json", nothing, _resume_word),
    ]
