"""A script whose ranks do what they are told, without torch: MODE [ARGUMENTS]..."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
MODE = sys.argv[1]
CLOSED = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def wait_for(name: str) -> None:
    end = time.monotonic() + 300
    while not Path(name).exists() and time.monotonic() < end:
        time.sleep(0.02)


if MODE == "tell":
    print(json.dumps({"rank": RANK, "argv": sys.argv[1:], "place": str(Path.cwd()),
                      "cores": sorted(os.sched_getaffinity(0)),
                      "variables": dict(os.environ)}))  # fmt: skip
elif MODE == "raise":
    if RANK == 1:
        print("about to fail", flush=True)
        raise ValueError("the sample of doom")
    wait_for("never")
elif MODE == "avalanche":  # as after destroy_process_group() in a `finally`: the cause comes second
    if RANK == 1:
        Path("closed").touch()
        time.sleep(0.3)
        try:
            raise ValueError("the cause")
        except ValueError:
            import traceback

            traceback.print_exc()
        sys.exit(5)
    wait_for("closed")
    raise RuntimeError(CLOSED)
elif MODE == "kill":
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for("never")
elif MODE == "stall":
    if RANK == 1:
        wait_long = os.open("fifo", os.O_RDONLY)  # until somebody opens the other end
        os.close(wait_long)
    else:
        while not Path("go").exists():
            print("working", flush=True)
            time.sleep(0.05)
elif MODE == "stay":
    child = subprocess.Popen(["sleep", "1000"])
    Path(f"child-{RANK}.partial").write_text(str(child.pid))
    Path(f"child-{RANK}.partial").rename(f"child-{RANK}")
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        Path(f"saved-{RANK}").touch()
        raise
elif MODE == "import":
    import no_such_module  # noqa: F401
