"""A pilot that goes by names instead of times: what is tested must not depend on a busy machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from unittest.mock import patch

from paceline.plan import pilot
from paceline.plan.pilot import Decision, Knowledge
from paceline.workflow import legs
from paceline.workflow.hosts_training import HostsTraining


@contextlib.contextmanager
def pilot_wants(wants: Sequence[str]) -> Iterator[None]:
    """In a process of a node: the pilot decides by names instead of times."""
    decides = HostsTraining._decide

    def next_leg(known: Knowledge) -> Decision:
        names = {option.name for option in known.options} - known.out.keys()
        usable = [name for name in wants if name in names]
        if not known.legs or not usable:
            return pilot.next_leg(known)
        name, left = usable[0], known.updates - known.position
        if any(leg.name == name and leg.updates for leg in known.legs):
            return Decision(name=name, updates=min(10, left), role="keep", best=name)
        best = known.legs[-1].best
        return Decision(name=name, updates=min(10, left), role="trial", best=best)

    def decide(self: HostsTraining) -> Decision:
        if self.known.legs:
            self._start_ranks_if_they_fit()
            while not self._ready_ranks() and any(
                option.ranks and option.name not in self.known.out for option in self.known.options
            ):
                time.sleep(0.1)
        return decides(self)

    with contextlib.ExitStack() as stack:
        if wants:
            stack.enter_context(patch.object(legs, "next_leg", next_leg))
            stack.enter_context(patch.object(HostsTraining, "_decide", decide))
        yield
