"""Measures the hosts of a lab as `paceline measure --hosts` does: the same programs on every host.

A link does not depend on the model: it is measured once for all models and put together with
what each host computes, which `measure` itself has no reason to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import config_from, dump_config
from paceline.config.environment import rank_environment
from paceline.errors import RunError
from paceline.lab import Lab
from paceline.schema import RankContext, decode
from paceline.schema.machines import Machines

_PORT = 29470
TIMEOUT = 600.0


def measure_hosts(lab: Lab, settings: Mapping[str, object]) -> Machines:
    """Every host for one workload, all at the same time: `paceline measure CONFIG --json`."""
    with tempfile.TemporaryDirectory(prefix="paceline-predict-") as name:
        file = Path(name) / "config.toml"
        file.write_text(dump_config(config_from(dict(settings))))
        command = [sys.executable, "-m", "paceline.cli", "measure", str(file), "--json", "--again"]
        # A cache of their own: what is measured here is nobody else's host.
        extra = {"PACELINE_CACHE": str(Path(name) / "cache"), "OMP_NUM_THREADS": "1"}
        answers = _everywhere(lab, lambda number: (command, extra))
    found = [decode(Machines, answer) for answer in answers]
    hosts = tuple(
        dataclasses.replace(
            one.hosts[0],
            name=spec.name,
            node=dataclasses.replace(one.hosts[0].node, host=spec.name),
        )
        for one, spec in zip(found, lab.spec.hosts, strict=True)
    )
    return Machines(made=found[0].made, workload=found[0].workload, hosts=hosts)


def measure_network(lab: Lab) -> Machines:
    """What joins the hosts: `python -m paceline.hardware.links`, as agents start it."""
    names = [host.name for host in lab.spec.hosts]
    if len(names) == 1:
        return Machines()
    address = lab.addresses[names[0]]

    def start(number: int) -> tuple[list[str], dict[str, str]]:
        context = RankContext(node=number, nodes=len(names), address=address, port=_PORT)
        command = [sys.executable, "-m", "paceline.hardware.links", json.dumps(names)]
        return command, rank_environment(context) | {"OMP_NUM_THREADS": "1"}

    parts = [decode(Machines, answer) for answer in _everywhere(lab, start)]
    return Machines(
        links=tuple(link for part in parts for link in part.links),
        curves=tuple(curve for part in parts for curve in part.curves),
    )


def joined(hosts: Machines, network: Machines) -> Machines:
    """Hosts of one measurement and the network of another."""
    return dataclasses.replace(hosts, links=network.links, curves=network.curves)


def _everywhere(
    lab: Lab, start: Callable[[int], tuple[Sequence[str], Mapping[str, str]]]
) -> list[Any]:
    """What a program prints as JSON on every host, all at the same time."""
    with contextlib.ExitStack() as stack:
        files = []
        started = []
        for number, host in enumerate(lab.spec.hosts):
            command, variables = start(number)
            output = stack.enter_context(tempfile.TemporaryFile())
            errors = stack.enter_context(tempfile.TemporaryFile())
            files.append((output, errors))
            started.append(
                lab.start(
                    command,
                    on=host.name,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                )
            )
        end = time.monotonic() + TIMEOUT
        answers = []
        for host, process, (output, errors) in zip(lab.spec.hosts, started, files, strict=True):
            code = process.wait(max(1.0, end - time.monotonic()))
            for file in (output, errors):
                file.seek(0)
            if code:
                raise RunError(
                    f"measuring {host.name} ended with exit code {code}:"
                    f" {errors.read().decode(errors='replace')[-2000:]}"
                )
            answers.append(json.loads(output.read()))
        return answers
