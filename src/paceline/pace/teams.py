"""Which ranks of a loop of one's own may work without the others, and with which cores. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.pilot import Option

Members = tuple[int, ...]
MOST_HOSTS = 4
"""Of so many hosts each is left out in turn; of more, halves alone are tried."""
NEAR = 0.1
"""What ranks of one host are expected to wait for each other, as a part of what hosts do."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank was started with."""

    host: str
    threads: int
    cores: tuple[int, ...]


def teams(hosts: Sequence[str]) -> list[Members]:
    """Ranks that may work together, by the host of each: the smallest team first, all last.

    The first rank is in all of them: what it prints, logs and saves is always of the whole.

    >>> teams(["a", "a"]), teams(["a", "b", "b"])
    ([(0,), (0, 1)], [(0,), (0, 1, 2)])
    >>> teams(["a", "a", "a", "a"])
    [(0,), (0, 1), (0, 1, 2, 3)]
    >>> teams(["a", "b", "c"])
    [(0,), (0, 1), (0, 2), (0, 1, 2)]
    """
    names = list(dict.fromkeys(hosts))
    chosen: list[Sequence[str]] = [names[:1], names[: (len(names) + 1) // 2], names]
    if len(names) <= MOST_HOSTS:
        chosen += [[name for name in names if name != other] for other in names[1:]]
    found = [tuple(r for r, host in enumerate(hosts) if host in each) for each in chosen]
    of_first = found[0]
    found += [(0,), of_first[: (len(of_first) + 1) // 2]]
    found = [each for each in found if each[0] == 0]
    return sorted(set(found), key=lambda each: (len(each), each))


def team_name(members: Members, ranks: int) -> str:
    """In words.

    >>> team_name((0,), 4), team_name((0, 1), 4), team_name((0, 1, 2, 3), 4)
    ('rank 0 alone', 'ranks 0 and 1', 'all 4 ranks')
    """
    if len(members) == ranks:
        return f"all {ranks} ranks"
    if len(members) == 1:
        return f"rank {members[0]} alone"
    return f"ranks {', '.join(map(str, members[:-1]))} and {members[-1]}"


def seats_of(members: Members, seats: Sequence[Seat]) -> dict[int, Seat]:
    """The threads and cores of those who work: they get those of the ranks of their host that wait.

    >>> pair = [Seat(host="a", threads=1, cores=(0,)), Seat(host="a", threads=1, cores=(1,))]
    >>> seats_of((0,), pair)[0]
    Seat(host='a', threads=2, cores=(0, 1))
    """
    found = {}
    for host in dict.fromkeys(seats[member].host for member in members):
        here = [rank for rank, seat in enumerate(seats) if seat.host == host]
        working = [rank for rank in here if rank in members]
        resting = [rank for rank in here if rank not in members]
        for place, rank in enumerate(working):
            mine = [rank, *resting[place :: len(working)]]
            cores = sorted({core for each in mine for core in seats[each].cores})
            threads = sum(seats[each].threads for each in mine)
            found[rank] = Seat(host=host, threads=min(threads, len(cores)), cores=tuple(cores))
    return found


def options(
    found: Sequence[Members], seats: Sequence[Seat], speeds: Sequence[float], *, batch: float,
    seconds: float, waiting: float, setup: float,
) -> list[Option]:  # fmt: skip
    """The teams as the pilot's options, with what an update of each may take beside one of all.

    `speeds`: samples per second of every rank, as it has computed; `seconds`: of an update of all
    ranks, of which they waited for each other for `waiting`. Trials show what is true.
    """
    everyone = found[-1]
    result = []
    for members in found:
        name = team_name(members, len(seats))
        factors = {}
        if members != everyone and all(speed > 0 for speed in speeds) and seconds > 0:
            given = seats_of(members, seats)
            speed = sum(speeds[m] * given[m].threads / seats[m].threads for m in members)
            far = len({seats[m].host for m in members}) > 1
            all_far = len({seat.host for seat in seats}) > 1
            near = NEAR if all_far and not far else 1.0
            wait = 0.0 if len(members) == 1 else near * waiting
            factors[name] = (batch / speed + wait) / seconds
        elif members != everyone:
            factors[name] = 1.0
        result.append(Option(name=name, factors=factors, setup_seconds=max(setup, 1e-6)))
    return result
