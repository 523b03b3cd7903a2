"""Requests per second and latencies of `paceline serve`, beside other servers.

    python -m benchmarks.serving --models DIR --environments DIR --output FILE
        [--only mnist_cnn] [--way paceline --way fastapi] [--rounds 3] [--seconds 5]
    python -m benchmarks.serving --show FILE

The same exported ONNX model behind every server, the same body to each, and the same answer, which
is checked before anything is timed (benchmarks/peers/serving.py). `hey` asks from 1 and from 16
connections and shares the machine with the server. All servers of a model are started once and
take turns of a few seconds, so that what else the machine does meets all of them; whoever has no
turn is not asked. With 3 rounds the turns take 6 minutes; with all starts, 12.6 were seen on a
machine at load 30 to 45. DIR of --environments holds `venv-litserve`, `venv-bentoml` and
`venv-fastapi`, each made with `pip install NAME onnxruntime numpy pillow 'uvicorn[standard]'`;
those that are missing are left out. DIR of --models is filled when it is empty. Figures are added
to FILE's.

"tensor" sends Paceline the same sample as 4-byte numbers behind the JSON of the Open Inference
Protocol; "loop" is onnxruntime alone, on the batch that this made of 16 connections.

Bars: at least twice the best other server for mnist_cnn at 16 connections, never below the best;
"tensor" at least 80% of "loop" for AlexNet.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
CONNECTIONS = (1, 16)
TWICE, LOOP = 2.0, 0.8
"""The bars: times the best other for mnist_cnn, and part of onnxruntime alone for AlexNet."""
START_SECONDS = 120.0
"""Only to end a hang: a server must answer."""
TOLERANCE = 1e-3
"""Of the largest output: decoders of photographs may differ in the last bit of a pixel."""


@dataclass(frozen=True)
class Work:
    """A model, and the little training that its weights come from."""

    config: str
    limit: int
    size: int
    channels: int = 1

    @property
    def photograph(self) -> bool:
        return self.channels == 3


WORKS = {
    "mnist_cnn": Work("mnist", 256, 28),
    "resnet18": Work("resnet18", 128, 28),
    "alexnet": Work("fire", 32, 224, channels=3),
}


@dataclass(frozen=True)
class Way:
    """How a model is served."""

    environment: str | None = None
    """None: Paceline's own."""
    words: tuple[str, ...] = ()
    workers: int | None = None
    """None: one for each core."""


CORES = len(os.sched_getaffinity(0))
_PEER = "benchmarks.peers.serving_"
WAYS = {
    "paceline": Way(),
    "tensor": Way(),
    "litserve": Way("litserve", ("python", "-m", f"{_PEER}litserve")),
    "bentoml": Way("bentoml", ("bentoml", "serve", f"{_PEER}bentoml:Classifier")),
    "fastapi": Way("fastapi", ("python", "-m", f"{_PEER}fastapi")),
    "fastapi, one worker": Way("fastapi", ("python", "-m", f"{_PEER}fastapi"), workers=1),
    "loop": Way(),
}
OTHERS = tuple(name for name, way in WAYS.items() if way.environment)


@dataclass(frozen=True)
class Question:
    """One request and its right answer."""

    body: Path
    headers: Mapping[str, str]
    expected: np.ndarray


@dataclass
class Seen:
    """One round of one server: requests per second and milliseconds, by connections."""

    rate: dict[str, float] = field(default_factory=dict)
    p50: dict[str, float] = field(default_factory=dict)
    p99: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    """Milliseconds of processor time of the server per request: what other programs on the machine
    change least."""
    batch: float = 0.0
    """Samples of a mean batch at the most connections, where the server tells."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("/tmp/serving-models"))
    parser.add_argument("--environments", type=Path, default=Path("/tmp/serving-environments"))
    parser.add_argument("--only", action="append", choices=WORKS, help="may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS, help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="add the figures to this JSON")
    parser.add_argument("--prepare", action="store_true", help="only make the models")
    parser.add_argument("--show", type=Path, help="only print the figures of this JSON")
    options = parser.parse_args()
    if options.show:
        show(json.loads(options.show.read_text()))
        return
    for name in options.only or WORKS:
        prepare(name, options.models)
    if options.prepare:
        return
    # `timeout` must leave no server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ways = there(options.way or list(WAYS), options.environments)
    found: dict[str, Any] = {}
    if options.output and options.output.exists():
        found = json.loads(options.output.read_text())
    for name in options.only or WORKS:
        measure(name, ways, options, found)
    show(found)


def there(ways: Sequence[str], environments: Path) -> list[str]:
    """The ways that are installed."""
    found = []
    for name in ways:
        environment = WAYS[name].environment
        if environment is None or (environments / f"venv-{environment}").is_dir():
            found.append(name)
        else:
            print(f"{name} is left out: there is no {environments}/venv-{environment}")
    return found


def prepare(name: str, models: Path) -> None:
    """Train a little and export, with the commands that users have."""
    to = models / name / name
    if (to / "1").is_dir():
        return
    work, run = WORKS[name], models / name / "run"
    shutil.rmtree(run, ignore_errors=True)
    words = ["train", str(ROOT / "examples" / f"{work.config}.toml"), "--run", str(run)]
    settings = (f"data.limit={work.limit}", "train.epochs=1", "local.strategy=sequential")
    words += [word for setting in settings for word in ("--set", setting)]
    for line_ in (words, ["export", str(run), "--to", str(to)]):
        subprocess.run([sys.executable, "-m", "paceline", *line_], check=True, cwd=ROOT)
    shutil.rmtree(run)


def question(name: str, way: str, models: Path) -> Question:
    """The same sample for every way; the answer is onnxruntime's own."""
    work, folder = WORKS[name], models / name
    generator = np.random.default_rng(0)
    if work.photograph:
        from PIL import Image

        small = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((work.size, work.size), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        picture.save(file, "jpeg", quality=90)
        from benchmarks.peers import serving

        text = base64.b64encode(file.getvalue()).decode()
        sample, asked = serving.read_picture(text)[None], [{"b64": text}]
    else:
        sample = generator.standard_normal((1, work.channels, work.size, work.size), np.float32)
        sample = sample.round(4)  # as people write numbers
        asked = [[[[float(f"{x:.4f}") for x in row] for row in rows] for rows in sample[0]]]
    (result,) = session(model_file(name, models), CORES).run(None, {"input": sample})
    headers = {"Content-Type": "application/json"}
    if way != "tensor":
        body = folder / "body.json"
        body.write_text(json.dumps({"instances": asked}))
        return Question(body, headers, np.asarray(result))
    data = np.ascontiguousarray(sample).tobytes()
    tensor = {"name": "input", "datatype": "FP32", "shape": list(sample.shape)}
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor]}).encode()
    body = folder / "body.bin"
    body.write_bytes(head + data)
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Question(body, headers, np.asarray(result))


def model_file(name: str, models: Path) -> Path:
    return models / name / name / "1" / "model.onnx"


def session(file: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def measure(
    name: str, ways: Sequence[str], options: argparse.Namespace, found: dict[str, Any]
) -> None:
    """All rounds of one model, added to `found` as they end."""
    rounds = found.setdefault(name, {way: [] for way in ways})
    with contextlib.ExitStack() as stack:
        servers = start(name, ways, options, stack)
        for server in servers.values():
            check(server.address, server.asked)
            hey(server.address, server.asked, max(CONNECTIONS), 2)
        for number in range(options.rounds):
            for way in ways:
                if way in servers:
                    seen = turn(servers[way], options.seconds)
                elif rounds.get("tensor"):
                    batch = round(rounds["tensor"][-1]["batch"])
                    seen = loop(model_file(name, options.models), batch, options.seconds)
                else:
                    continue
                rounds.setdefault(way, []).append(vars(seen))
                print(f"  {name}, round {number + 1}/{options.rounds}, {way}: {line(seen)}")
            sys.stdout.flush()
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n")


@dataclass(frozen=True)
class Server:
    """One that runs, and how it is asked."""

    address: str
    asked: Question
    process: int
    """The first of its processes."""
    tells_batches: bool


def turn(server: Server, seconds: int) -> Seen:
    """One round of one way."""
    seen = Seen()
    for connections in CONNECTIONS:
        key, before, spent = str(connections), batches_told(server), spent_by(server.process)
        seen.rate[key], seen.p50[key], seen.p99[key], count = hey(
            server.address, server.asked, connections, seconds
        )
        seen.processor[key] = (spent_by(server.process) - spent) * 1000 / count
        seen.batch = mean_batch(before, batches_told(server))
    return seen


def start(
    name: str, ways: Sequence[str], options: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Server]:
    """The servers of one model: Paceline, which measures the cores, before the others."""
    found: dict[str, Server] = {}
    own = [way for way in ("paceline", "tensor") if way in ways]
    if own:
        base, process, log = stack.enter_context(running(name, "paceline", options))
        until_ready(f"{base}/v2/health/ready", process, log)
        for way in own:
            path = f"/v2/models/{name}/infer" if way == "tensor" else f"/v1/models/{name}:predict"
            asked = question(name, way, options.models)
            found[way] = Server(base + path, asked, process.pid, tells_batches=True)
    others = {
        way: stack.enter_context(running(name, way, options)) for way in ways if way in OTHERS
    }
    for way, (base, process, log) in others.items():
        is_bentoml = WAYS[way].environment == "bentoml"
        until_ready(base + ("/readyz" if is_bentoml else "/health"), process, log)
        path = "/photographs" if is_bentoml and WORKS[name].photograph else "/predict"
        asked = question(name, way, options.models)
        found[way] = Server(base + path, asked, process.pid, tells_batches=False)
    return found


@contextlib.contextmanager
def running(
    name: str, way: str, options: argparse.Namespace
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """A server in new processes, which may not answer yet: its address, the first, its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one, folder = WAYS[way], options.models / name
    environment = dict(os.environ)
    if one.environment is None:
        words = [sys.executable, "-m", "paceline", "serve", str(folder), "--port", str(port)]
    else:
        workers = one.workers or CORES
        words = list(one.words)
        words[0] = str((options.environments / f"venv-{one.environment}/bin/{words[0]}").absolute())
        if one.environment == "bentoml":
            words += ["--port", str(port), "--host", "127.0.0.1"]
        file = model_file(name, options.models).absolute()
        environment |= {"MODEL": str(file), "PORT": str(port), "WORKERS": str(workers)}
        environment |= {"THREADS": str(CORES // workers), "PYTHONPATH": str(ROOT)}
    log = folder / f"{way.replace(', ', '-').replace(' ', '-')}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", process, log
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spent_by(first: int) -> float:
    """Seconds of processor time of a process and all that it has started."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            ticks[process] = int(fields[11]) + int(fields[12])

    def belongs(process: int) -> bool:
        while process not in (first, 0):
            process = parents.get(process, 0)
        return process == first

    return sum(ticks[one] for one in parents if belongs(one)) / os.sysconf("SC_CLK_TCK")


def until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
            if answer.status == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{' '.join(map(str, process.args))} does not answer:\n"  # type: ignore[arg-type]
                             f"{log.read_text()}")  # fmt: skip
        time.sleep(0.2)


def check(address: str, asked: Question) -> None:
    """The answer must be right before it is timed."""
    request = urllib.request.Request(address, asked.body.read_bytes(), dict(asked.headers))
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.loads(answer.read())
    if isinstance(told, dict):
        told = told["outputs"][0]["data"] if "outputs" in told else told["predictions"]
    found = np.asarray(told, np.float64).reshape(asked.expected.shape)
    apart = np.abs(found - asked.expected).max() / np.abs(asked.expected).max()
    if not apart <= TOLERANCE:
        raise SystemExit(f"{address} answers {found}, not {asked.expected}")


def hey(
    address: str, asked: Question, connections: int, seconds: int
) -> tuple[float, float, float, int]:
    """Requests per second, milliseconds of half and of 99% of them, and their number."""
    words = ["hey", "-z", f"{seconds}s", "-c", str(connections), "-t", "60", "-m", "POST"]
    words += ["-D", str(asked.body), "-T", asked.headers["Content-Type"], "-o", "csv"]
    for key, value in asked.headers.items():
        words += ["-H", f"{key}: {value}"]
    done = subprocess.run([*words, address], capture_output=True, text=True, check=True)
    times, ends = [], []
    for row in done.stdout.splitlines()[1:]:
        cells = row.split(",")
        if cells[6] != "200":
            raise SystemExit(f"{address} answered {cells[6]}")
        times.append(float(cells[0]))
        ends.append(float(cells[7]) + times[-1])
    if not times:
        raise SystemExit(f"{address} answered nothing:\n{done.stdout}{done.stderr}")
    times.sort()
    most = times[min(len(times) - 1, int(len(times) * 0.99))]
    return len(times) / max(ends), times[len(times) // 2] * 1000, most * 1000, len(times)


def batches_told(server: Server) -> dict[int, int]:
    """How many batches of each size Paceline has computed."""
    if not server.tells_batches:
        return {}
    metrics = re.sub(r"/v\d/.*", "/metrics", server.address)
    with urllib.request.urlopen(metrics, timeout=30) as answer:
        text = answer.read().decode()
    pattern = r'^paceline_batches_total\{.*size="(\d+)"\} (\d+)$'
    return {int(size): int(count) for size, count in re.findall(pattern, text, re.MULTILINE)}


def mean_batch(before: Mapping[int, int], after: Mapping[int, int]) -> float:
    """Of the batches between two looks, that in which the average sample was."""
    new = {size: count - before.get(size, 0) for size, count in after.items()}
    samples = sum(size * count for size, count in new.items())
    return sum(size * size * count for size, count in new.items()) / samples if samples else 0.0


def loop(file: Path, batch: int, seconds: int) -> Seen:
    """onnxruntime alone in a new process, nothing between two batches."""
    call = f"run_loop({str(file)!r}, {batch}, {seconds})"
    words = [sys.executable, "-c", f"from benchmarks.serving import run_loop; {call}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    rate, processor = map(float, done.stdout.split())
    many = str(max(CONNECTIONS))
    return Seen(rate={many: rate}, processor={many: processor}, batch=float(batch))


def run_loop(file: str, batch: int, seconds: int) -> None:
    """Prints samples per second, and milliseconds of processor time of each."""
    alone = session(Path(file), CORES)
    shape = (batch, *alone.get_inputs()[0].shape[1:])
    inputs = np.random.default_rng(0).standard_normal(shape, np.float32)
    for _ in range(3):
        alone.run(None, {"input": inputs})
    start, spent, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < start + seconds:
        alone.run(None, {"input": inputs})
        count += batch
    spent = time.process_time() - spent
    print(count / (time.perf_counter() - start), spent * 1000 / count)


def line(seen: Seen) -> str:
    parts = []
    for connections, rate in seen.rate.items():
        told = f"{connections}: {rate:,.0f}/s"
        if connections in seen.p99:
            told += (
                f", p50 {seen.p50[connections]:.1f} ms, p99 {seen.p99[connections]:.1f} ms,"
                f" {seen.processor[connections]:.2f} ms of the processor"
            )
        parts.append(told)
    return "; ".join(parts) + (f"; batches of {seen.batch:.1f}" if seen.batch else "")


def show(found: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> None:
    """Medians with their spread, and the bars."""
    for name, ways in found.items():
        print(f"\n{name}\n")
        print(
            "| | 1: requests/s | p99 ms | 16: requests/s | spread | p99 ms | processor ms each |"
            " batch |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for way, rounds in ways.items():
            if rounds:
                print(table_row(way, rounds))
        for sentence in bars(name, ways):
            print(sentence)


def table_row(way: str, rounds: Sequence[Mapping[str, Any]]) -> str:
    def median(key: str, connections: str) -> float | None:
        values = [one[key][connections] for one in rounds if connections in one[key]]
        return statistics.median(values) if values else None

    def cell(value: float | None, digits: int = 0) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    few, many = map(str, CONNECTIONS)
    rates = [one["rate"][many] for one in rounds]
    small = statistics.median(rates) < 100
    batch = statistics.median(one["batch"] for one in rounds)
    return (
        f"| {way} | {cell(median('rate', few), int(small))} | {cell(median('p99', few), 1)} |"
        f" {cell(median('rate', many), int(small))} |"
        f" {(max(rates) - min(rates)) / statistics.median(rates):.0%} |"
        f" {cell(median('p99', many), 1)} | {cell(median('processor', many), 2)} |"
        f" {f'{batch:.1f}' if batch else ''} |"
    )


def bars(name: str, ways: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Ratios of medians, and whether they hold at the most connections."""
    few, many = map(str, CONNECTIONS)

    def median(way: str, key: str = "rate", connections: str = many) -> float:
        return statistics.median(one[key][connections] for one in ways[way])

    rate = median
    others = [way for way in OTHERS if ways.get(way)]
    if others and ways.get("paceline"):
        best = max(others, key=rate)
        bar, ratio = (TWICE if name == "mnist_cnn" else 1.0), rate("paceline") / rate(best)
        held = "held" if ratio >= bar else "MISSED"
        yield f"{ratio:.2f} times the best other ({best}); bar {bar:g}: {held}"
        least = min(others, key=lambda way: median(way, "processor"))
        spent = median("paceline", "processor") / median(least, "processor")
        yield f"{spent:.2f} of the processor time of the one that takes least ({least})"
        best = max(others, key=lambda way: median(way, connections=few))
        alone = median("paceline", connections=few) / median(best, connections=few)
        yield f"from {few} connection {alone:.2f} times the best other ({best})"
    if ways.get("tensor") and ways.get("loop"):
        ratio = rate("tensor") / rate("loop")
        held = (
            ""
            if name != "alexnet"
            else f"; bar {LOOP:.0%}: {'held' if ratio >= LOOP else 'MISSED'}"
        )
        yield f"{ratio:.0%} of onnxruntime alone on the same batch{held}"


if __name__ == "__main__":
    main()
