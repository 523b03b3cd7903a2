"""`paceline.train` is a function to its users, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys


def test_train_can_be_called_after_the_stage_of_that_name_was_imported() -> None:
    program = (
        "import paceline, paceline.training.loop\n"
        "try:\n"
        "    paceline.train(paceline.Workload(data='no such data'), run='never-made')\n"
        "except paceline.UserError as error:\n"
        "    print('refused', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.startswith("refused")
