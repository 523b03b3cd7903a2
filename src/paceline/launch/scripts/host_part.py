"""What an agent starts on its host: `python -m paceline.launch.scripts.host_part RUN SILENT`.

Every line that a rank prints goes on, with its rank before it, to the agent and so to the launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.config.environment import agent_process, rank_context, take_report
from paceline.errors import PacelineError
from paceline.launch.rank import die_with_parent, leave_report, write_failure
from paceline.launch.scripts.screen import Memory
from paceline.launch.scripts.supervision import Supervisor
from paceline.run import RunDirectory
from paceline.schema import Plan, RankContext, encode, read_json
from paceline.schema.script import Script, read_script
from paceline.signals import handled


class Relay(Memory):
    """Passes everything on at once: the launcher decides what is shown."""

    def hear(self, rank: int, text: str, is_error: bool) -> None:
        super().hear(rank, text, is_error)
        stream = sys.stderr if is_error else sys.stdout
        print(f"[rank {rank}] {text}", file=stream, flush=True)


def main(run_path: str) -> int:
    """Run this host's ranks; leave word in RUN/node-N/error.json where one has failed."""
    die_with_parent(agent_process())
    run, context, room = RunDirectory(Path(run_path)), rank_context(), take_report()
    folder = run.path / f"node-{context.node}"
    try:
        return _watch(run, context, read_script(run.config), room)
    except PacelineError as error:
        write_failure(folder, context, error, room)
        return 1


def _watch(run: RunDirectory, context: RankContext, script: Script, room: int | None) -> int:
    host = read_json(Plan, run.plan).nodes[context.node].host
    supervisor = Supervisor(script, run, context, host=host, memory=Relay(), say=lambda text: None)
    with handled(supervisor.note_signal):
        outcome = supervisor.watch()
    if not outcome.failed or outcome.signalled is not None:
        return 128 + outcome.signalled if outcome.signalled is not None else 0
    report = {
        "rank": outcome.failed[0].rank,
        "kind": "WorkerError",
        "message": outcome.failed[0].how,
        "expected": True,
        "traceback": "",
        "exits": [encode(end) for end in outcome.exits],
    }
    leave_report(run.path / f"node-{context.node}", report, room)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
