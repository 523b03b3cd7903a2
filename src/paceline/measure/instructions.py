"""Instructions that a processor announces and then cannot run.

Some virtual machines announce AMX, the matrix unit that oneDNN prefers for
bf16, and kill the program that uses it (SIGILL). Seen on one whose processor could
run AMX well: its hypervisor reported 1Ch as the highest CPUID leaf, oneDNN found no
palette in leaf 1Dh, loaded a tile configuration with palette 0 and died at the first
`tilezero`. A crash cannot be caught, so a
process of its own tries it once per machine and the answer is kept in the cache;
where it dies, oneDNN is told to stay below AMX.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from paceline.config.environment import cache_root, instruction_limit, limit_instructions
from paceline.schema import Config

WITHOUT_AMX = "AVX512_CORE_FP16"
_PROBE = """
import torch
torch.set_num_threads(1)
layer = torch.nn.Linear(256, 256)
image = torch.nn.Conv2d(64, 64, 3)
with torch.autocast("cpu", dtype=torch.bfloat16):
    result = layer(torch.ones(64, 256)).float().sum() + image(torch.ones(2, 64, 9, 9)).float().sum()
result.backward()
print(float(result))
"""


def use_safe_instructions(config: Config) -> str | None:
    """Keep oneDNN to what works here, if bf16 may be used; says so when it has to.

    Must come before the first computation of the process.
    """
    if config.numerics.precision == "fp32" or instruction_limit() is not None:
        return None
    if not announces_amx():
        return None
    if amx_works():
        return None
    limit_instructions(WITHOUT_AMX)
    return "this machine announces AMX but cannot run it: bf16 uses AVX-512 instead"


def announces_amx() -> bool:
    """True where the processor says that it has the matrix unit."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def amx_works() -> bool:
    """True where a process that uses the matrix unit survives it."""
    # A new kernel or hypervisor may change the answer; both change this text.
    key = f"{_kernel()} torch {metadata.version('torch')}"
    stored = cache_root() / "amx.json"
    try:
        known = json.loads(stored.read_text())
        if known["key"] == key:
            return bool(known["works"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120)
    works = probe.returncode == 0
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"key": key, "works": works}) + "\n")
    except OSError:
        pass  # asked again next time
    return works


def _kernel() -> str:
    try:
        return Path("/proc/version").read_text().strip()
    except OSError:
        return "unknown"
