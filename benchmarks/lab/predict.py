"""Predictions against measurements: hosts are measured, every option predicted, then timed.

A case is a model on hosts with a link; a configuration is a case with one exchange (or none: one
host alone). Nothing that is timed here is used for predicting: what is measured before are single
hosts and links, as `paceline measure` does it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.lab.cluster import run_in_lab, summarise
from benchmarks.lab.predict_cases import (
    ALONE,
    EXCHANGES,
    HOSTS,
    PARTITION,
    RATES,
    SERVER,
    VERDICTS,
    WORKLOADS,
    Case,
    CaseWorkload,
    lab_of,
)
from benchmarks.lab.predict_measure import joined, measure_hosts, measure_network
from benchmarks.lab.trials import Bench, Trial
from paceline.config import config_from
from paceline.lab import Lab
from paceline.plan.measured import choose, considered, everyone_of, plan_of_choice
from paceline.plan.prices import TERMS
from paceline.schema import NodePlan, Plan, read_json, write_json
from paceline.schema.codec import rule
from paceline.schema.machines import Machines

MEAN_BAR, WORST_BAR, RIGHT_BAR = 0.10, 0.25, 0.90
NEAR = 0.05
"""An option that took so little longer than the fastest is as good."""
TURN_SECONDS = 2.0
"""About so long one turn of a trial is timed."""
EFFORT = ((1.0, 11, 3), (5.0, 5, 2), (10.0, 2, 1), (math.inf, 1, 1))
"""Up to so many seconds of an update: how often it is timed, and updates before each time."""
PATIENCE = 28.0
"""Seconds of an update above which an option is not timed."""


@dataclass(frozen=True, kw_only=True)
class CaseOutcome:
    """One configuration."""

    model: str
    hosts: str
    cores: tuple[float, ...]
    rate: str
    option: str
    predicted: float = rule(minimum=1e-9, maximum=1e9)
    """Seconds per update."""
    measured: float = rule(minimum=1e-9, maximum=1e9)
    low: float
    high: float
    """Fastest and slowest round."""
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def case(self) -> Case:
        """What is the same for options that compete."""
        return (self.model, self.hosts, self.rate)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything so far: kept in a file, so that a run that was ended can go on."""

    hosts: dict[str, Machines] = field(default_factory=dict)
    """By model, hosts and rate: what computing takes, measured for every group that is timed."""
    networks: dict[str, Machines] = field(default_factory=dict)
    """By hosts and rate."""
    outcomes: tuple[CaseOutcome, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which option of a case was predicted to be the fastest, and how it did."""

    case: Case
    predicted: str
    measured: str
    behind: float
    """How much longer the predicted one took than the fastest measured one, in parts."""

    @property
    def right(self) -> bool:
        """The fastest, or as good."""
        return self.behind <= NEAR


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All configurations together."""

    configurations: int
    mean: float
    worst: float
    choices: tuple[Choice, ...]
    right: float
    """Part of the cases in which the right option was predicted to be fastest."""

    @property
    def passed(self) -> bool:
        """Whether all bars are met."""
        return self.mean <= MEAN_BAR and self.worst <= WORST_BAR and self.right >= RIGHT_BAR


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether several hosts are faster than one, as predicted and as measured."""

    case: Case
    option: str
    """The one predicted to be fastest of those with all hosts."""
    predicted: float
    measured: float
    """Times as fast as one host alone."""

    @property
    def right(self) -> bool:
        """Whether the prediction was on the right side of 1."""
        return (self.predicted > 1) == (self.measured > 1)


def verdicts(outcomes: Sequence[CaseOutcome], cases: Sequence[Case] = VERDICTS) -> list[Verdict]:
    """For every case that was timed: is it worth to use all hosts?"""
    found = []
    for case in cases:
        options = {outcome.option: outcome for outcome in outcomes if outcome.case == case}
        alone = options.pop(ALONE, None)
        if alone is None or not options:
            continue
        chosen = min(options.values(), key=lambda outcome: outcome.predicted)
        found.append(
            Verdict(
                case=case,
                option=chosen.option,
                predicted=alone.predicted / chosen.predicted,
                measured=alone.measured / chosen.measured,
            )
        )
    return found


def summarised(outcomes: Sequence[CaseOutcome]) -> Summary:
    """Errors over all configurations, and the choice in every case."""
    errors = [abs(outcome.error) for outcome in outcomes]
    choices = []
    for case in dict.fromkeys(outcome.case for outcome in outcomes):
        options = [outcome for outcome in outcomes if outcome.case == case]
        if len(options) < 2:
            continue
        expected = min(options, key=lambda o: o.predicted)
        fastest = min(options, key=lambda o: o.measured)
        choices.append(
            Choice(
                case=case,
                predicted=expected.option,
                measured=fastest.option,
                behind=expected.measured / fastest.measured - 1,
            )
        )
    right = [choice.right for choice in choices]
    return Summary(
        configurations=len(outcomes),
        mean=statistics.fmean(errors) if errors else 0.0,
        worst=max(errors, default=0.0),
        choices=tuple(choices),
        right=sum(right) / len(right) if right else 1.0,
    )


def exchange_errors(outcomes: Sequence[CaseOutcome]) -> dict[tuple[Case, str], float]:
    """Errors of the exchanges alone: as if computing had been predicted as one host took it.

    A machine that is busy while hosts are measured, or while options are timed, makes computing
    wrong on one side. Its terms are therefore multiplied by what "alone" took against what was
    predicted for it, in the same rounds: k (compute + waiting) + exposed.
    """
    found = {}
    alone = {o.case: o.measured / o.predicted for o in outcomes if o.option == ALONE}
    for outcome in outcomes:
        if outcome.option != ALONE and outcome.case in alone and outcome.terms:
            terms, factor = outcome.terms, alone[outcome.case]
            seconds = factor * (terms["compute"] + terms["waiting"]) + terms["exposed"]
            found[(outcome.case, outcome.option)] = seconds / outcome.measured - 1
    return found


class PredictionRun:
    """One run over many cases; what is in its file is not done again."""

    def __init__(self, out: Path | None, say: Callable[[str], None]) -> None:
        self._out, self._say = out, say
        self.results = read_json(Results, out) if out is not None and out.exists() else Results()

    @property
    def outcomes(self) -> tuple[CaseOutcome, ...]:
        """Every configuration that was predicted and timed."""
        return self.results.outcomes

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was predicted but not timed, and why."""
        return self.results.skipped

    def run(self, cases: Sequence[Case]) -> None:
        """All cases; those of the same hosts and rate take turns in one lab."""
        left = [case for case in cases if not any(o.case == case for o in self.outcomes)]
        for name, rate in dict.fromkeys((name, rate) for _, name, rate in left):
            models = [m for m, other, at in left if (other, at) == (name, rate)]
            self._cases(models, name, rate)

    def _keep(self, results: Results) -> None:
        self.results = results
        if self._out is not None:
            write_json(self._out, results)

    def _machines(self, model: str, name: str, rate: str, lab: Lab) -> Machines:
        known, networks = dict(self.results.hosts), dict(self.results.networks)
        place = f"{name} {rate}"
        key = f"{model} {place}"
        if key not in known:
            self._say(f"{name}: measuring every host for {model}")
            known[key] = measure_hosts(lab, WORKLOADS[model].settings())
            for warning in known[key].hosts[0].warnings:
                self._say(f"warning: {warning}")
        if place not in networks:
            self._say(f"{name}: measuring the network at {rate or 'no rate'}")
            networks[place] = measure_network(lab)
        self._keep(replace(self.results, hosts=known, networks=networks))
        return joined(known[key], networks[place])

    def _cases(self, models: Sequence[str], name: str, rate: str) -> None:
        spec = lab_of(HOSTS[name], rate or RATES[-1])
        with Lab(spec) as lab:
            machines = {model: self._machines(model, name, rate, lab) for model in models}
        trials: list[Trial] = []
        predicted: dict[str, tuple[str, str, Plan]] = {}
        skipped = []
        for model in models:
            for option, plan in options(machines[model]).items():
                seconds = plan.predicted["update_seconds"]
                title = f"{model} {option}"
                if seconds > PATIENCE:
                    skipped.append(f"{title} on {name} at {rate}: {seconds:.0f} s per update")
                    continue
                trial = _trial(title, WORKLOADS[model], option, plan, machines[model])
                if len(trial.plan.nodes) < len(spec.hosts):
                    skipped.append(f"{title} on {name} at {rate}: a host would get no samples")
                    continue
                predicted[title] = (model, option, plan)
                trials.append(trial)
        self._say(f"{name} at {rate or 'no rate'}: timing {len(trials)} options")
        rounds = max(trial.rounds or 1 for trial in trials)
        timings = run_in_lab(
            spec, Bench(trials=tuple(trials), rounds=rounds, deadline=600.0), say=self._say
        )
        found = []
        kept = [
            timing
            for timing in timings
            if predicted[timing.trial][1] != ALONE
            or timing.host == predicted[timing.trial][2].nodes[0].host
        ]
        for row in summarise(trials, kept):
            model, option, plan = predicted[row.name]
            if row.failed:
                skipped.append(f"{row.name} on {name} at {rate}: {row.failed}")
                continue
            terms = {name: plan.predicted[f"{name}_seconds"] for name in TERMS}
            found.append(
                CaseOutcome(
                    model=model,
                    hosts=name,
                    cores=HOSTS[name],
                    rate=rate,
                    option=option,
                    predicted=plan.predicted["update_seconds"],
                    measured=row.seconds,
                    low=row.low,
                    high=row.high,
                    terms=terms,
                )
            )
            self._say(
                f"{row.name}: predicted {found[-1].predicted:.3f} s, measured {row.seconds:.3f} s,"
                f" {found[-1].error:+.0%}"
            )
        self._keep(
            replace(
                self.results,
                outcomes=(*self.results.outcomes, *found),
                skipped=(*self.results.skipped, *skipped),
            )
        )


def options(machines: Machines) -> dict[str, Plan]:
    """What is predicted for all hosts with every exchange, and for the fastest alone."""
    config, count = config_from({}), len(machines.hosts)
    everyone = everyone_of(config, machines)
    ways = considered(config, machines, everyone, {})
    alone = min((way for way in ways if len(way.way.members) == 1), key=lambda way: way.seconds)
    found = {ALONE: plan_of_choice(everyone, alone, {})}
    if count == 1:
        return found
    for each in (way for way in ways if len(way.way.members) == count):
        name = PARTITION if each.way.layers else each.way.exchange.kind
        if name in EXCHANGES and name not in found:
            found[name] = plan_of_choice(everyone, each, {})
    found[SERVER] = choose(config_from({"exchange.kind": SERVER}), machines)[0]
    return found


def _trial(
    title: str, workload: CaseWorkload, option: str, plan: Plan, machines: Machines
) -> Trial:
    """What the planner would have run, as a trial: as many updates as are worth their time."""
    settings = workload.settings()
    settings["exchange.partition"] = "none"
    if option == PARTITION:
        settings["exchange.partition"] = "manual"
        settings["exchange.layers"] = list(plan.feature_layers)
    seconds = plan.predicted["update_seconds"]
    plan = replace(plan, predicted={}, rejected=(), partition="none", feature_layers=())
    kind = "plan"
    if option == ALONE:
        # All hosts at once, as they were measured: hosts of a lab share one machine's memory.
        kind = "alone"
        speeds = [1 / host.updates[-1].seconds.median for host in machines.hosts]
        parts = [speed / max(speeds) for speed in speeds]
        nodes = tuple(
            NodePlan(host=host.name, share=part)
            for host, part in zip(machines.hosts, parts, strict=True)
        )
        plan = Plan(nodes=nodes, batch_size=round(workload.batch * sum(parts)))
    rounds, warmup = next((r, w) for most, r, w in EFFORT if seconds < most)
    return Trial(
        name=title,
        kind=kind,
        settings=settings,
        plan=plan,
        updates=max(1, min(10, round(TURN_SECONDS / seconds))),
        rounds=rounds,
        warmup=warmup,
    )
