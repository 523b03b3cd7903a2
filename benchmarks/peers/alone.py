"""Plain PyTorch in one process: what the losses of all others are compared with.

    python -m benchmarks.peers.alone CONFIG --result FILE [--threads N]

The same loop, batches and optimizer as the other peers have, on this machine or on the first host
of a lab, with torch's own number of threads unless N says otherwise.
"""

from __future__ import annotations

import dataclasses

from benchmarks.peers import common, training


def main() -> None:
    request = dataclasses.replace(common.read_request(__doc__), processes=1)
    job = training.open_job(request, rank=0, world=1, place=0)
    training.train(job, training.plain_step(job), lambda vector: vector)


if __name__ == "__main__":
    main()
