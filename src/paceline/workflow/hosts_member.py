"""What an agent starts to train one node in legs: `python -m paceline.workflow.hosts_member`."""

from __future__ import annotations

import sys
from typing import Any

from paceline.launch.member import main
from paceline.launch.rank import leave
from paceline.run import RunDirectory
from paceline.schema import RankContext, read_json
from paceline.schema.legs import LegsOrder


def run_node(run: RunDirectory, context: RankContext, *, silent: bool, watch: Any) -> int:
    """Lead, or follow, as the launcher has left word."""
    from paceline.workflow.hosts import run_legs

    path = run.path / f"node-{context.node}" / "legs.json"
    order = read_json(LegsOrder, path)
    path.unlink()
    return run_legs(run, context, order, silent=silent, watch=watch)


if __name__ == "__main__":
    leave(main(sys.argv[1], sys.argv[2], run_node))
