"""The experiment `shi`: its networks, its steps, and what is read out of what they leave."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import models
from paceline.data.arrays import ArraySource
from paceline.errors import ModelError
from paceline.schema.events import (
    End,
    Event,
    Exchanged,
    InterfaceTraffic,
    Sample,
    Span,
    Start,
    encode_line,
)
from studies.outcome import Outcomes, load_outcomes
from studies.page import find_findings, write_experiment
from studies.running import check
from studies.shi.findings import findings, ring_part
from studies.shi.lost import follow
from studies.shi.measures import measure
from studies.spec import Experiment, find_experiment, load_experiment

GRADIENT = 4_000_000
PARAMETERS = GRADIENT // 4


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Experiment:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    return load_experiment(find_experiment("shi"))


def networks() -> dict[str, dict[str, Any]]:
    steps = load_experiment(find_experiment("shi")).steps
    return {
        step.settings["workload.model"]: step.settings["workload.model_options"]
        for step in steps
        if step.facts.get("kind") == "alone"
    }


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alexnet", 28_711_754),
        ("vgg16", 33_638_218),
        ("vgg19", 38_947_914),
        ("resnet50", 23_528_522),
        ("resnet152", 58_164_298),
    ],
)
def test_networks_take_32x32_and_keep_their_parameter_names(name: str, parameters: int) -> None:
    options = networks()[name]
    with torch.device("meta"):  # shapes are enough, and cost neither memory nor time
        small = models.build(name, classes=10, channels=3, options=options, image_size=32)
        usual = models.build(name, classes=1000, channels=3)
    assert list(small.state_dict()) == list(usual.state_dict())
    assert sum(each.numel() for each in small.parameters()) == parameters
    assert small.eval()(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 10)


def test_small_alexnet_learns() -> None:
    torch.manual_seed(0)
    network = models.build(
        "alexnet", classes=10, channels=3, options=networks()["alexnet"], image_size=32
    )
    outputs = network(torch.randn(4, 3, 32, 32))
    torch.nn.functional.cross_entropy(outputs, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None and each.grad.any() for each in network.parameters())


def test_alexnet_says_how_to_take_small_images() -> None:
    with pytest.raises(ModelError, match=r"at least 63.*stem = 'small'"):
        models.build("alexnet", classes=10, channels=3, image_size=32)
    with pytest.raises(ModelError, match="pool = 0: must be a whole number"):
        models.build("vgg16", classes=10, channels=3, options={"pool": 0})


def test_steps_fit_on_two_cores_and_cover_the_study(experiment: Experiment) -> None:
    check(experiment)
    quick = load_experiment(experiment.folder, quick=True)
    check(quick)
    assert all(step.cores <= 2.0 for step in experiment.steps)
    assert sum(step.seconds for step in experiment.steps) <= 120 * 60
    assert sum(step.seconds for step in quick.steps) <= 10 * 60
    wanted = {(model, n) for model in networks() for n in (2, 4, 6)}
    for kind in ("ring", "server"):
        steps = [step for step in experiment.steps if step.facts.get("kind") == kind]
        assert wanted <= {(s.facts.get("model"), s.facts["workers"]) for s in steps}
    for step in experiment.steps:
        servers = [host for host in step.hosts if isinstance(host, dict)]
        assert len(step.hosts) - len(servers) == step.facts["workers"]
        kinds = (step.settings.get("exchange.kind"), step.variant)
        served = "parameter_server" in kinds or "server" in kinds
        assert [host["role"] for host in servers] == (["server"] if served else [])


def test_made_pictures_only_where_cifar10_is_not_at_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    made = load_experiment(find_experiment("shi")).steps[0]
    assert made.settings["workload.data"] == "synthetic"
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(b"\0" * 3073)
    real = load_experiment(find_experiment("shi")).steps[0]
    assert real.settings["workload.data"] == "cifar10"
    assert real.fingerprint != made.fingerprint


def test_a_batch_of_cifar10_copies_nothing_but_itself() -> None:
    records = np.zeros((5000, 3073), dtype=np.uint8)  # a label before the pixels of each picture
    records[7, 1] = 255
    pixels = records[:, 1:].reshape(-1, 3, 32, 32)
    source = ArraySource(pixels, records[:, 0], mean=(0.0,) * 3, deviation=(1.0,) * 3)
    source.fetch(np.array([0]), epoch=0, augment=False)
    tracemalloc.start()
    try:
        images, _ = source.fetch(np.array([7, 3]), epoch=0, augment=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert images[0, 0, 0, 0] == pytest.approx(1.0)
    assert images.sum() == pytest.approx(1.0)
    assert peak < 500_000


def network(sent: float, received: float) -> dict[str, InterfaceTraffic]:
    """Counters of an interface; packets of 1,000 bytes."""
    bytes_sent, bytes_received = int(sent), int(received)
    return {
        "eth0": InterfaceTraffic(
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            packets_sent=bytes_sent // 1000,
            packets_received=bytes_received // 1000,
        )
    }


def rank_events(rank: int, host: str, sent: float, received: float) -> list[Event]:
    """Three updates of two seconds from second 10 on; traffic before and after does not count."""
    events: list[Event] = [
        Start(rank=rank, node=rank, host=host, pid=1, time=1.0, began=0.0, world_size=3),
        Span(name="exchange", start=8.0, seconds=1.0, detail="first weights"),
        Exchanged(time=9.0, bytes_received=7_000_000, messages_received=1),
    ]
    first = 7e6
    counters = [(5.0, 0.0), (9.5, 0.0), (10.1, 0.0), (11.0, 0.5), (12.5, 1.0), (14.5, 2.0)]
    counters += [(16.1, 2.9), (17.0, 3.0), (18.5, 3.0)]
    for time, done in counters:
        events.append(
            Sample(
                time=time, cpu=0.14, busy=0.5, idle=0.5, iowait=0.0, resident=1, threads=1,
                network=network(first + done * sent, first + done * received),
            )
        )  # fmt: skip
    for update in range(3):
        begin = 10.0 + 2 * update
        events.append(Span(name="compute", start=begin, seconds=2.0, update=update))
        events.append(
            Exchanged(
                time=begin + 2,
                update=update,
                bytes_sent=int(sent),
                bytes_received=int(received),
                messages_sent=1,
                messages_received=1,
            )
        )
    events.append(Span(name="evaluate", start=16.2, seconds=2.8, update=2))
    late = network(first + 5e8, first + 5e8)  # the checkpoint
    events.append(
        Sample(
            time=19.5, cpu=0.1, busy=0.5, idle=0.5, iowait=0, resident=1, threads=1, network=late
        )
    )
    return [*events, End(time=20.0)]


def leave(
    experiment: Experiment, out: Path, name: str, sent: float, received: float, **more: Any
) -> None:
    """What a step would have left whose workers moved so many bytes per update."""
    step, folder = experiment.step(name), out / "steps" / name
    run = folder / "run"
    run.mkdir(parents=True)
    workers = int(step.facts["workers"])
    hosts = {"abcdef"[rank]: {"cores": 0.28, "bytes_sent": 10 * sent} for rank in range(workers)}
    if step.settings.get("exchange.kind") == "parameter_server":
        server = {"cores": 0.28, "bytes_received": workers * 10 * sent, "cpu_seconds": 2.8}
        hosts["server"] = server
    for rank, host in enumerate(list(hosts)[:workers]):
        (run / f"rank-{rank}").mkdir()
        lines = [encode_line(each) for each in rank_events(rank, host, sent, received)]
        (run / f"rank-{rank}" / "events.jsonl").write_text("".join(lines))
    (run / "config.toml").write_text(f"[workload]\nbatch_size = {32 * workers}\n")
    (run / "run.json").write_text(json.dumps({"parameters": PARAMETERS, "finished": True}))
    epochs = [{"epoch": 1, "train_loss": 2.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    record = {"fingerprint": step.fingerprint, "seconds": 20.0, "failed": "", "hosts": hosts}
    (folder / "step.json").write_text(json.dumps(record | more))


def outcomes_of(experiment: Experiment, out: Path) -> Outcomes:
    return load_outcomes(experiment, out)


def test_traffic_is_that_of_the_updates_alone(experiment: Experiment, tmp_path: Path) -> None:
    leave(experiment, tmp_path, "alexnet-ring-4", 1.5 * GRADIENT, 1.5 * GRADIENT)
    outcome = outcomes_of(experiment, tmp_path).one(model="alexnet", kind="ring", workers=4)
    assert outcome is not None
    found = measure(outcome)
    assert found.worker is not None
    assert found.worker.bytes_sent == pytest.approx(1.5 * GRADIENT)
    assert found.worker.packets_received == pytest.approx(1.5 * GRADIENT / 1000)
    assert found.counted is not None
    assert found.counted.bytes_sent == pytest.approx(1.5 * GRADIENT)
    assert found.cpu == pytest.approx(0.5)
    assert found.speed == pytest.approx(4 * 32 / 2)


def test_a_server_moves_what_its_workers_move(experiment: Experiment, tmp_path: Path) -> None:
    leave(experiment, tmp_path, "alexnet-server-4", GRADIENT, 1.01 * GRADIENT)
    outcome = outcomes_of(experiment, tmp_path).one(model="alexnet", kind="server", workers=4)
    assert outcome is not None
    found = measure(outcome)
    assert found.server is not None
    assert found.server.bytes_received == pytest.approx(4 * GRADIENT)
    assert found.server.bytes_sent == pytest.approx(4 * 1.01 * GRADIENT)
    assert found.agreement == pytest.approx(1.0)
    assert found.server_cpu == pytest.approx(0.5)


def verdicts(experiment: Experiment, out: Path) -> dict[str, str]:
    return {each.claim: each.verdict for each in findings(outcomes_of(experiment, out)).claims}


@pytest.mark.parametrize(("excess", "verdict"), [(1.01, "holds"), (1.04, "does not hold")])
def test_counts_decide_about_the_claims(
    experiment: Experiment, tmp_path: Path, excess: float, verdict: str
) -> None:
    for workers in (2, 4, 6):
        moved = excess * ring_part(workers) * GRADIENT
        leave(experiment, tmp_path, f"alexnet-ring-{workers}", moved, moved)
        moved = excess * GRADIENT
        leave(experiment, tmp_path, f"alexnet-server-{workers}", moved, moved)
    leave(experiment, tmp_path, "alexnet-alone", 0, 0)
    found = verdicts(experiment, tmp_path)
    assert found["The ring's traffic per node stays flat: 2 (N-1)/N of the gradient."] == verdict
    assert found["The server's traffic grows with the workers."] == verdict
    # Every step here takes as long as one worker alone: linear, and nothing levels off.
    assert found["With ring all-reduce the speed stays near linear."] == "holds"
    claim = "With a parameter server the speed levels off as workers are added."
    assert found[claim] == "does not hold"


def test_nothing_is_claimed_before_anything_ran(experiment: Experiment, tmp_path: Path) -> None:
    assert set(verdicts(experiment, tmp_path).values()) == {"cannot be tested here"}
    written = write_experiment(outcomes_of(experiment, tmp_path), tmp_path)
    assert written.figures == 0
    assert "AlexNet" in (tmp_path / "report.md").read_text()
    assert find_findings(experiment) is findings


def test_who_died_and_what_became_of_it(experiment: Experiment, tmp_path: Path) -> None:
    leave(experiment, tmp_path, "lost-sync", GRADIENT, GRADIENT)
    folder = tmp_path / "steps" / "lost-sync" / "run"
    news = ["worker 3 on d was lost at update 1; going on with 3 workers"]
    (folder / "staleness.json").write_text(json.dumps({"workers": news}))
    course = follow(outcomes_of(experiment, tmp_path).where(about="lost")[0])
    assert [(loss.host, loss.update, loss.left) for loss in course.losses] == [("d", 1, 3)]
    assert course.losses[0].seconds == pytest.approx(10.0)  # all of its workers end at second 20
    assert course.finished
    claim = "Asked by the study: does training with a parameter server go on when workers die?"
    assert verdicts(experiment, tmp_path)[claim] == "holds"
    (folder / "run.json").write_text(json.dumps({"finished": False}))
    assert verdicts(experiment, tmp_path)[claim] == "does not hold"


def test_the_page_has_the_studys_table_and_every_figure(
    experiment: Experiment, tmp_path: Path
) -> None:
    for workers in (2, 4):
        moved = ring_part(workers) * GRADIENT
        leave(experiment, tmp_path, f"alexnet-ring-{workers}", moved, moved)
        leave(experiment, tmp_path, f"alexnet-server-{workers}", GRADIENT, GRADIENT)
    leave(experiment, tmp_path, "alexnet-alone", 0, 0)
    written = write_experiment(outcomes_of(experiment, tmp_path), tmp_path)
    assert written.figures >= 5
    text = (tmp_path / "report.md").read_text()
    assert "| AlexNet | 233 | 57.0 | 80.3 | 0.7 | 1,000,000 | 4.0 |" in text
    assert "| AlexNet | parameter server | 4 | server | 16.0 | 16.0 |" in text
    assert "made pictures" in text
