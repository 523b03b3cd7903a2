"""Targets for what other programs and ranks say, and for files of loops and benches.

Slurm's and MPI's commands, notes on the board of a node, words between nodes, checkpoints of a loop
of one's own, results of benches.
"""

from __future__ import annotations

import contextlib
import json
import random as random_module
from pathlib import Path
from typing import Any

import mutations
import torch
from doors import damaged_message, pick
from readers import FaultError, Random, Target, _json_file, check_message, nothing

from paceline.errors import WorkerError
from paceline.schema import Plan, encode, read_json

SLURM = (b"4711;cluster\n", b"12\n", b"module loaded\n4711\n", b"RUNNING\n", b"PENDING\nRUNNING\n")
MPI = (
    b"mpiexec (Open MPI) 5.0.8\n\nReport bugs to x\n",
    b"HYDRA build details:\n    Version:  4.2.0\n",
    b"Intel(R) MPI Library for Linux* OS, Version 2021\n",
)


def _slurm(random: Random, folder: Path) -> None:
    """What sbatch and squeue print, or a site's wrappers around them."""
    from paceline.launch.slurm import job_number, job_state

    text = mutations.damaged_bytes(random, pick(random, SLURM)).decode(errors="replace")
    state, reason = job_state(text)
    check_message(reason)
    if state and not state.replace("_", "").isalpha():
        raise FaultError(f"state {state!r}")
    if not job_number(text).isascii():
        raise FaultError("a number that is a path")


def _mpi(random: Random, folder: Path) -> None:
    from paceline.launch.mpi import recognised

    found = recognised("mpiexec", mutations.damaged_bytes(random, pick(random, MPI)))
    if found is not None:
        check_message(found.version)


def _tail(random: Random, folder: Path) -> None:
    """The last words of a log, which stand in a sentence."""
    from paceline.launch.engines import tail

    log = folder / "log"
    log.write_bytes(mutations.damaged_bytes(random, b"srun: error: node b\n---\nkilled\n"))
    check_message(tail(log))


def _board_note(random: Random, folder: Path) -> None:
    from paceline.local.shared import read_note

    row = damaged_message(random, {"names": ["a.weight"], "sizes": [4], "host": "a"})
    try:
        read_note(row + bytes(64), 1)
    except WorkerError as error:
        check_message(str(error))


def _crew(random: Random, folder: Path) -> None:
    """Orders and answers of nodes that train in legs, and what a node says of itself."""
    from paceline.exchange.crew import read_answer, read_number, read_order

    order = {"do": "leg", "members": [0, 1], "words": {"plan": encode(Plan())}}
    answer = {"did": {"update": 1}, "refused": "no", "kind": "UserError"}
    for read, whole in ((read_order, order), (read_answer, answer), (read_number, 12.5)):
        words: tuple[Any, ...] = () if read is read_order else ("a",)
        more = ("speed",) if read is read_number else ()
        with contextlib.suppress(WorkerError):
            read(damaged_message(random, whole), *words, *more)


# --- loops of one's own -----------------------------------------------------------------


def _loop() -> Any:
    """Everything that a loop may hand to `Pace`."""
    import paceline

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator())
    pace = paceline.Pace(run=Path("runs/loop"), resume=None)
    return pace, pace.prepare(model, optimizer, loader, schedule)


def _train_loop() -> None:
    pace, (model, optimizer, loader, schedule) = _loop()
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            pace.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()


def _prepare_loop(folder: Path) -> None:
    with contextlib.chdir(folder), contextlib.redirect_stdout(None):
        _train_loop()


def _restore_loop(random: Random, folder: Path) -> None:
    """What a checkpoint holds of a loop, whole files with other contents."""
    from paceline.pace.keeping import KEPT
    from paceline.training.checkpoint import Checkpoints

    before = torch.get_rng_state(), random_module.getstate()
    checkpoints = folder / "runs" / "loop" / "checkpoints"
    _, weights, state = Checkpoints(checkpoints, KEPT).load((checkpoints / "latest").resolve())
    damaged = mutations.damaged_data(random, json.loads(json.dumps(state[".pace"])))
    state = dict(state) | {".pace": damaged}
    if random.randint(0, 3) == 0:
        weights.pop(random.choice(list(weights)))
    if random.randint(0, 3) == 0:
        state.pop(random.choice(list(state)))
    try:
        pace, _ = _loop()
        pace._restore(weights, state)
    finally:
        torch.set_rng_state(before[0])
        random_module.setstate(before[1])


def programs() -> list[Target]:
    """All of these."""
    from benchmarks.lab.exchange import Cell, Effort, Matrix, TrialRow
    from benchmarks.lab.predict import CaseOutcome, PredictionRun, Results

    row = TrialRow(
        name="ring", seconds=1.0, low=1.0, high=1.0, images_per_second=1.0, mb_sent=1.0,
        mb_counted=1.0, packets=1.0, waiting=0.0,
    )  # fmt: skip
    wanted = Cell(model="m", hosts=2, cores=(1.0, 1.0), rate="1gbit", effort=Effort(), rows=(row,))

    def matrix(path: Path) -> None:
        for cell in read_json(Matrix, path).cells:
            cell.answers(wanted, ["ring"])
            _ = cell.title
            json.dumps(encode(cell), allow_nan=False)

    def results(path: Path) -> None:
        proof = PredictionRun(path, lambda text: None)
        json.dumps([(encode(each), each.error) for each in proof.outcomes], allow_nan=False)

    outcome = CaseOutcome(
        model="m", hosts="two", cores=(1.0, 1.0), rate="1gbit", option="ring", predicted=1.0,
        measured=1.1, low=1.0, high=1.2,
    )  # fmt: skip
    return [
        Target("Slurm's words", nothing, _slurm),
        Target("MPI's words", nothing, _mpi),
        Target("last words of a log", nothing, _tail),
        Target("notes on the board", nothing, _board_note),
        Target("words of nodes in legs", nothing, _crew),
        Target("checkpoint of a loop", _prepare_loop, _restore_loop),
        Target("bench exchange", *_json_file(Matrix(cells=(wanted,)), matrix)),
        Target("bench predict", *_json_file(Results(outcomes=(outcome,)), results)),
    ]
