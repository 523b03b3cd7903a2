"""How long a host that has fallen silent is waited for.

Nobody knows whether it is slow or gone. Waiting costs the seconds of all; going on without it costs
a handover, another one when it is back, and slower updates in between. Whoever waits until the one
costs as much as the other never loses more than twice what knowing would have cost.
"""

from __future__ import annotations

LEAST_SECONDS = 5.0
"""Ten heartbeats: a machine that is busy, or a link that was cut for a moment, is no loss."""


def cost_of_going_on(*, with_it: float, without: float, handover: float, back: float) -> float:
    """Seconds that it costs to go on without a host that is there again at once.

    `with_it` and `without`: seconds of an update; `handover`: from one team to another; `back`:
    until a host that was lost trains again. The handovers there and back, and while it is away the
    part of every second that its work would have saved:

        2 * handover + back * (1 - with_it / without)

    A host that saves nothing need not come back: one handover.

    >>> cost_of_going_on(with_it=0.2, without=0.4, handover=1.0, back=10.0)
    7.0
    """
    if without <= with_it:
        return handover
    return 2 * handover + back * (1 - with_it / without)


def patience(
    *, with_it: float, without: float, handover: float, back: float, limit: float
) -> float:
    """Seconds that a silent host is waited for, at most `limit` (train.silence)."""
    cost = cost_of_going_on(with_it=with_it, without=without, handover=handover, back=back)
    return min(limit, max(LEAST_SECONDS, cost))
