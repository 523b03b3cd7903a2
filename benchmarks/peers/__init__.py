"""Other systems that Paceline is measured against: one file each, run from Paceline's source tree.

    python -m benchmarks.peers.NAME CONFIG --result FILE [--processes N] [--threads N]

CONFIG is what `paceline train` reads. A peer trains that on the hosts of the lab it runs in, or on
this machine, and writes one JSON object to FILE. One that is not installed says so in its last
line, with the line that installs it (`paceline peers install NAME`), and ends with exit code 3.
"""
