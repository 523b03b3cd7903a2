"""What the study says, held against what was measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from studies.outcome import Claim, Verdict
from studies.wang.numbers import RECIPES, SAME, StudyRow

NOT_YET = "the steps for it have not been run"
FLAT = 1.3
"""The study's own seconds per update vary by so much between rows."""
LINEAR = 0.8
"""Part of the ideal speedup that still counts as in proportion."""
FALL = 0.003
"""A fall of accuracy that one training with another seed does not explain."""


def claims(rows: Sequence[StudyRow]) -> tuple[Claim, ...]:
    """All of them, in the order of the study."""
    return (
        _weak(rows),
        _strong(rows),
        _places(rows),
        _accuracy(rows),
        _same_result(rows),
        _all_reduce(rows),
        Claim(
            claim="Reading takes longer on 4 nodes (0.88 s) than on one (0.53 s).",
            verdict="cannot be tested here",
            because="emulated nodes read one disk through one page cache",
        ),
        Claim(
            claim="GPUs would be faster (wished for).",
            verdict="cannot be tested here",
            because="this machine has none",
        ),
    )


def _verdict(true: bool) -> Verdict:
    return "holds" if true else "does not hold"


def _untested(claim: str) -> Claim:
    return Claim(claim=claim, verdict="cannot be tested here", because=NOT_YET)


def _first(rows: Iterable[StudyRow]) -> StudyRow:
    return next(row for row in rows if row.all == 1)


def _ratios(rows: Sequence[StudyRow], recipe: str) -> dict[str, float]:
    """Seconds per update relative to one process, of the other rows."""
    base = _first(rows).update(recipe)
    if not base:
        return {}
    return {
        row.name: update / base
        for row in rows
        if row.all > 1 and (update := row.update(recipe)) is not None
    }


def _weak(rows: Sequence[StudyRow]) -> Claim:
    claim = "An update takes as long with many processes as with one (0.13 to 0.18 s)."
    found = {recipe: _ratios(rows, recipe) for recipe in RECIPES}
    if not found["study"]:
        return _untested(claim)
    words = [
        f"{RECIPES[recipe]}: {min(ratios.values()):.2f} to {max(ratios.values()):.2f} times"
        " one process"
        for recipe, ratios in found.items()
        if ratios
    ]
    flat = max(found["study"].values()) <= FLAT
    return Claim(claim=claim, verdict=_verdict(flat), because="; ".join(words))


def _strong(rows: Sequence[StudyRow]) -> Claim:
    claim = "An epoch gets shorter almost in proportion to processes: 142 s to 20.5 s with eight."
    base = {recipe: _first(rows).epoch(recipe) for recipe in RECIPES}
    most = max(row.all for row in rows)
    words, speedups = [], {}
    for recipe, name in RECIPES.items():
        epochs = {row.name: row.epoch(recipe) for row in rows if row.all == most}
        gains = {
            where: first / seconds
            for where, seconds in epochs.items()
            if seconds and (first := base[recipe])
        }
        if gains:
            speedups[recipe] = max(gains.values())
            listed = ", ".join(f"{gain:.1f} on {where}" for where, gain in gains.items())
            words.append(f"{name}: {listed}")
    if "study" not in speedups:
        return _untested(claim)
    return Claim(
        claim=claim,
        verdict=_verdict(speedups["study"] >= LINEAR * most),
        because=f"speedup of {most} processes, of {most} possible: " + "; ".join(words),
    )


def _places(rows: Sequence[StudyRow]) -> Claim:
    claim = "Eight processes need the same time for an epoch on one, two or four nodes (20.5 s)."
    most = max(row.all for row in rows)
    epochs = {
        row.name: seconds
        for row in rows
        if row.all == most and (seconds := row.epoch("study")) is not None
    }
    if len(epochs) < 2:
        return _untested(claim)
    spread = max(epochs.values()) / min(epochs.values())
    listed = ", ".join(f"{seconds:.1f} s on {name}" for name, seconds in epochs.items())
    return Claim(
        claim=claim, verdict=_verdict(spread <= 1.1), because=f"with the study's recipe {listed}"
    )


def _accuracy(rows: Sequence[StudyRow]) -> Claim:
    claim = "More processes cost accuracy: 98.80% with one, 97.20 to 94.03% with eight."
    scores: dict[str, dict[int, float]] = {}
    for recipe in RECIPES:
        found = {row.all: row.score(recipe, "test_accuracy") for row in rows}
        scores[recipe] = {size: score for size, score in found.items() if score is not None}
    study = scores["study"]
    if len(study) < 2 or 1 not in study:
        return _untested(claim)
    words = [
        f"{RECIPES[recipe]}: " + ", ".join(f"{score:.2%} with {n}" for n, score in found.items())
        for recipe, found in scores.items()
        if found
    ]
    falls = study[1] - study[max(study)] > FALL
    reason = "; ".join(words)
    if falls and 1 in scores["paceline"]:
        kept = scores["paceline"]
        if kept[1] - kept[max(kept)] <= FALL:
            reason += "; so it is the learning rate that costs it, not the number of processes"
    return Claim(claim=claim, verdict=_verdict(falls), because=reason)


def _same_result(rows: Sequence[StudyRow]) -> Claim:
    claim = "Where processes are changes the accuracy: 97.20% on 1 x 8, 94.03% on 4 x 2."
    pairs = []
    for size in sorted({row.all for row in rows}):
        losses = {
            f"{RECIPES[recipe]} on {row.name}": loss
            for row in rows
            for recipe in ("study", "paceline")
            if row.all == size and (loss := row.first_loss(recipe)) is not None
        }
        if len(losses) > 1:
            low, high = min(losses.values()), max(losses.values())
            pairs.append((size, len(losses), (high - low) / low))
    if not pairs:
        return _untested(claim)
    words = "; ".join(
        f"with {size} process{'es' if size > 1 else ''} {count} ways "
        + (f"differ by {difference:.0e}" if difference else "are equal")
        for size, count, difference in pairs
    )
    same = all(difference <= SAME for _, _, difference in pairs)
    return Claim(
        claim=claim,
        verdict=_verdict(not same),
        because=f"mean loss over the first 8 updates, relative difference: {words}",
    )


def _all_reduce(rows: Sequence[StudyRow]) -> Claim:
    """Judged where they differ: between two processes both move the same bytes."""
    claim = "All-reduce would serve better than reduce and broadcast (wished for)."
    ratios, words = [], []
    for row in rows:
        study, ours = row.update("study"), row.update("paceline")
        if row.nodes == 1 or row.all == 2 or study is None or ours is None:
            continue
        ratios.append(ours / study)
        text = f"{row.name}: {ours:.2f} against {study:.2f} s per update"
        sent, less = row.sent("study"), row.sent("paceline")
        if sent is not None and less is not None:
            text += f", {less:.1f} against {sent:.1f} MB sent by the busiest host"
        words.append(text)
    if not ratios:
        return _untested(claim)
    better = statistics.median(ratios) < 1
    return Claim(claim=claim, verdict=_verdict(better), because="; ".join(words))
