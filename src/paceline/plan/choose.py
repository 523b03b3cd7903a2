"""From a race to a plan, with reasons in plain words."""

from __future__ import annotations

import dataclasses
from typing import cast

from paceline.plan.candidates import SAME, MemoryFormat, Precision, describe, is_calmer, part_behind
from paceline.schema import Candidate, Config, Plan, Race, Rejected
from paceline.text import rate


def explain(
    candidates: list[Candidate], chosen: Candidate, *, gradient_mb: float, allowed: tuple[str, ...]
) -> list[Candidate]:
    """The candidates with `chosen` marked and a reason for each."""
    result = []
    for entry in candidates:
        if entry.name == chosen.name:
            result.append(
                dataclasses.replace(entry, chosen=True, reason=_why_chosen(candidates, chosen))
            )
        elif entry.images_per_second is None or entry.out:
            result.append(dataclasses.replace(entry, chosen=False))
        else:
            result.append(
                dataclasses.replace(entry, reason=_why_not(entry, chosen, gradient_mb, allowed))
            )
    return result


def _why_chosen(candidates: list[Candidate], chosen: Candidate) -> str:
    faster = [
        c
        for c in candidates
        if c.exact == chosen.exact
        and not c.out
        and (c.images_per_second or 0) > (chosen.images_per_second or 0)
    ]
    if not faster:
        return "the fastest"
    fastest = max(faster, key=lambda c: c.images_per_second or 0)
    behind = part_behind(chosen, fastest)
    level = "as fast as the fastest" if behind <= SAME else f"{behind:.0%} behind, within the noise"
    return f"{level}, and {_advantage(chosen, fastest)}"


def _advantage(chosen: Candidate, rival: Candidate) -> str:
    """What decides between near equals."""
    if not is_calmer(chosen, rival):
        return "simpler"
    return (
        f"only {chosen.crossing_mb:.0f} MB go between the cores in every update,"
        f" not {rival.crossing_mb:.0f}"
    )


def _why_not(
    entry: Candidate, chosen: Candidate, gradient_mb: float, allowed: tuple[str, ...]
) -> str:
    speed, best = entry.images_per_second or 0.0, chosen.images_per_second or 1.0
    if not entry.exact and entry.precision not in allowed:
        faster = f"{speed / best:.2f}x the choice, but " if speed > best else ""
        return f'{faster}changes results: allow it with numerics.allow = ["{entry.precision}"]'
    cause = _cause(entry, chosen, gradient_mb)
    behind = part_behind(entry, chosen)
    if behind < -SAME:
        return f"{-behind:.0%} faster, within the noise{'; ' + cause if cause else ''}"
    if behind < SAME:
        return f"as fast as the choice; {cause}" if cause else "as fast as the choice"
    return f"{behind:.0%} slower{': ' + cause if cause else ''}"


def _cause(entry: Candidate, chosen: Candidate, gradient_mb: float) -> str:
    """Why a structure costs what it costs, as far as its arithmetic tells."""
    node = entry.node
    if node.strategy == "sequential":
        return "one core of several"
    if dataclasses.replace(node, cores=()) == dataclasses.replace(chosen.node, cores=()):
        return f"the {entry.memory_format} layout"
    if node.strategy == "threads":
        if chosen.node.strategy == "threads":
            return "fewer cores"
        return "threads wait for each other in every layer, processes once per update"
    if node.strategy == "processes":
        return f"every update sums {node.processes} x {gradient_mb:.1f} MB of gradients"
    if node.strategy == "replicas":
        return f"{node.replicas} threads share one interpreter and sum {gradient_mb:.1f} MB each"
    if node.strategy in ("pipeline", "hybrid"):
        bubble = (node.stages - 1) / (node.micro_batches + node.stages - 1)
        return f"stages stand idle {bubble:.0%} of the time, and activations are copied"
    return ""


def decision(race: Race, chosen: Candidate, *, gradient_mb: float) -> str:
    """One line on what was chosen and why."""
    rivals = [
        c
        for c in race.candidates
        if c.images_per_second
        and not c.out
        and (c.exact or c.precision == chosen.precision)
        and c.node.strategy != chosen.node.strategy
        and c.node.strategy != "sequential"
    ]
    rivals.sort(key=lambda c: -(c.images_per_second or 0))
    text = f"{chosen.name}: {rate(chosen.images_per_second or 0)} images/s"
    if chosen.speedup:
        text += f", {chosen.speedup:.2f}x sequential"
    if rivals:
        rival = rivals[0]
        name, speed = describe(rival.node), rival.images_per_second or 0
        if speed >= (1 - SAME) * (chosen.images_per_second or 0):
            even = speed <= (1 + SAME) * (chosen.images_per_second or 0)
            level = "as fast as" if even else "within the noise of"
            return f"{text}; {level} {name} ({rate(speed)}), and {_advantage(chosen, rival)}"
        text += f"; next {name} at {rate(speed)}"
        if cause := _cause(rival, chosen, gradient_mb):
            text += f", because {cause}"
    return text


def plan_from_race(config: Config, race: Race) -> Plan:
    """The plan that the race's choice means."""
    chosen = next(c for c in race.candidates if c.chosen)
    rejected = tuple(
        Rejected(option=c.name, images_per_second=c.images_per_second, reason=c.reason)
        for c in race.candidates
        if not c.chosen
    )
    speed = chosen.images_per_second or 0.0
    return Plan(
        nodes=(chosen.node,),
        precision=cast(Precision, chosen.precision),
        memory_format=cast(MemoryFormat, chosen.memory_format),
        compile=config.numerics.compile,
        batch_size=race.batch_size,
        reason=race.decision,
        predicted={
            "images_per_second": speed,
            "update_seconds": race.batch_size / speed if speed else 0.0,
            "memory_mb": chosen.memory_mb or chosen.estimated_mb or 0.0,
        },
        rejected=rejected,
    )
