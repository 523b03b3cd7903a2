"""AlexNet on two emulated one-core hosts: split by feature against stock DDP over Gloo.

    python -m benchmarks.partition [--rates 1gbit,100mbit] [--batch 32] [--updates 4] [--rounds 1]

Both run in turn on the same hosts of one lab (needs root, see docs/lab.md). Seconds per update
are the median on the slower host; bytes are what the kernel sent through the host's interface,
the larger of the two hosts, per update.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from typing import Any

HOSTS = ("a", "b")
WARMUP = 2


def worker(node: int, address: str, port: int, batch: int, updates: int) -> None:
    """One host's part with the layers that the planner splits."""
    import torch
    from torch import nn

    from benchmarks.peers.ddp_update import sent_bytes
    from paceline import models
    from paceline.cost.split import Division
    from paceline.exchange.allreduce import AllReduce
    from paceline.exchange.base import ExchangeSetting
    from paceline.exchange.opening import open_network
    from paceline.exchange.tensor_parallel.chains import find_chains
    from paceline.exchange.tensor_parallel.layers import Partition
    from paceline.local.base import Job
    from paceline.local.single import Threads
    from paceline.plan.partition import choose_partition
    from paceline.schema import ExchangeSettings, NodePlan, RankContext

    def build() -> nn.Module:
        torch.manual_seed(0)
        return models.build("alexnet", classes=10, channels=3, image_size=224)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, fused=True)

    options = ExchangeSettings(bucket_mb=1.0)
    shares, own = (1.0,) * len(HOSTS), batch // len(HOSTS)
    model = build()
    choice = choose_partition(
        options,
        find_chains(model),
        Division(parts=(own,) * len(HOSTS), shares=shares),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    del model
    context = RankContext(node=node, nodes=len(HOSTS), address=address, port=port)
    network = open_network(context, HOSTS, deadline=300.0)
    strategy = Threads(
        Job(
            build_model=build,
            loss=nn.functional.cross_entropy,
            build_optimizer=optimizer,
            elementwise=True,
            node=NodePlan(),
            exchange=AllReduce(ExchangeSetting(network=network, options=options, shares=shares)),
            partition=Partition(network, choice.layers, shares, batch),
            first_worker=node,
        )
    )
    inputs, targets = torch.randn(own, 3, 224, 224), torch.randint(10, (own,))
    times, before = [], 0
    for number in range(WARMUP + updates):
        if number == WARMUP:
            before = sent_bytes()
            network.traffic.take()
        start = time.perf_counter()
        strategy.update(inputs, targets, batch, number)
        times.append(time.perf_counter() - start)
    sent = (sent_bytes() - before) / updates
    if node == 0:
        counted = network.traffic.bytes_sent / updates
        waited = network.traffic.waited / updates
        print(f"# {choice.reason}; counted {counted / 1e6:.1f} MB, waited {waited:.3f} s")
    print(f"seconds {statistics.median(times[WARMUP:])} bytes {sent}", flush=True)
    network.close()


def contest(lab: Any, kind: str, port: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and bytes per update of one contender on the hosts of a lab."""
    address = lab.addresses[HOSTS[0]]
    outputs: list[str] = [""] * len(HOSTS)

    def run(node: int) -> None:
        sizes = [str(options.batch), str(options.updates)]
        if kind == "partition":
            command = ["benchmarks.partition", "--worker", str(node), address, str(port), *sizes]
        else:
            command = ["benchmarks.peers.ddp_update", *sizes]
        done = lab.run(
            [sys.executable, "-m", *command],
            on=HOSTS[node],
            env={
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "RANK": str(node),
                "WORLD_SIZE": str(len(HOSTS)),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            timeout=600,
        )
        outputs[node] = done.stdout.decode()
        if done.returncode:
            print(done.stderr.decode(), file=sys.stderr)

    threads = [threading.Thread(target=run, args=(node,)) for node in range(len(HOSTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for output in outputs for line in output.splitlines()]
    for line in lines:
        if line.startswith("#"):
            print(line)
    found = [line.split() for line in lines if line.startswith("seconds")]
    if len(found) < len(HOSTS):
        sys.exit(f"{kind} did not end on every host")
    return max(float(words[1]) for words in found), max(float(words[3]) for words in found)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        node, address, *numbers = sys.argv[2:]
        port, batch, updates = (int(number) for number in numbers)
        worker(int(node), address, port, batch, updates)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    from paceline.lab.cluster import Lab
    from paceline.lab.spec import LabSpec

    print("| link | contender | s per update | rounds | MB per node and update |")
    print("|---|---|---|---|---|")
    port = 29500
    for rate in options.rates.split(","):
        hosts = [{"name": name, "cores": 1.0} for name in HOSTS]
        seconds: dict[str, list[float]] = {"ddp": [], "partition": []}
        megabytes: dict[str, float] = {}
        with Lab(LabSpec.from_tables({"host": hosts, "link": {"rate": rate}})) as lab:
            for _ in range(options.rounds):
                for kind, taken in seconds.items():
                    port += 1
                    duration, sent = contest(lab, kind, port, options)
                    taken.append(duration)
                    megabytes[kind] = sent / 1e6
        for kind, taken in seconds.items():
            rounds = ", ".join(f"{each:.2f}" for each in taken)
            median = statistics.median(taken)
            print(f"| {rate} | {kind} | {median:.2f} | {rounds} | {megabytes[kind]:.1f} |")
        ratio = statistics.median(seconds["ddp"]) / statistics.median(seconds["partition"])
        fewer = megabytes["ddp"] / megabytes["partition"]
        print(f"# {rate}: {ratio:.2f}x as fast, {fewer:.1f} times fewer bytes", flush=True)


if __name__ == "__main__":
    main()
