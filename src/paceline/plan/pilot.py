"""The pilot: which plan trains next, for how many updates, and why. Pure; no torch.

A training is a sequence of legs. After every leg the pilot is asked again, with all legs so far:

    explore   another plan is tried while what it may bring over the updates that are left is worth
              more than trying it costs, within the budget
    compare   a trial's update is held against those of the best plan just before and, where that
              does not decide, just after it: a machine whose speed drifts is the same for both
    keep      the best plan known goes on; when its speed changes, all trials count as forgotten

Differences inside the noise are ties, and of ties the simplest plan is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.schema.legs import Leg, Role

CLEAR = 2.0
"""Standard errors by which a difference must exceed the noise: about 95% of the time it is real."""
OBVIOUS = 0.1
"""A difference of this part needs no second look at the best plan once it is clear."""
TRIAL_SECONDS = 0.5
"""About how long a trial is timed: far longer than a moment's hitch."""
FEWEST = 4
"""Updates of a leg that is timed: one to warm up, three to time."""
MOST_PAIRS = 3
"""How often two plans are compared before they are called a tie."""
REVIEW_SECONDS = 20.0
"""How often the pilot looks whether the speed has changed when nothing is left to try."""
PROVING = 3.0
"""Building a plan to prove it on a copy, beside a plain one, takes so many times as long."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan that may be tried."""

    name: str
    factors: Mapping[str, float] = field(default_factory=dict)
    """What each of its traits is expected to multiply the seconds of a plain update by."""
    ranks: int = 0
    """Processes that it needs besides the training's own."""
    setup_seconds: float | None = None
    """What taking over is expected to cost; as for the first leg when left out."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What the pilot decides from."""

    options: Sequence[Option]
    """Every plan that may be used, the simplest first."""
    updates: int
    """Of the whole training."""
    legs: Sequence[Leg] = ()
    """Of this training so far; of an interrupted one, since it was resumed."""
    since: int = 0
    """How many of them are from before a host was lost: nothing in them counts as tried."""
    position: int = 0
    """Updates done."""
    elapsed: float = 0.0
    """Seconds since the training was asked for."""
    budget: float = 0.05
    """Part of the expected time that finding the fastest way may cost; 0: only go on."""
    ready: int = 0
    """Ranks that stand by."""
    rank_seconds: float = 0.0
    """What starting the ranks takes from a training that goes on meanwhile."""
    built_seconds: float | None = None
    """What building the first plan took; all of what the first leg was set up with if not known."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Plans that failed or were refused, and why."""
    start: str | None = None
    """The plan to begin with: the best that past trainings on this machine have found, or after a
    loss the best that is left."""

    @property
    def recent(self) -> Sequence[Leg]:
        """The legs of those who are there now."""
        return self.legs[self.since :]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What comes next."""

    name: str
    updates: int
    role: Role
    best: str
    """The best plan known so far."""
    reason: str = ""
    ranks: int = 0
    """How many ranks should be started meanwhile, to stand by."""

    @classmethod
    def keep(cls, name: str) -> Decision:
        """A plan as it is, without an update to make yet."""
        return cls(name=name, updates=0, role="keep", best=name)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much longer a plan's updates take than another's: a logarithm, and its standard error."""

    difference: float
    error: float
    pairs: int
    """Trials that have the other plan on both sides."""

    @property
    def is_faster(self) -> bool:
        return self.difference + CLEAR * self.error < 0

    @property
    def is_slower(self) -> bool:
        return self.difference - CLEAR * self.error > 0

    @property
    def is_obvious(self) -> bool:
        """Clear, and large: drift between two neighbouring legs cannot explain it."""
        return abs(self.difference) - CLEAR * self.error > OBVIOUS


def typical(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """The median of a leg's updates without the first, and its standard error as a part of it.

    The error of a median is 1.25 times that of a mean; the spread is taken from the median
    distance to the median, so that a few hitches do not count.

    >>> typical([9.0, 1.0, 1.0, 1.0])
    (1.0, 0.0)
    >>> typical([9.0])
    (None, None)
    """
    timed = list(seconds[1:])
    if not timed:
        return None, None
    middle = statistics.median(timed)
    spread = 1.4826 * statistics.median(abs(each - middle) for each in timed)
    return middle, 1.2533 * spread / math.sqrt(len(timed)) / middle if middle > 0 else 0.0


def next_leg(known: Knowledge) -> Decision:
    """The next leg of a training that has updates left."""
    left = known.updates - known.position
    if not known.recent:
        usable = [option.name for option in known.options if option.ranks <= known.ready]
        name = known.start if known.start in usable and known.start not in known.out else usable[0]
        reason = "the fastest in past trainings here" if name == known.start else "starts at once"
        return Decision(
            name=name, updates=min(left, FEWEST), role="first", best=name, reason=reason
        )
    last = known.legs[-1]
    if last.ended and last.name != last.best:
        return _onward(known, last.best)
    if last.role == "trial":
        return _after_trial(known, last)
    if last.role == "check":
        return _after_check(known, last)
    return _onward(known, last.best)


def _after_trial(known: Knowledge, last: Leg) -> Decision:
    found = compare(_fresh(known.recent), last.name, last.best)
    if found is None or found.is_obvious or (found.is_slower and found.pairs):
        faster = found is not None and found.is_faster
        return _onward(known, last.name if faster else last.best)
    updates = timed_updates(known, last.best)
    left = known.updates - known.position
    if left < updates:
        return _onward(known, last.name if found.is_faster else last.best)
    return Decision(
        name=last.best,
        updates=updates,
        role="check",
        best=last.best,
        reason=f"{last.name} is too close to call: once more beside it",
    )


def _after_check(known: Knowledge, last: Leg) -> Decision:
    trial = known.legs[-2]
    names = [option.name for option in known.options]
    if trial.name not in names:  # a node that it needs was lost meanwhile
        return _onward(known, last.best)
    found = compare(_fresh(known.recent), trial.name, last.best)
    if found is None or found.is_slower:
        return _onward(known, last.best)
    if found.is_faster:
        return _onward(known, trial.name)
    pace = seconds_of(known.legs, last.best)
    may_bring = -math.expm1(found.difference - CLEAR * found.error)
    left = known.updates - known.position
    cost = trial.setup_seconds + last.setup_seconds
    if (
        found.pairs < MOST_PAIRS
        and may_bring * left * pace > cost
        and spent(known) + cost <= _allowance(known, last.best)
    ):
        return _trial(known, trial.name, last.best, "too close to call")
    return _onward(known, min(trial.name, last.best, key=names.index))


def _onward(known: Knowledge, best: str) -> Decision:
    """Try another plan if that is worth it, or go on with the best."""
    left = known.updates - known.position
    pace = seconds_of(known.legs, best)
    waiting = 0
    promising = _worth_trying(known, best)
    for option in promising:
        if option.ranks <= known.ready and _is_warm(known.legs[-1]):
            gain = 1 - expected(known, option, best)
            return _trial(known, option.name, best, f"may take {gain:.0%} less time")
        waiting = max(waiting, option.ranks)
    review = TRIAL_SECONDS if promising else REVIEW_SECONDS
    return Decision(
        name=best,
        updates=max(1, min(left, max(FEWEST, math.ceil(review / pace)))),
        role="keep",
        best=best,
        reason="the fastest known" if len({leg.name for leg in known.legs}) > 1 else "",
        ranks=waiting if waiting > known.ready else 0,
    )


def _is_warm(leg: Leg) -> bool:
    """Whether a trial can be held against a leg.

    The first leg only warms up, unless each of its updates took longer than that takes.
    """
    return leg.role != "first" or (leg.update_seconds or 0.0) >= TRIAL_SECONDS


def _trial(known: Knowledge, name: str, best: str, reason: str) -> Decision:
    left = known.updates - known.position
    return Decision(
        name=name,
        updates=min(left, timed_updates(known, best)),
        role="trial",
        best=best,
        reason=reason,
    )


def timed_updates(known: Knowledge, best: str) -> int:
    """Updates that take about as long as a trial is to be timed; of long ones the fewest."""
    pace = seconds_of(known.legs, best)
    return FEWEST + (math.ceil(TRIAL_SECONDS / pace) if pace < TRIAL_SECONDS else 0)


def _worth_trying(known: Knowledge, best: str) -> list[Option]:
    """Plans whose trial is expected to pay for itself, the most promising first."""
    if known.budget <= 0:
        return []
    left = known.updates - known.position
    pace = seconds_of(known.legs, best)
    room = _allowance(known, best) - spent(known)
    tried = {leg.name for leg in _fresh(known.recent)} | set(known.out)
    used = {leg.name for leg in known.legs[: known.since] if leg.update_seconds}
    found = []
    for option in known.options:
        if option.name in tried:
            continue
        ratio = expected(known, option, best)
        gain = (1 - ratio) * pace * (left - timed_updates(known, best))
        cost = _trial_cost(known, option, best, ratio)
        # What was used before a loss is known: going back to it is no search.
        if gain > cost and (cost <= room or option.name in used):
            found.append((gain - cost, option))
    return [option for _, option in sorted(found, key=lambda pair: -pair[0])]


def _trial_cost(known: Knowledge, option: Option, best: str, ratio: float) -> float:
    """Seconds that a trial is expected to take from the training, if it then goes back."""
    pace = seconds_of(known.legs, best)
    setup = option.setup_seconds or _setup_seconds(known, option)
    starting = known.rank_seconds if option.ranks > known.ready else 0.0
    slower = max(0.0, ratio - 1) * pace * timed_updates(known, best)
    # The best plan is kept as it is meanwhile: going back to it costs next to nothing.
    return starting + setup + slower


def _setup_seconds(known: Knowledge, option: Option) -> float:
    """What taking over is expected to take: as in trials of the same kind, or from the first leg.

    No trial of a kind yet: its plan must be built, and proved beside a plain one.
    """
    needs_ranks = {each.name: each.ranks > 0 for each in known.options}
    made = [
        leg.setup_seconds
        for leg in known.legs
        if leg.role == "trial" and needs_ranks.get(leg.name) == (option.ranks > 0)
    ]
    if made:
        return statistics.fmean(made)
    # The rest is its first update, which takes longer than those after it, in any plan once.
    whole = known.legs[0].setup_seconds
    built = whole if known.built_seconds is None else min(whole, known.built_seconds)
    return PROVING * built + (whole - built)


def _allowance(known: Knowledge, best: str) -> float:
    """Seconds that finding the fastest way may cost in all."""
    left = known.updates - known.position
    return known.budget * (known.elapsed + left * seconds_of(known.legs, best))


def spent(known: Knowledge) -> float:
    """Seconds that trials have taken from the training so far."""
    total = 0.0
    for leg in known.legs:
        if leg.role in ("trial", "check"):
            pace = seconds_of(known.legs, leg.best)
            total += leg.setup_seconds + max(0.0, leg.seconds - leg.updates * pace)
    return total


def saved(known: Knowledge) -> float:
    """Seconds that plans have surely saved over the first one (since a loss: the first after it).

    By the comparisons that each change of plan was made for: the first plan's own times may be old.
    """
    total, part = 0.0, 1.0
    kept = known.legs[0].name
    for index, leg in enumerate(known.legs):
        if index and known.legs[index - 1].left:  # nothing was saved by losing hosts
            part, kept = 1.0, leg.name
        if leg.role != "keep" or leg.ended:
            continue
        if leg.name != kept:
            part, kept = part * sure_ratio(known.legs[:index], leg.name, kept), leg.name
        total += leg.seconds * (1 / part - 1)
    return total


def sure_ratio(legs: Sequence[Leg], name: str, other: str) -> float:
    """An update of a plan as a part of another's, held side by side: the end of the interval that
    promises least. 1 where the two were never held side by side, or do not differ clearly."""
    found, sign = compare(legs, name, other), 1
    if found is None:
        found, sign = compare(legs, other, name), -1
    if found is None:
        return 1.0
    return math.exp(min(0.0, sign * found.difference + CLEAR * found.error))


def seconds_of(legs: Sequence[Leg], name: str) -> float:
    """Seconds of an update of a plan, as its newest leg was timed; of any plan before the first."""
    for leg in reversed(legs):
        if leg.name == name and leg.update_seconds:
            return leg.update_seconds
    for leg in reversed(legs):
        if leg.update_seconds:
            return leg.update_seconds
    return max(1e-6, max(leg.setup_seconds for leg in legs))


def expected(known: Knowledge, option: Option, best: str) -> float:
    """Seconds of an update of an option, as a part of those of the best plan.

    Each is the product of its traits' factors; what trials of this training have shown of a
    trait replaces what was expected of it.
    """
    factors = learned(known)
    other = next(each for each in known.options if each.name == best)
    return _product(option, factors) / _product(other, factors)


def learned(known: Knowledge) -> dict[str, float]:
    """The factor of every trait, from comparisons of plans that differ in one trait each way."""
    options = {option.name: option for option in known.options}
    factors: dict[str, float] = {}
    for option in known.options:
        for trait, factor in option.factors.items():
            factors.setdefault(trait, factor)
    legs = _fresh(known.recent)
    for leg in legs:
        if leg.role != "trial" or leg.name not in options or leg.best not in options:
            continue
        found = compare(legs, leg.name, leg.best)
        mine, other = options[leg.name].factors, options[leg.best].factors
        new, old = mine.keys() - other.keys(), other.keys() - mine.keys()
        if found is not None and len(new) == 1 and len(old) <= 1:
            base = math.prod(factors[trait] for trait in old)
            factors[new.pop()] = math.exp(found.difference) * base
    return factors


def _product(option: Option, factors: Mapping[str, float]) -> float:
    return math.prod(factors[trait] for trait in option.factors)


def compare(legs: Sequence[Leg], name: str, best: str) -> Comparison | None:
    """A plan's trials against the legs of `best` beside them; None where nothing was timed."""
    differences, variances, pairs = [], [], 0
    for leg in legs:
        if leg.name != name or leg.best != best or not leg.update_seconds:
            continue
        of_best = [other for other in legs if other.name == best and other.update_seconds]
        before = [other for other in of_best if other.first < leg.first]
        after = [other for other in of_best if other.first > leg.first]
        beside = before[-1:] + after[:1]
        if not beside:
            continue
        pairs += len(beside) == 2
        near = statistics.fmean(math.log(other.update_seconds or 1.0) for other in beside)
        differences.append(math.log(leg.update_seconds) - near)
        noise = sum((other.error or 0.0) ** 2 for other in beside) / len(beside) ** 2
        variances.append((leg.error or 0.0) ** 2 + noise)
    if not differences:
        return None
    count = len(differences)
    error = math.sqrt(sum(variances)) / count
    if count > 1:
        error = max(error, statistics.stdev(differences) / math.sqrt(count))
    return Comparison(difference=statistics.fmean(differences), error=error, pairs=pairs)


def _fresh(legs: Sequence[Leg]) -> Sequence[Leg]:
    """The legs since the plan that goes on last changed its speed: older ones are forgotten."""
    start = 0
    reference: Leg | None = None
    for index, leg in enumerate(legs):
        if leg.role != "keep" or not leg.update_seconds:
            continue
        if reference is None or reference.name != leg.name:
            reference = leg
            continue
        change = abs(math.log(leg.update_seconds / (reference.update_seconds or 1.0)))
        noise = CLEAR * math.hypot(leg.error or 0.0, reference.error or 0.0)
        if change > OBVIOUS + noise:
            start, reference = index, leg
    return legs[start:]
