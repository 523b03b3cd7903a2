"""What the page and the terminal show of a run: plain data, made from a follower."""

from __future__ import annotations

import math
import statistics
from typing import Any

from paceline.report.legs import TITLES as ROLES
from paceline.schema.ledger import TITLES
from paceline.watch.follow import Follower

CURVES = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")


def state_of(run: Follower, key: int) -> dict[str, Any]:
    """Everything, by parts; parts that did not change need not be sent again."""
    parts = {
        "head": _head(run, key),
        "progress": _progress(run),
        "curves": _curves(run),
        "legs": _legs(run),
        "hosts": _hosts(run),
        "ledger": _ledger(run),
        "notes": [
            {"at": round(at - run.began, 1), "rank": rank, "what": note.what, "text": note.text}
            for at, rank, note in run.notes
        ],
    }
    return {name: _finite(part) for name, part in parts.items()}


def _finite(value: Any) -> Any:
    """JSON has no infinity, which sums of damaged numbers may come to: nothing in its place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _head(run: Follower, key: int) -> dict[str, Any]:
    work, train = run.config.get("workload", {}), run.config.get("train", {})
    return {
        "key": key,
        "name": run.run.path.name,
        "state": run.state,
        "model": str(work.get("model", "")),
        "data": str(work.get("data", "")),
        "batch": run.batch,
        "unit": str(work.get("unit", "images")),
        "epochs": train.get("epochs", 5),
        "until": train.get("until", {}),
        "checkpoint": run.checkpoint,
        "takes": list(run.takes),
    }


def _progress(run: Follower) -> dict[str, Any]:
    last = run.progress[-1] if run.progress else None
    speed, left = speed_now(run), None
    if last is not None and speed:
        left = max(0, last.updates - last.update) * run.batch / speed
    predicted = run.plan.predicted.get("images_per_second") if run.plan else None
    whole = last.updates * run.batch / predicted if last and predicted else None
    return {
        "update": last.update if last else 0,
        "updates": last.updates if last else None,
        "epoch": last.epoch if last else 0,
        "loss": last.loss if last else None,
        "speed": speed,
        "left": left if run.state == "training" else None,
        "predicted_speed": predicted,
        "predicted_seconds": whole,
        "seconds": max(0.0, (run.looked if run.state == "training" else run.newest) - run.began),
    }


def speed_now(run: Follower) -> float | None:
    """Samples per second over the last word of progress; None before there is any."""
    if len(run.progress) < 2:
        return None
    first, last = run.progress[max(-11, -len(run.progress))], run.progress[-1]
    seconds = last.time - first.time
    return (last.update - first.update) * run.batch / seconds if seconds > 0 else None


def _curves(run: Follower) -> dict[str, Any]:
    began = run.began

    def points(series: list[tuple[float, float]]) -> list[list[float]]:
        return [[round(at - began, 2), float(f"{value:.5g}")] for at, value in series]

    epochs = {
        key: [
            [line["epoch"], float(f"{line[key]:.5g}")]
            for line in run.metrics
            if isinstance(line.get(key), int | float)
        ]
        for key in CURVES
    }
    return {"loss": points(run.loss.points), "speed": points(run.speed.points), **epochs}


def _legs(run: Follower) -> dict[str, Any]:
    made = [
        {
            "name": leg.name,
            "role": ROLES[leg.role],
            "from": round(leg.began_at, 2),
            "seconds": round(leg.setup_seconds + leg.seconds, 2),
            "updates": leg.updates,
            "speed": leg.plan.batch_size / leg.update_seconds if leg.update_seconds else None,
            "why": leg.began,
            "ended": leg.ended,
            "hosts": [node.host for node in leg.plan.nodes],
        }
        for leg in run.legs
    ]
    now = None
    if run.leg is not None and run.state in ("training", "starting"):
        now = {"text": run.leg.text, "from": round(max(0.0, run.leg.time - run.began), 2)}
    return {"made": made, "now": now}


def _silent_host(name: str, state: str, began: float, heard: float) -> dict[str, Any]:
    return {
        "name": name, "state": state, "ranks": 0, "cpu": 0.0, "busy": None, "memory": 0.0,
        "sent": 0.0, "received": 0.0, "waiting": [], "made_wait": 0.0, "from": began, "to": heard,
        "curve": [],
    }  # fmt: skip


def _hosts(run: Follower) -> list[dict[str, Any]]:
    """One for each host, its ranks together."""
    found: dict[str, dict[str, Any]] = {}
    waits = {rank.rank: rank for rank in run.ledger.ranks}
    for number, seen in run.current.items():
        if seen.start is None:
            continue
        state, booked = run.state_of(number), waits.get(number)
        there = state == "there"
        times = (seen.start.began, seen.heard)
        host = found.setdefault(seen.start.host, _silent_host(seen.start.host, "ended", *times))
        host["ranks"] += 1
        order = ("ended", "gone", "there")
        host["state"] = max(host["state"], state, key=order.index)
        host["from"], host["to"] = min(host["from"], seen.start.began), max(host["to"], seen.heard)
        if seen.sample is not None and there:
            host["cpu"] += seen.sample.cpu
            host["busy"] = seen.sample.busy
            host["memory"] += seen.sample.resident / 1e6
            host["sent"], host["received"] = seen.sent, seen.received
        if not host["curve"]:
            host["curve"] = seen.cpu.points[-90:]
        if booked is not None and booked.role == "worker":
            host["waiting"].append(booked.shares["waiting"] + booked.shares["communication"])
            host["made_wait"] = max(host["made_wait"], run.ledger.made_wait(number))
    for name, times in run.left.items():
        found[name] = _silent_host(name, "gone", *times)
    for host in found.values():
        host["waiting"] = statistics.fmean(host["waiting"]) if host["waiting"] else None
        host["from"] = round(max(0.0, host["from"] - run.began), 2)
        host["to"] = round(host["to"] - run.began, 2)
        host["curve"] = [[round(at - run.began, 1), round(cpu, 3)] for at, cpu in host["curve"]]
    return list(found.values())


def _ledger(run: Follower) -> dict[str, Any]:
    return {
        "ranks": [
            {
                "name": rank.name,
                "wall": round(rank.wall, 2),
                "parts": {
                    TITLES[name]: round(share, 4) for name, share in rank.shares.items() if share
                },
            }
            for rank in run.ledger.ranks
        ],
        "slow": run.ledger.sentences(),
        "order": list(TITLES.values()),
    }
