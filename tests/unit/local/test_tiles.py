"""AMX where the hypervisor hides its tiles: what this process may see and feel of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.environment import amx_allowed
from paceline.errors import ConfigError
from paceline.hardware import instructions
from paceline.local.tiles import PALETTES, filled_in, processor_flags

needs_faulting = pytest.mark.skipif(
    "cpuid_fault" not in processor_flags(),
    reason="the processor or kernel cannot turn CPUID into a signal",
)
needs_amx = pytest.mark.skipif(
    "amx_tile" not in processor_flags(), reason="the processor announces no AMX"
)


def run_python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600)


def test_only_an_empty_tile_leaf_is_filled_in() -> None:
    empty = (0, 0, 0, 0)
    assert filled_in(0x1D, 0, empty) == (1, 0, 0, 0)
    assert filled_in(0x1D, 1, empty) == PALETTES[1] == (0x04002000, 0x00080040, 16, 0)
    assert filled_in(0x1D, 2, empty) == empty
    assert filled_in(0x1D, 0, (2, 0, 0, 0)) == (2, 0, 0, 0)
    assert filled_in(0x1C, 0, empty) == empty


@needs_amx
@needs_faulting
def test_bf16_computes_right_and_nothing_is_left_behind() -> None:
    done = run_python(
        """
import ctypes, faulthandler, signal, threading
import torch
from paceline.local.tiles import describe_tiles

faulthandler.enable()
class Action(ctypes.Structure):
    _fields_ = (("handler", ctypes.c_void_p), ("rest", ctypes.c_char * 200))
libc = ctypes.CDLL(None)
def handlers():
    found = []
    for number in (signal.SIGSEGV, signal.SIGTRAP):
        action = Action()
        libc.sigaction(int(number), None, ctypes.byref(action))
        found.append(action.handler)
    return found
before, threads = handlers(), torch.get_num_threads()
assert describe_tiles() == describe_tiles()
assert handlers() == before
assert torch.get_num_threads() == threads
ARCH_GET_CPUID = 0x1011
assert libc.syscall(158, ARCH_GET_CPUID, 0) == 1
inside = []
thread = threading.Thread(target=lambda: inside.append(libc.syscall(158, ARCH_GET_CPUID, 0)))
thread.start(); thread.join()
assert inside == [1]

torch.manual_seed(0)
layer = torch.nn.Conv2d(64, 64, 3)
values = torch.randn(8, 64, 20, 20)
exact = layer(values)
with torch.autocast("cpu", dtype=torch.bfloat16):
    result = layer(values).float()
torch.testing.assert_close(result, exact, rtol=0.05, atol=0.05)
result.sum().backward()
# A convolution that finds no tiles takes another way; a product of matrices dies.
square = torch.randn(256, 256)
product = (square.bfloat16() @ square.bfloat16()).float()
torch.testing.assert_close(product, square @ square, rtol=0.05, atol=1.0)
print("alive")
"""
    )
    assert done.stdout == "alive\n", (done.returncode, done.stderr)


@needs_faulting
def test_a_fault_that_is_not_cpuid_ends_the_process_as_ever() -> None:
    done = run_python(
        "import ctypes\n"
        "from paceline.local.tiles import correcting_cpuid\n"
        "correcting_cpuid(lambda: ctypes.string_at(8))\n"
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr


@needs_amx
@needs_faulting
def test_cpuid_still_answers_while_it_is_watched() -> None:
    done = run_python(
        """
import ctypes, mmap
from paceline.local.tiles import correcting_cpuid

# push rbx; mov eax, edi; mov ecx, esi; cpuid; mov eax, ebx; pop rbx; ret
code = bytes.fromhex("53 89f8 89f1 0fa2 89d8 5b c3")
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ebx = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(address)
plain = [ebx(0, 0), ebx(7, 0)]
seen = []
changed = correcting_cpuid(lambda: seen.extend([ebx(0, 0), ebx(7, 0), ebx(0x1D, 1)]))
assert seen[:2] == plain, (seen, plain)
assert seen[2] == 64 | 8 << 16, hex(seen[2])
assert changed == (ebx(0x1D, 1) == 0)
print("alive")
"""
    )
    assert done.stdout == "alive\n", (done.returncode, done.stderr)


@needs_amx
@needs_faulting
def test_fp32_before_does_not_let_bf16_end_the_process() -> None:
    done = run_python(
        """
import torch
from paceline.errors import StrategyError
from paceline.local.tiles import check_bf16
from paceline.hardware.instructions import try_amx, use_safe_instructions
from paceline.schema import Config

layer = torch.nn.Conv2d(64, 64, 3)
layer(torch.ones(2, 64, 9, 9)).sum().backward()  # oneDNN has now asked for the tiles
use_safe_instructions(Config(), all_numerics=True)
amx = try_amx()
try:
    check_bf16()
    print("alive" if not amx.described else "not refused")
except StrategyError as error:
    print("alive" if amx.described and "new process" in str(error) else error)
"""
    )
    assert done.stdout == "alive\n", (done.returncode, done.stdout, done.stderr)


@needs_amx
@needs_faulting
def test_a_process_that_begins_with_fp32_can_go_on_in_bf16() -> None:
    done = run_python(
        """
import torch
from paceline.schema import Config
from paceline.training.parts import make_parts

parts = make_parts(Config())
model = parts.build_model()
image = torch.randn(8, *parts.dataset.sample_shape)
exact = model.eval()(image)
exact.sum().backward()
layer = torch.nn.Linear(37, 11)
layer(torch.randn(13, 37)).sum().backward()
with torch.autocast("cpu", dtype=torch.bfloat16):
    result = model(image).float()
    other = layer(torch.randn(13, 37)).float()
torch.testing.assert_close(result, exact, rtol=0.1, atol=0.1)
(result.sum() + other.sum()).backward()
print("alive")
"""
    )
    assert done.stdout == "alive\n", (done.returncode, done.stdout, done.stderr)


def test_amx_can_be_switched_off() -> None:
    environment = {**os.environ, "PACELINE_AMX": "off"}
    environment.pop("ONEDNN_MAX_CPU_ISA", None)
    text = """
from paceline.config.environment import instruction_limit
from paceline.local import tiles
from paceline.hardware import instructions
from paceline.schema import Config
from paceline.training.parts import make_parts

instructions.announces_amx = lambda: True
tiles.correcting_cpuid = instructions.try_amx = None  # neither may be called
said = instructions.use_safe_instructions(Config(), all_numerics=True)
make_parts(Config())
assert "PACELINE_AMX is off" in said, said
assert instruction_limit() == instructions.WITHOUT_AMX
print("off")
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.stdout == "off\n", done.stderr


def test_a_machine_too_busy_to_answer_goes_without_amx_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "PROBE_SECONDS", 0.01)  # torch takes longer to import
    monkeypatch.setattr(instructions, "cache_root", lambda: tmp_path)
    found = instructions.try_amx()
    assert not found.works
    assert not found.answered
    assert not list(tmp_path.iterdir()), "what was not found out is asked again"


def test_another_word_is_refused() -> None:
    assert amx_allowed({})
    assert not amx_allowed({"PACELINE_AMX": "off"})
    with pytest.raises(ConfigError, match=r"PACELINE_AMX = 'no' must be auto or off"):
        amx_allowed({"PACELINE_AMX": "no"})
