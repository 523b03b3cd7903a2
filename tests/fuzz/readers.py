"""One target for every reader of a file or a socket: a real input, damaged, is read.

A target may succeed, or end with an error of the user's (exit code 2) in one short line. Anything
else is a fault: another exception, a message of many lines, a hang, a crash, NaN in what is
printed for programs.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random as random_module
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1] / "support"))
from cost_cases import host
from cost_cases import machines as measured_machines
from written_runs import write_run

from paceline import cli
from paceline.config import dump_config, load_config
from paceline.config.hosts import find_hosts, load_hosts
from paceline.errors import DataError, ModelError, RunDirectoryError, UserError
from paceline.schema import Config, Plan, Race, decode, encode, read_json

Random = random_module.Random
SETTINGS = {
    "name": "run",
    "seed": 1,
    "workload": {"model": "mnist_cnn", "model_options": {"dropout": 0.1}, "batch_size": 16},
    "data": {"limit": 64, "options": {"shape": [1, 8, 8]}, "validation": 0.2},
    "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "clip_norm": 1.0},
    "train": {"epochs": 2, "steps": 5, "deadline": 30.0, "until": {"accuracy": 0.9}},
    "numerics": {"precision": "fp32"},
    "local": {"strategy": "threads", "threads": 2, "split_at": ["a", "b"]},
    "exchange": {"kind": "allreduce", "bucket_mb": 4.0, "every": 2},
    "observe": {"samples_every": 0.5},
}
HOSTS = {
    "defaults": {"slots": 1, "python": "/usr/bin/python3"},
    "host": [{"name": "a", "share": 0.5}, {"name": "b", "address": "u@10.0.0.2", "share": 0.5}],
    "data": {"location": "copy"},
}
LAB = {
    "network": "10.77.0.0/24",
    "link": {"rate": "1gbit", "delay": "5ms"},
    "host": [{"name": "a", "cores": 1.0, "memory": "2gb"}, {"name": "b", "visible": 2}],
    "fault": [{"at": "10s", "kind": "throttle", "host": "a", "rate": "10mbit"}],
}
EXPERIMENT = {
    "name": "mine",
    "title": "A title",
    "study": "Of a study",
    "settings": {"workload.model": "mnist_cnn"},
    "quick": {"train.epochs": 1},
    "otherwise": {"cifar10": {"workload.data": "synthetic"}},
    "published": {"speed": [1.0, 2.0]},
    "step": [
        {
            "name": "{recipe}-{nodes}",
            "each": {"nodes": [1, 2], "recipe": ["x", "y"]},
            "hosts": [1.0, {"cores": 0.5}],
            "settings": {"exchange.kind": "ring", "local.processes": "{nodes}"},
        }
    ],
}
PLAIN = {"width": 320}
"""Of the pictures that are damaged: small, so that thousands are decoded."""


class FaultError(AssertionError):
    """A target ended in a way that no input may bring about."""


@dataclass(frozen=True)
class Target:
    """A reader, and how it is given damaged input."""

    name: str
    prepare: Callable[[Path], None]
    """Writes what is undamaged into an empty folder, once."""
    once: Callable[[Random, Path], None]
    """Damages it, reads it, and puts it back."""

    def run(self, random: Random, folder: Path) -> None:
        """One input; FaultError where it ended badly."""
        try:
            self.once(random, folder)
        except UserError as error:
            check_message(str(error))
        except FaultError:
            raise
        except Exception as error:
            raise FaultError(f"{type(error).__name__}: {str(error)[:300]}") from error


def check_message(text: str) -> None:
    """One line that a terminal can show."""
    if len(text) > 4000 or "\n" in text.strip() or any(c in text for c in "\0\x1b"):
        raise FaultError(f"not one plain line: {text[:300]!r}")


def nothing(folder: Path) -> None:
    """Nothing has to be prepared."""


def _toml(tables: dict[str, Any], read: Callable[[Path], object]) -> Callable[[Random, Path], None]:
    def once(random: Random, folder: Path) -> None:
        path = folder / "experiment.toml"
        path.write_bytes(mutations.damaged_toml(random, tables))
        read(path)

    return once


def _read_config(path: Path) -> None:
    config = load_config(path)
    again = path.with_name("again.toml")
    again.write_text(dump_config(config))
    if load_config(again) != config:
        raise FaultError("a configuration that does not come back from its own file")
    json.dumps(encode(config))


def _set(random: Random, folder: Path) -> None:
    tables = mutations.damaged_data(random, SETTINGS)
    lines = []
    for key, value in _flat(tables if isinstance(tables, dict) else {}):
        try:
            text = value if isinstance(value, str) else json.dumps(value)
        except RecursionError:
            text = "[" * 3000
        lines.append(f"{key}={text}")
    lines = lines[:30]
    if lines and random.randint(0, 2) == 0:
        at = random.randint(0, len(lines) - 1)
        lines[at] = mutations.damaged_bytes(random, lines[at].encode()).decode(errors="replace")
    load_config(None, lines)


def _flat(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, dict) and value and len(prefix) < 200:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _host_names(random: Random, folder: Path) -> None:
    text = mutations.damaged_bytes(random, b"a,b:2,10.0.0.1:1").decode(errors="replace")
    for place in find_hosts(text).places[:10]:
        _ = place.host.network_address


def _read_lab(path: Path) -> None:
    from paceline.lab.spec import LabSpec

    spec = LabSpec.load(path, ["host.*.cores=0.5", "link.rate=100mbit"])
    for each in spec.hosts[:10]:
        _ = spec.rate_of(each.name), spec.delay_of(each.name), spec.addresses


def _read_experiment(path: Path) -> None:
    from studies.spec import load_experiment

    for quick in (True, False):
        load_experiment(path.parent, quick=quick)


def _json_file(
    value: Any, read: Callable[[Path], object]
) -> tuple[Callable[[Path], None], Callable[[Random, Path], None]]:
    def prepare(folder: Path) -> None:
        (folder / "whole.json").write_text(json.dumps(encode(value), indent=2))

    def once(random: Random, folder: Path) -> None:
        path = folder / "file.json"
        path.write_bytes(mutations.damaged_json(random, (folder / "whole.json").read_text()))
        read(path)

    return prepare, once


def _read_plan(path: Path) -> None:
    plan = read_json(Plan, path)
    json.dumps(encode(plan.with_servers(1)), allow_nan=False)


def _read_race(path: Path) -> None:
    from paceline.hardware.kept_races import kept_race
    from paceline.plan import plan_from_race
    from paceline.report.tables import race_table

    race_table(read_json(Race, path))
    kept = kept_race(path)
    if kept is not None:
        decode(Plan, encode(plan_from_race(Config(), kept)))


def _read_machines(path: Path) -> None:
    from paceline.schema.machines import Machines
    from paceline.workflow.machines import plan_machines

    plan, _ = plan_machines(load_config(None), read_json(Machines, path))
    json.dumps(encode(plan), allow_nan=False)


def _predict(path: Path) -> None:
    call("forecast", "--machines", str(path), "--nodes", "1,2", "--json")


def _version() -> Any:
    from paceline.schema.signature import Pictures, Signature
    from paceline.schema.version import Architecture, Compared, Origin, Version

    pictures = Pictures(size=4, channels=1, mean=(0.1,), deviation=(0.3,))
    return Version(
        kind="safetensors",
        made="2026-01-01T00:00:00+00:00",
        signature=Signature(shape=(1, 4, 4), classes=("a", "b"), pictures=pictures),
        output_shape=(2,),
        tells_classes=True,
        network=Architecture(name="mnist_cnn", classes=2),
        origin=Origin(run="runs/one", update=3, epoch=1, metrics={"test_accuracy": 0.5}),
        compared=Compared(samples=2, largest=0.0, tolerance=1e-4),
        files={"model.safetensors": "0" * 64},
    )


def _read_version(path: Path) -> None:
    from paceline.serve.versions import read_version

    folder = path.parent / "1"
    folder.mkdir(exist_ok=True)
    path.replace(folder / "version.json")
    (folder / "model.safetensors").write_bytes(b"")
    read_version(folder)


def _read_serving(path: Path) -> None:
    from paceline.serve.versions import read_serving, served_numbers

    path.replace(path.with_name("serving.json"))
    found = served_numbers(read_serving(path.parent), [1, 2, 3])
    if not set(found) <= {1, 2, 3}:
        raise FaultError(f"versions {found}")


def _request(name: str, whole: dict[str, Any]) -> Callable[[Random, Path], None]:
    """A body that a stranger sends to the server; what is none is refused with a status."""

    def once(random: Random, folder: Path) -> None:
        from paceline.serve import messages
        from paceline.serve.refusals import RefusalError

        body, about = mutations.damaged_json(random, json.dumps(whole)), _version()
        length = str(random.choice([len(body), len(body) // 2, 0, -1]))
        headers = {messages.HEADER: length} if random.random() < 0.3 else {}
        try:
            if name == "v2":
                asked = messages.v2_request(body, headers, about)
            else:
                asked = getattr(messages, name)(body, about)
        except RefusalError as refusal:
            if refusal.status != 400:
                raise FaultError(f"status {refusal.status}") from None
            return
        if asked.numbers is not None and asked.numbers.shape[1:] != (1, 4, 4):
            raise FaultError(f"shape {asked.numbers.shape}")

    return once


ROW = [0.5] * 16
TENSOR = {
    "name": "input", "datatype": "FP32", "shape": [1, 1, 4, 4], "data": ROW,
    "parameters": {"other": 1},
}  # fmt: skip
OUTPUT = {"name": "output", "parameters": {"binary_data": True}}


def _read_calibration(path: Path) -> None:
    from paceline.schema.calibration import Calibration

    factors = read_json(Calibration, path).factors
    if any(not 0 < factor < float("inf") for factor in factors.values()):
        raise FaultError(f"factors {factors}")


def call(*arguments: str) -> None:
    """The real command line in this process; its refusal as the error that it was."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as done:
        code = done.code
    text = err.getvalue()
    if code == 2 and text.strip():
        raise RunDirectoryError(text.strip().removeprefix("paceline: ").splitlines()[-1])
    if code not in (0, 2) or "internal error" in text or "Traceback" in text:
        raise FaultError(f"exit code {code}: {text[-600:]}")
    if "--json" in arguments:
        try:
            json.loads(out.getvalue(), parse_constant=_no_constant)
        except ValueError as error:
            raise FaultError(f"what is for programs is not JSON: {error}") from None
    elif any(c in out.getvalue() + text for c in "\x1b\0\a\b"):
        raise FaultError(f"control characters came through: {out.getvalue()[-300:]!r}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} in it")


def _prepare_run(folder: Path) -> None:
    write_run(folder / "runs" / "one", hosts="abc", epochs=3)
    write_run(folder / "runs" / "two", hosts="a", epochs=3)
    # Few events, so that damage is met soon.
    for events in folder.glob("runs/*/rank-*/events.jsonl"):
        kept = events.read_text().splitlines()
        events.write_text("\n".join((*kept[:30], *kept[-5:])) + "\n")
    shutil.copytree(folder / "runs" / "one", folder / "whole" / "one")


def _damaged_run(*arguments: str) -> Callable[[Random, Path], None]:
    def once(random: Random, folder: Path) -> None:
        run, whole = folder / "runs" / "one", folder / "whole" / "one"
        names = [str(path.relative_to(whole)) for path in sorted(whole.rglob("*.*"))]
        name = names[random.randint(0, len(names) - 1)]
        text = (whole / name).read_text()
        if name.endswith(".json"):
            damaged = mutations.damaged_json(random, text)
        elif name.endswith(".jsonl"):
            damaged = mutations.damaged_json_lines(random, text)
        else:
            damaged = mutations.damaged_bytes(random, text.encode())
        (run / name).write_bytes(damaged)
        try:
            call(*(word.replace("FOLDER", str(folder)) for word in arguments))
        finally:
            shutil.copyfile(whole / name, run / name)

    return once


def _read_metrics(random: Random, folder: Path) -> None:
    from paceline.observe.metrics import MetricsFile, totals

    text = (folder / "whole" / "one" / "metrics.jsonl").read_text()
    path = folder / "metrics.jsonl"
    path.write_bytes(mutations.damaged_json_lines(random, text))
    file = MetricsFile(path)
    file.restore(2)
    totals(file.lines, open_seconds=0.0)


def _prepare_checkpoint(folder: Path) -> None:
    from paceline.training.checkpoint import Checkpoints, TrainState

    weights = {"layer.weight": torch.ones(3, 2), "layer.bias": torch.zeros(3)}
    memory: Any = {"layer.weight": {"step": 3, "momentum": torch.ones(3, 2)}}
    made = Checkpoints(folder / "checkpoints", keep=2).save(TrainState(), weights, memory)
    shutil.copytree(made, folder / "whole")


def _read_checkpoint(random: Random, folder: Path) -> None:
    from paceline.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    newest = checkpoints.newest()
    assert newest is not None
    names = sorted(path.name for path in newest.iterdir() if path.is_file())
    name = names[random.randint(0, len(names) - 1)]
    data = (folder / "whole" / name).read_bytes()
    is_text = name.endswith(".json")
    damaged = mutations.damaged_json(random, data.decode()) if is_text else _tensors(random, data)
    (newest / name).write_bytes(damaged)
    try:
        checkpoints.load(newest)
    finally:
        shutil.copyfile(folder / "whole" / name, newest / name)


def _tensors(random: Random, data: bytes) -> bytes:
    """Safetensors: its length, its header (which is JSON), or any of its bytes."""
    if random.randint(0, 1):
        return mutations.damaged_bytes(random, data)
    length = int.from_bytes(data[:8], "little")
    header = mutations.damaged_json(random, data[8 : 8 + length].decode())
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _prepare_weights(folder: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    save_file(module.state_dict(), folder / "whole.safetensors")
    torch.save(module.state_dict(), folder / "whole.pt")
    torch.save(module.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)


def _read_weights(random: Random, folder: Path) -> None:
    from paceline.models.weights import load_weights

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    name = random.choice(("whole.safetensors", "whole.pt", "old.pt"))
    data = (folder / name).read_bytes()
    path = folder / f"damaged-{name}"
    is_plain = name.endswith(".safetensors")
    path.write_bytes(_tensors(random, data) if is_plain else mutations.damaged_bytes(random, data))
    with contextlib.suppress(ModelError):
        load_weights(module, path, replace_head=bool(random.randint(0, 1)))


def _read_idx(random: Random, folder: Path) -> None:
    from paceline.data import mnist

    images = struct.pack(">IIII", mnist.IMAGES_MAGIC, 3, 4, 5) + bytes(range(60))
    labels = struct.pack(">II", mnist.LABELS_MAGIC, 3) + bytes((1, 2, 9))
    path = folder / "idx"
    for data, read in ((images, mnist.IMAGES_MAGIC), (labels, None)):
        damaged = mutations.damaged_bytes(random, data)
        if random.randint(0, 1):
            damaged = gzip.compress(damaged, 1)
        if random.randint(0, 1):
            damaged = mutations.damaged_bytes(random, damaged)
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            mnist.read_idx(path, read) if read else mnist.read_labels(path)


def _prepare_cifar(folder: Path) -> None:
    from paceline.data.cifar10 import RECORD, TEST_FILES, TRAIN_FILES

    with tarfile.open(folder / "whole.tar.gz", "w:gz", compresslevel=1) as archive:
        for name in TRAIN_FILES + TEST_FILES:
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = 2 * RECORD
            archive.addfile(entry, io.BytesIO(bytes(2 * RECORD)))


def _read_cifar(random: Random, folder: Path) -> None:
    from paceline.data.cifar10 import parse_records, read_archive

    with contextlib.suppress(DataError):
        parse_records(mutations.damaged_bytes(random, bytes(2 * 3073)), "a file")
    data = (folder / "whole.tar.gz").read_bytes()
    if random.randint(0, 1):
        data = gzip.compress(mutations.damaged_bytes(random, gzip.decompress(data)), 1)
    else:
        data = mutations.damaged_bytes(random, data)
    path = folder / "damaged.tar.gz"
    path.write_bytes(data)
    read_archive(path)


def _prepare_images(folder: Path) -> None:
    picture = Image.effect_noise((PLAIN["width"] // 8, 24), 60).convert("RGB")
    for form in ("jpeg", "png", "gif", "bmp", "webp", "tiff"):
        with contextlib.suppress(OSError, KeyError):
            picture.save(folder / f"whole.{form}")


def _read_image(random: Random, folder: Path) -> None:
    from paceline.data.images import ImageDamagedError, decode_image, quick_check

    names = sorted(folder.glob("whole.*"))
    data = names[random.randint(0, len(names) - 1)].read_bytes()
    damaged = mutations.damaged_bytes(random, data)
    path = folder / "damaged.jpeg"
    path.write_bytes(damaged)
    quick_check(path)
    with contextlib.suppress(ImageDamagedError):
        decode_image(damaged, 16, random.choice((1, 3)))


def _read_cache(random: Random, folder: Path) -> None:
    from paceline.data.arrays import cached_array
    from paceline.data.cache import ImageCache

    pixels = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    shutil.rmtree(folder / "images", ignore_errors=True)
    ImageCache(folder / "images", 2, (3, 4, 4)).write(0, pixels)
    name = random.choice(("images.bin", "sums.bin"))
    file = folder / "images" / name
    file.write_bytes(mutations.damaged_bytes(random, file.read_bytes()))
    found = ImageCache(folder / "images", 2, (3, 4, 4))
    for row in (0, 1):
        image = found.read(row)
        if image is not None and not (image == (pixels if row == 0 else 0)).all():
            raise FaultError("damaged pixels passed their checksum")
    source = folder / "source"
    source.write_text("source")
    cached_array(folder, [source], "x", lambda: pixels)
    kept = next((folder / "arrays").glob("*.npy"))
    kept.write_bytes(mutations.damaged_bytes(random, kept.read_bytes()))
    again = cached_array(folder, [source], "x", lambda: pixels)
    kept.unlink()
    if not np.array_equal(again, pixels):
        raise FaultError("a damaged array was taken for whole")


def targets() -> list[Target]:
    """All of them."""
    from caches import caches
    from doors import messages
    from pages import pages
    from programs import programs

    from paceline.schema.calibration import Calibration
    from paceline.schema.version import Serving

    whole_race = Race(
        batch_size=16,
        candidates=(
            _candidate("sequential", 100.0, chosen=False),
            _candidate("threads 2", 150.0, chosen=True),
        ),
    )
    calibrated = Calibration(factors={"allreduce": 1.2}, runs={"allreduce": 4})
    machines = measured_machines(host("a"), host("b"))
    return [
        Target("config.toml", nothing, _toml(SETTINGS, _read_config)),
        Target("--set", nothing, _set),
        Target("hosts.toml", nothing, _toml(HOSTS, lambda path: load_hosts(path).places)),
        Target("--hosts", nothing, _host_names),
        Target("lab.toml", nothing, _toml(LAB, _read_lab)),
        Target("experiment.toml", nothing, _toml(EXPERIMENT, _read_experiment)),
        Target("plan.json", *_json_file(Plan(), _read_plan)),
        Target("race.json", *_json_file(whole_race, _read_race)),
        Target("machines.json: plan", *_json_file(machines, _read_machines)),
        Target("machines.json: forecast", *_json_file(machines, _predict)),
        Target("calibration.json", *_json_file(calibrated, _read_calibration)),
        Target("version.json", *_json_file(_version(), _read_version)),
        Target("serving.json", *_json_file(Serving(labels={"stable": 2}), _read_serving)),
        Target(":predict", nothing, _request("tensorflow_request", {"instances": [ROW, ROW]})),
        Target(":predict b64", nothing, _request("tensorflow_request", {"inputs": {"b64": "aa"}})),
        Target(":classify", nothing, _request("classify_request", {"examples": [{"input": ROW}]})),
        Target(
            "/infer", nothing, _request("v2", {"id": "a", "inputs": [TENSOR], "outputs": [OUTPUT]})
        ),
        Target("metrics.jsonl", _prepare_run, _read_metrics),
        Target("run: report", _prepare_run, _damaged_run("report", "FOLDER/runs/one", "--json")),
        Target(
            "run: page",
            _prepare_run,
            _damaged_run("report", "FOLDER/runs/one", "--tables", "FOLDER/tables"),
        ),
        Target(
            "run: several",
            _prepare_run,
            _damaged_run("report", "FOLDER/runs/one", "FOLDER/runs/two", "--json"),
        ),
        Target("run: runs", _prepare_run, _damaged_run("runs", "FOLDER/runs")),
        Target("run: runs --json", _prepare_run, _damaged_run("runs", "FOLDER/runs", "--json")),
        Target(
            "run: compare",
            _prepare_run,
            _damaged_run("compare", "FOLDER/runs/one", "FOLDER/runs/two"),
        ),
        Target(
            "run: compare --json",
            _prepare_run,
            _damaged_run("compare", "FOLDER/runs/one", "FOLDER/runs/two", "--json"),
        ),
        Target("run: trace", _prepare_run, _damaged_run("trace", "FOLDER/runs/one")),
        Target(
            "run: audit",
            _prepare_run,
            _damaged_run("audit", "FOLDER/runs/one", "FOLDER/runs/two", "--only-look"),
        ),
        Target("checkpoint", _prepare_checkpoint, _read_checkpoint),
        Target("weights", _prepare_weights, _read_weights),
        Target("idx", nothing, _read_idx),
        Target("cifar10", _prepare_cifar, _read_cifar),
        Target("image", _prepare_images, _read_image),
        Target("cache of data", nothing, _read_cache),
        *caches(),
        *messages(),
        *programs(),
        *pages(),
    ]


def _candidate(name: str, speed: float, *, chosen: bool) -> Any:
    from paceline.schema import Candidate, NodePlan

    return Candidate(
        name=name,
        node=NodePlan(strategy=name.split()[0], threads=2),
        images_per_second=speed,
        low=speed * 0.9,
        high=speed * 1.1,
        chosen=chosen,
    )
