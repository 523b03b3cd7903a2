"""Why a plan was chosen for measured machines, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.plan.prices import Priced, cause, named_exchange
from paceline.plan.teams import Way
from paceline.schema import Config, Plan
from paceline.schema.machines import Machines
from paceline.text import rate


@dataclass(frozen=True, kw_only=True)
class Considered:
    """A way on measured machines, priced."""

    way: Way
    priced: Priced
    fits: bool

    @property
    def name(self) -> str:
        """As plan.json and tables show it."""
        return self.way.name

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.priced.cost.seconds


def why_not(option: Considered, chosen: Considered) -> str:
    """Why another way was chosen, with what this one would take."""
    cost = option.priced.cost
    time = f"{cost.seconds:.3g} s per update of {cost.batch}"
    if not option.fits:
        return f"{time}; needs {option.priced.memory_mb:,.0f} MB on a node, more than is free"
    ratio = option.seconds / chosen.seconds
    if ratio <= 1.0205:
        return f"{time}; as fast, but with more machines or a less simple exchange"
    if len(option.way.members) == 1:
        return f"{time}; {ratio:.2f}x slower: one machine has less to compute with"
    return f"{time}; {ratio:.2f}x slower, because {cause(option.way.exchange, cost)}"


def left_out(
    machines: Machines, options: Sequence[Considered], chosen: Considered
) -> dict[str, str]:
    """Per machine that does not train, what would happen with it."""
    used = {
        chosen.way.members[portion.kind]
        for portion in chosen.priced.cost.portions
        if portion.samples
    }
    found = {}
    for number, host in enumerate(machines.hosts):
        if number in used:
            continue
        teams_with = [o for o in options if number in o.way.members and len(o.way.members) > 1]
        valid = [option for option in teams_with if option.fits] or teams_with
        if not valid or number in chosen.way.members:
            found[host.name] = "so slow that no sample of a batch is left for it"
            continue
        with_it = min(valid, key=lambda option: option.seconds)
        images, best = with_it.priced.images_per_second, chosen.priced.images_per_second
        found[host.name] = (
            f"with it {rate(images)} images/s instead of {rate(best)} ({images / best:.2f}x),"
            f" because {cause(with_it.way.exchange, with_it.priced.cost)}"
        )
    return found


def lines(machines: Machines, plan: Plan, chosen: Considered, away: Mapping[str, str]) -> list[str]:
    """Five lines for a person who has never done this."""
    samples = {portion.kind: portion.samples for portion in chosen.priced.cost.portions}
    names = {member: machines.hosts[member].name for member in chosen.way.members}
    taken = [
        (names[member], samples.get(place, 0))
        for place, member in enumerate(chosen.way.members)
        if samples.get(place, 0)
    ]
    total = len(machines.hosts)
    listed = ", ".join(name for name, _ in taken)
    machine = "machine" if total == 1 else "machines"
    return [
        f"Machines: {listed} ({len(taken)} of {total} {machine}).",
        _shares_line(plan.batch_size, taken),
        _exchange_line(chosen, len(taken)),
        _expected_line(chosen, several=len(taken) > 1),
        _others_line(plan, away),
    ]


def _shares_line(batch: int, taken: Sequence[tuple[str, int]]) -> str:
    if len(taken) == 1:
        return f"Share: all {batch} samples of an update go to {taken[0][0]}."
    listed = ", ".join(f"{name} takes {count}" for name, count in taken[:6])
    more = ", ..." if len(taken) > 6 else ""
    equal = len({count for _, count in taken}) == 1
    why = "they are equally fast" if equal else "so all are ready together"
    return f"Share: of {batch} samples per update {listed}{more}: {why}."


def _exchange_line(chosen: Considered, count: int) -> str:
    if count == 1:
        return "Exchange: none is needed on one machine."
    cost, exchange = chosen.priced.cost, chosen.way.exchange
    text = f"Exchange: {exchange.name}, {cost.bytes_sent / 1e6:,.3g} MB per machine and update"
    if not chosen.way.layers:
        return f"{text}."
    return f"{text}, because {', '.join(chosen.way.layers)} are divided between machines."


def _expected_line(chosen: Considered, *, several: bool) -> str:
    cost, priced = chosen.priced.cost, chosen.priced
    parts = {
        "computing": cost.compute,
        "waiting for the network": cost.exposed,
        "waiting for each other": cost.waiting,
        "waiting for data": cost.data,
    }
    where = ", ".join(
        f"{seconds / cost.seconds:.0%} {name}"
        for name, seconds in parts.items()
        if seconds >= 0.005 * cost.seconds
    )
    gain = ""
    if several:
        low, high = priced.speedup_low, priced.speedup_high
        gain = f", {priced.speedup:.2f}x the fastest alone ({low:.2f} to {high:.2f})"
    return f"Expected: {rate(cost.images_per_second)} images/s{gain}; time goes to {where}."


def _others_line(plan: Plan, away: Mapping[str, str]) -> str:
    if away:
        name, why = next(iter(away.items()))
        more = f" (and {len(away) - 1} more)" if len(away) > 1 else ""
        return f"Left out: {name}{more}: {why}."
    if not plan.rejected:
        return "Nothing else was possible."
    other = max(plan.rejected, key=lambda each: each.images_per_second or 0.0)
    return f"Next best: {other.option}: {other.reason}."


def asked_lines(config: Config, plan: Plan) -> list[str]:
    """What there is to say of an exchange that was asked for by name."""
    names = ", ".join(node.host for node in plan.nodes)
    name = named_exchange(config.exchange, len(plan.nodes)).name
    sent = plan.predicted["bytes_per_update"] / 1e6
    return [
        f"Machines: {names}, all of them, because {plan.reason}.",
        f"Exchange: {name}, {sent:,.3g} MB per machine and update.",
        f"Expected: {rate(plan.predicted['images_per_second'])} images/s.",
    ]
