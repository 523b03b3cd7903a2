"""Instructions that a processor announces and then cannot run.

Some virtual machines announce AMX, the matrix unit that oneDNN prefers for bf16, and kill the
program that uses it (SIGILL). Where only the description of the tiles is missing,
`local.tiles` supplies it. A crash cannot be caught, so a process of its own tries
AMX once per machine and the answer is kept in the cache; where it dies all the same, oneDNN is told
to stay below AMX.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.config.environment import (
    amx_allowed,
    cache_root,
    instruction_limit,
    limit_instructions,
)
from paceline.local.tiles import describe_tiles, processor_flags, refuse_bf16
from paceline.schema import Config, encode
from paceline.schema.plain import read_json_file

WITHOUT_AMX = "AVX512_CORE_FP16"
PROBE_SECONDS = 120.0
"""What trying takes at most: far above an import of torch."""
_PROBE = """
import torch
from paceline.local.tiles import describe_tiles

torch.set_num_threads(1)
torch.manual_seed(0)
described = describe_tiles()
for layer, values in (
    (torch.nn.Linear(256, 256), torch.randn(64, 256)),
    (torch.nn.Linear(37, 11), torch.randn(13, 37)),
    (torch.nn.Conv2d(64, 64, 3), torch.randn(2, 64, 9, 9)),
):
    exact = layer(values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(values).float()
    torch.testing.assert_close(result, exact, rtol=0.05, atol=0.05)
    result.sum().backward()
print("described" if described else "works")
"""


@dataclass(frozen=True, kw_only=True)
class Amx:
    """What became of a process that used the matrix unit."""

    works: bool
    described: bool = False
    """True where the hypervisor hides the tiles, and Paceline says what they are."""
    answered: bool = True
    """False where the machine is so busy that there was no answer in time."""


def use_safe_instructions(config: Config, *, all_numerics: bool = False) -> str | None:
    """Keep oneDNN to what works here, if bf16 may be used; says so when it has to.

    `all_numerics`: also what is not allowed is tried. Must come before the first computation of
    the process.
    """
    numerics = config.numerics
    allowed = all_numerics or "bf16" in (numerics.precision, *numerics.allow)
    if numerics.precision == "fp32" or not allowed or instruction_limit() is not None:
        return None
    if not announces_amx():
        return None
    if not amx_allowed():
        limit_instructions(WITHOUT_AMX)
        return "PACELINE_AMX is off: bf16 uses AVX-512 instead of AMX"
    amx = try_amx()
    if amx.works:
        if amx.described and not describe_tiles():
            refuse_bf16()  # the process has computed before
        return None
    limit_instructions(WITHOUT_AMX)
    if not amx.answered:
        return f"AMX did not answer within {PROBE_SECONDS:g} s: this time bf16 uses AVX-512 instead"
    return "this machine announces AMX but cannot run it: bf16 uses AVX-512 instead"


def announces_amx() -> bool:
    """True where the processor says that it has the matrix unit."""
    return "amx_tile" in processor_flags()


def try_amx() -> Amx:
    """Whether a process that uses the matrix unit survives it, and computes right."""
    # A new kernel or hypervisor may change the answer; both change this text.
    key = f"{_kernel()} torch {metadata.version('torch')} paceline {metadata.version('paceline')}"
    stored = cache_root() / "amx.json"
    try:
        known = read_json_file(stored)
        if known["key"] == key:
            return Amx(works=bool(known["works"]), described=bool(known["described"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Amx(works=False, answered=False)
    found = Amx(works=probe.returncode == 0, described=probe.stdout.strip() == "described")
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"key": key, **encode(found)}) + "\n")
    except OSError:
        pass  # asked again next time
    return found


def _kernel() -> str:
    try:
        return Path("/proc/version").read_text().strip()
    except OSError:
        return "unknown"
