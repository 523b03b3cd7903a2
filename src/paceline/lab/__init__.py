"""The lab: an emulated cluster on one Linux machine.

from paceline.lab import Lab, LabSpec

with Lab(LabSpec.load("examples/lab/two-hosts.toml")) as lab:
    lab.run(["mpiexec", "-H", "a,b", "python", "train.py"])
    print(lab.counters()["a"].bytes_sent)
"""

from paceline.lab.cluster import Lab
from paceline.lab.groups import Usage
from paceline.lab.network import Counters
from paceline.lab.process import LabProcess
from paceline.lab.spec import FaultSpec, HostSpec, LabSpec, LinkSpec

__all__ = [
    "Counters",
    "FaultSpec",
    "HostSpec",
    "Lab",
    "LabProcess",
    "LabSpec",
    "LinkSpec",
    "Usage",
]
