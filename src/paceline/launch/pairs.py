"""The launcher's side of `launch.links`: every pair of hosts in turn, and what is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.inspection import AskedHost, apart, asking, collect
from paceline.schema.hosts import Host
from paceline.schema.plain import ONE_LINE
from paceline.secure.sealing import new_secret

SECONDS = 0.4
"""How long bytes are sent in each direction of each pair."""
SLOW = 0.5
"""A link with less than this part of the fastest one's throughput is called slow."""
FAR = 5.0
"""A link with this many times the shortest round trip is called far ..."""
FAR_MS = 2.0
"""... if its round trip is also longer than this."""
CLOCK_SECONDS = 1.0
_ANSWER_SECONDS = 40.0
_CLOCK_ROUNDS = 5
_ANSWERS = {
    "clock": {"time?": float, "error?": ONE_LINE},
    "measure": {"megabits?": float, "round_trip_ms?": float, "error?": ONE_LINE},
}
"""What `launch.links` answers, by what it was asked."""


@dataclass(frozen=True, kw_only=True)
class LinkDirection:
    """One direction between two hosts."""

    source: str
    target: str
    megabits: float = 0.0
    round_trip_ms: float = 0.0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Links:
    """What was measured between hosts."""

    links: tuple[LinkDirection, ...] = ()
    clocks: dict[str, float] = field(default_factory=dict)
    """Seconds that each host's clock is ahead of the launcher's."""
    failures: dict[str, str] = field(default_factory=dict)
    """Hosts that could not take part, and why."""

    def problems(self, known: Collection[tuple[str, str]] = ()) -> list[str]:
        """What is wrong with links and clocks, one sentence each; `known` pairs were told of."""
        found = [
            f"the links of host {name} could not be measured: {reason}"
            for name, reason in self.failures.items()
        ]
        found += [
            f"nothing goes from host {link.source} to {link.target}: {link.error}; check the"
            " firewall, or give `address` another of its addresses in hosts.toml"
            for link in self.links
            if link.error and (link.source, link.target) not in known
        ]
        measured = [link for link in self.links if not link.error]
        if measured:
            found += self._slow_links(measured) + self._far_links(measured)
        found += [
            f"the clock of host {name} is {abs(ahead):.1f} s"
            f" {'ahead of' if ahead > 0 else 'behind'} this machine's: times in its files will look"
            " wrong; run an NTP service there"
            for name, ahead in self.clocks.items()
            if abs(ahead) > CLOCK_SECONDS
        ]
        return found

    def _slow_links(self, measured: list[LinkDirection]) -> list[str]:
        best = max(link.megabits for link in measured)
        slow = [link for link in measured if link.megabits < SLOW * best]
        fastest = next(link for link in measured if link.megabits == best)
        against = f"against {best:,.0f} from {fastest.source} to {fastest.target}"
        found = []
        for name, own in _hosts_whose_links_are_all(slow, measured).items():
            typical = sorted(link.megabits for link in own)[len(own) // 2]
            found.append(
                f"every link of host {name} is slow: {typical:,.0f} Mbit/s {against}; check its"
                " cable, switch port and interface"
            )
            slow = [link for link in slow if link not in own]
        return found + [
            f"the link from host {link.source} to {link.target} is slow: {link.megabits:,.0f}"
            f" Mbit/s {against}"
            for link in slow
        ]

    def _far_links(self, measured: list[LinkDirection]) -> list[str]:
        best = min(link.round_trip_ms for link in measured)
        far = [link for link in measured if link.round_trip_ms > max(FAR_MS, FAR * best)]
        found = []
        for name, own in _hosts_whose_links_are_all(far, measured).items():
            typical = sorted(link.round_trip_ms for link in own)[len(own) // 2]
            found.append(
                f"host {name} is far from all others: {typical:.1f} ms there and back against"
                f" {best:.1f} elsewhere"
            )
            far = [link for link in far if link not in own]
        return found + [
            f"hosts {link.source} and {link.target} are far apart: {link.round_trip_ms:.1f} ms"
            f" there and back against {best:.1f} elsewhere"
            for link in far
        ]


def _hosts_whose_links_are_all(
    bad: list[LinkDirection], links: list[LinkDirection]
) -> dict[str, list[LinkDirection]]:
    """Hosts that one sentence is enough for: all of theirs are bad, and others are not.

    With two hosts nobody can tell whose fault it is.
    """
    names = dict.fromkeys(link.source for link in links)
    found: dict[str, list[LinkDirection]] = {}
    if len(names) < 3:
        return found
    for name in names:
        own = [link for link in links if name in (link.source, link.target)]
        # The fastest link is never bad, so some host always stays without blame.
        if all(link in bad for link in own):
            found[name] = own
    return found


def measure_links(
    hosts: tuple[Host, ...],
    *,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Links:
    """Start `launch.links` on all hosts, and measure each direction of each pair in turn."""
    secret = new_secret()
    failures: dict[str, str] = {}
    with asking(hosts, ["paceline.launch.links"], failures) as asked:
        for each in asked:
            each.tell({"secret": secret, "address": each.host.network_address})
        came = collect(asked, failures, {"port": int})
        ports = {name: answer["port"] for name, answer in came.items()}
        able = [each for each in asked if each.host.name in ports]
        clocks = {each.host.name: ahead for each in able if (ahead := _clock(each)) is not None}
        links = []
        for source in able:
            for target in able:
                if source is not target:
                    say(f"measuring {source.host.name} to {target.host.name}")
                    order = {
                        "do": "measure",
                        "address": target.host.network_address,
                        "port": ports[target.host.name],
                        "seconds": seconds,
                    }
                    links.append(_link(source, target, _order(source, order)))
    return Links(links=tuple(links), clocks=clocks, failures=failures)


def _link(source: AskedHost, target: AskedHost, answer: dict[str, Any]) -> LinkDirection:
    return LinkDirection(
        source=source.host.name,
        target=target.host.name,
        megabits=answer.get("megabits") or 0.0,
        round_trip_ms=answer.get("round_trip_ms") or 0.0,
        error=answer.get("error"),
    )


def _order(asked: AskedHost, order: dict[str, Any]) -> dict[str, Any]:
    if asked.process.poll() is not None:
        return {"error": f"host {asked.host.name} is gone"}
    asked.tell(order)
    failures: dict[str, str] = {}
    answers = collect([asked], failures, _ANSWERS[order["do"]], _ANSWER_SECONDS)
    return answers.get(asked.host.name) or {"error": failures[asked.host.name]}


def _clock(asked: AskedHost) -> float | None:
    """How far a clock is surely ahead, from the quickest of a few questions."""
    best: tuple[float, float] | None = None
    for _ in range(_CLOCK_ROUNDS):
        before = time.time()
        answer = _order(asked, {"do": "clock"})
        after = time.time()
        if answer.get("time") is None:
            return None
        found = (after - before, apart(answer["time"], before, after))
        best = found if best is None or found[0] < best[0] else best
    return best[1] if best else None
