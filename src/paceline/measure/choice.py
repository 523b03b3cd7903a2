"""From the times of a race to its choice, and to the next one where that fails its proof."""

from __future__ import annotations

import dataclasses

from paceline.errors import StrategyError
from paceline.measure.contest import pick
from paceline.plan.choose import decision, explain
from paceline.schema import Candidate, Config, Race
from paceline.schema.proof import Proof


def decided(race: Race, config: Config) -> Race:
    """The race with its choice, and a reason for each candidate."""
    # A precision that was asked for by name is allowed by that.
    allowed = (*config.numerics.allow, config.numerics.precision)
    chosen = pick(race.candidates, allowed)
    if chosen is None:
        # What one thread alone cannot train fails everywhere for the same reason.
        alone = [c.reason for c in race.candidates if c.name == "sequential" and c.reason]
        reasons = "; ".join(alone or [f"{c.name}: {c.reason}" for c in race.candidates])
        raise StrategyError(f"no local strategy could train this workload ({reasons})")
    results = explain(list(race.candidates), chosen, gradient_mb=race.gradient_mb, allowed=allowed)
    race = dataclasses.replace(race, candidates=tuple(results))
    return dataclasses.replace(race, decision=decision(race, chosen, gradient_mb=race.gradient_mb))


def without(race: Race, proof: Proof, config: Config) -> Race:
    """The race after its choice has failed its proof: the next best is chosen.

    With it go those that would fail for the same reason: where the parts of a batch do not add up,
    all that divide batches.
    """
    chosen = next(c for c in race.candidates if c.chosen)
    candidates = [
        dataclasses.replace(entry, out=True, chosen=False, reason=_why_out(entry, chosen, proof))
        if _fails_too(entry, chosen, proof)
        else entry
        for entry in race.candidates
    ]
    return decided(dataclasses.replace(race, candidates=tuple(candidates)), config)


def _fails_too(entry: Candidate, chosen: Candidate, proof: Proof) -> bool:
    if entry.name == chosen.name or entry.out:
        return True
    if proof.cause in ("loss", "samples"):
        return entry.images_per_second is not None and entry.node.divides
    return False


def _why_out(entry: Candidate, chosen: Candidate, proof: Proof) -> str:
    if entry.out:
        return entry.reason
    own = entry.name == chosen.name
    return proof.reason if own else f"not proved: {chosen.name} divides batches too, and failed"
