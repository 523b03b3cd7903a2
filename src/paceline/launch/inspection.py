"""The launcher's side of the checks: ask all hosts at once, compare, refuse in plain words."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.environment import passed_variables
from paceline.errors import UserError, shortened
from paceline.launch.ssh import ssh_words
from paceline.references import is_reference
from paceline.schema import Config
from paceline.schema.hosts import Host
from paceline.schema.plain import ONE_LINE, checked, parse_json

ANSWER_SECONDS = 45.0
CLOCK_SECONDS = 30.0
"""Clocks further apart than this make times in logs misleading."""
LONGEST_ANSWER = 2**20
"""Bytes of a line that a host prints; a longer one is no answer of ours."""
FACTS = {
    "host": ONE_LINE, "versions": {"*": ONE_LINE}, "mpi?": ONE_LINE, "cores": int, "usable": int,
    "physical": int, "devices": int,
    "memory_mb": int, "time": float, "data": ONE_LINE, "sources": {"*": ONE_LINE}, "port": int,
    "free_port": int,
}  # fmt: skip
"""What `launch.checks` answers first ..."""
REACHED = {
    "reached": {"*": {"error?": ONE_LINE, "seconds?": float, "from?": ONE_LINE}},
    "interface?": [ONE_LINE],
}
"""... and then."""
_SAME = "is it of the same version? `paceline hosts setup` makes hosts equal"
_MUST_AGREE = ("paceline", "torch", "python")
_REMEDIES = (
    # What ssh or Python says last -> what to do about it.
    ("directory: 'ssh'", "install the ssh client on this machine"),
    ("No module named", "its Python lacks Paceline: set `python` in hosts.toml, or set the host"
     " up with `paceline hosts setup`"),
    ("Permission denied", "ssh asks no password here: put your key there with ssh-copy-id, and the"
     " user's name into `address` or ~/.ssh/config"),
    ("Host key verification failed", "log in there once by hand with ssh, and accept its key"),
    ("resolve", "its name is not known here: give `address` in hosts.toml"),
    ("No route to host", "is it switched on, and on this network?"),
    ("timed out", "is it switched on, and does its firewall let ssh in?"),
    ("Connection refused", "is its ssh service running?"),
    ("not found", "no such program there: set `python` in hosts.toml, or set the host up with"
     " `paceline hosts setup`"),
    ("No such file", "no such program there: set `python` in hosts.toml, or set the host up with"
     " `paceline hosts setup`"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the hosts said of themselves."""

    facts: dict[str, dict[str, Any]]
    """By the host's name."""
    reached: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Who reached whom, in how many seconds or why not."""
    networks: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    """Interface and network by which each host reaches the others."""
    failures: dict[str, str] = field(default_factory=dict)
    """Hosts that did not answer, and what ssh or Python said."""
    clocks: dict[str, float] = field(default_factory=dict)
    """Seconds that each host's clock is ahead of the launcher's."""

    @property
    def network(self) -> str | None:
        """The network that joins all hosts, if it is one and the same."""
        found = {place[1] for place in self.networks.values() if place is not None}
        return found.pop() if len(found) == 1 and None not in self.networks.values() else None

    @property
    def interface(self) -> str | None:
        """The interface by which all hosts reach each other, where its name is the same."""
        found = {place[0] for place in self.networks.values() if place is not None}
        return found.pop() if len(found) == 1 and None not in self.networks.values() else None

    def mpi(self) -> str | None:
        """The MPI that all hosts have, or None."""
        found = {facts["mpi"] for facts in self.facts.values()}
        return found.pop() if len(found) == 1 else None

    def problems(self) -> list[str]:
        """Why these hosts cannot train together, one sentence each."""
        found = [f"host {name} does not answer: {reason}" for name, reason in self.failures.items()]
        names = list(self.facts)
        if not names:
            return found
        first = names[0]
        for package in _MUST_AGREE:
            versions = {name: self.facts[name]["versions"].get(package) for name in names}
            if package == "python":
                versions = {n: ".".join(str(v).split(".")[:2]) for n, v in versions.items()}
            found += [
                f"host {name} has {package} {versions[name] or 'not at all'} but {first} has"
                f" {versions[first]}: install the same version on all hosts"
                for name in names[1:]
                if versions[name] != versions[first]
            ]
        found += self._data_problems(names)
        found += [
            f"host {name} cannot reach {other}: {answer['error']}; check its firewall, or give"
            " `address` another of its addresses in hosts.toml"
            for name, answers in self.reached.items()
            for other, answer in answers.items()
            if answer.get("error")
        ]
        return found

    def _data_problems(self, names: list[str]) -> list[str]:
        found = [
            f"host {name} does not have the data: put it where data.root says, or point"
            " PACELINE_DATA to it on that host"
            for name in names
            if self.facts[name]["data"] == "none"
        ]
        having = [name for name in names if self.facts[name]["data"] != "none"]
        found += [
            f"host {name} has other data than {having[0]}: the names or sizes of its files differ;"
            " copy one to the other"
            for name in having[1:]
            if self.facts[name]["data"] != self.facts[having[0]]["data"]
        ]
        for source in self.facts[names[0]]["sources"]:
            hashes = {name: self.facts[name]["sources"].get(source, "none") for name in names}
            found += [
                f"host {name} does not have {source}: copy it there, at the same path"
                for name in names
                if hashes[name] == "none"
            ]
            found += [
                f"host {name} has another {source} than {names[0]}: copy one to the other"
                for name in names[1:]
                if "none" not in (hashes[name], hashes[names[0]])
                and hashes[name] != hashes[names[0]]
            ]
        return found

    def warnings(self) -> list[str]:
        """What is odd but stops nothing."""
        return [
            f"the clock of host {name} is {abs(ahead):.0f} s"
            f" {'ahead of' if ahead > 0 else 'behind'} this machine's: times in its files will look"
            " wrong"
            for name, ahead in self.clocks.items()
            if abs(ahead) > CLOCK_SECONDS
        ]


def wanted_facts(config: Config) -> dict[str, Any]:
    """What the checks must know of a configuration."""
    work = config.workload
    named = (*work.code.values(), config.optimizer.name)
    sources = [name for name in named if is_reference(name)]
    if work.weights:
        sources.append(work.weights)
    return {
        "data": work.data,
        "root": config.data.root,
        "cache": config.data.cache,
        "sources": sources,
        "variables": passed_variables(),
        "folder": str(Path.cwd()),
    }


def with_remedy(words: str) -> str:
    """What ssh or Python said last, and what to do about it where that is known."""
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in words), None)
    return f"{words} ({remedy})" if remedy else words


class AskedHost:
    """A host on which a command runs that answers in lines of JSON."""

    def __init__(self, host: Host, command: list[str]) -> None:
        self.host = host
        self.process = subprocess.Popen(
            ssh_words(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.sent = time.time()
        self._rest = b""

    def read(self) -> tuple[dict[str, Any] | None, bool]:
        """The answer if it has come, and whether one may still come."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_ANSWER:
            self._rest = b""
        found = next(filter(None, map(read_object, lines)), None)
        return found, bool(data) and found is None

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def last_words(self, waited: float | None = None) -> str:
        """Why there was no answer: it has ended, or it was `waited` for in vain."""
        self.process.kill()
        _, errors = self.process.communicate(timeout=10)
        lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
        last = shortened(lines[-1]) if lines else ""
        if waited is None:
            return with_remedy(last or "it ended without a word")
        words = f"nothing came within {waited:.0f} s (a busy host, or a login script that waits?)"
        return f"{words}; its last words: {with_remedy(last)}" if lines else words

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)


@contextlib.contextmanager
def asking(
    hosts: tuple[Host, ...], words: list[str], failures: dict[str, str]
) -> Iterator[list[AskedHost]]:
    """`python -m WORDS` on all hosts; who cannot be asked is noted with the reason."""
    asked: list[AskedHost] = []
    try:
        for host in hosts:
            try:
                asked.append(AskedHost(host, [host.python or sys.executable, "-m", *words]))
            except OSError as error:
                failures[host.name] = with_remedy(str(error))
        yield asked
    finally:
        for each in asked:
            each.close()


def inspect_hosts(
    hosts: tuple[Host, ...], wanted: dict[str, Any], *, seconds: float = ANSWER_SECONDS
) -> Inspection:
    """Ask all hosts at once what they are, and whether they reach each other."""
    failures: dict[str, str] = {}
    clocks: dict[str, float] = {}
    with asking(hosts, ["paceline.launch.checks", json.dumps(wanted)], failures) as asked:
        facts = collect(asked, failures, FACTS, seconds)
        now = time.time()
        for name, found in facts.items():
            # Between asking and now: an error of seconds at most, which is enough to warn.
            clocks[name] = apart(
                found["time"], next(a.sent for a in asked if a.host.name == name), now
            )
        able = [each for each in asked if each.host.name in facts]
        for each in able:
            peers = [
                [other.host.name, other.host.network_address, facts[other.host.name]["port"]]
                for other in able
                if other is not each
            ]
            each.tell({"peers": peers})
        answers = collect(able, failures, REACHED, seconds)
    return Inspection(
        facts={name: {"mpi": None, **found} for name, found in facts.items()},
        reached={name: answer["reached"] for name, answer in answers.items()},
        networks={
            name: (answer["interface"][0], answer["interface"][1])
            if len(answer.get("interface") or ()) == 2
            else None
            for name, answer in answers.items()
        },
        failures=failures,
        clocks=clocks,
    )


def apart(theirs: float, before: float, after: float) -> float:
    """By how much a clock read between two moments is surely ahead of ours; negative: behind."""
    if theirs < before:
        return theirs - before
    return max(0.0, theirs - after)


def read_object(line: bytes) -> dict[str, Any] | None:
    """A table that a host has printed; None for what else a login script prints."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def collect(
    asked: list[AskedHost],
    failures: dict[str, str],
    shape: Mapping[str, Any],
    seconds: float = ANSWER_SECONDS,
) -> dict[str, dict[str, Any]]:
    """One line of JSON from every host, of that shape; who gives none is noted with the reason."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for each in asked:
            assert each.process.stdout is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, each)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.5):
                each = key.data
                answer, may_come = each.read()
                if answer is not None:
                    try:
                        found[each.host.name] = checked(answer, shape)
                    except ValueError as error:
                        failures[each.host.name] = f"its answer cannot be used: {error}; {_SAME}"
                elif not may_come:
                    failures[each.host.name] = each.last_words()
                if not may_come:
                    selector.unregister(key.fileobj)
        for key in list(selector.get_map().values()):
            failures[key.data.host.name] = key.data.last_words(seconds)
    return found


_OFF = ("No route to host", "timed out", "Connection refused", "nothing came within")
"""Of a host whose name is known, and which is off, starts up, or is cut off."""


def is_off(failure: str) -> bool:
    """Whether a host that did not answer may do so later, by what ssh said."""
    return any(sign in failure for sign in _OFF)


def check_hosts(hosts: tuple[Host, ...], config: Config) -> Inspection:
    """The inspection of hosts that may train together; else an error with every reason."""
    found = inspect_hosts(hosts, wanted_facts(config))
    problems = found.problems()
    if problems:
        raise UserError("\n".join(problems))
    return found
