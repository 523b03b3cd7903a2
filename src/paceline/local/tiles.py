"""AMX on virtual machines that hide how large its tiles are.

oneDNN, which torch computes bf16 with, asks the processor for its tile palettes (CPUID leaf
1Dh) before it first uses AMX. Some hypervisors hand AMX on to the guest but end their CPUID at
leaf 1Ch: oneDNN is told 0 palettes, loads a configuration without tiles, and the program
dies at the first tile instruction. The kernel and the processor run AMX well there.

`describe_tiles` lets this process read the leaf as the processor would give it. While
oneDNN makes its first convolution (which asks for palettes, tiles and rows; each is asked once
and remembered), the kernel turns every CPUID of this thread into a signal; the handler steps over
the real instruction and, where leaf 1Dh came back empty, fills in palette 1, the only one that
any processor has. Where CPUID tells the truth nothing is changed. See docs/decisions/0011-tiles.md.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import StrategyError

TILE_LEAF = 0x1D
PALETTES = {
    0: (1, 0, 0, 0),  # the highest palette
    1: (8192 | 1024 << 16, 64 | 8 << 16, 16, 0),  # bytes in all, a tile, a row; tiles; rows
}
"""EAX, EBX, ECX, EDX of leaf 1Dh for each value of ECX (Intel's manual, volume 2A, CPUID)."""

_ARCH_PRCTL, _ARCH_CPUID = 158, 0x1012
_SA_SIGINFO = 4
_CPUID = b"\x0f\xa2"
_TRAP_FLAG = 0x100
# Of `gregs` in a ucontext_t of x86-64 Linux, which begins 40 bytes into it.
_REGISTERS, _COUNT = 40, 23
_RBX, _RDX, _RAX, _RCX, _RIP, _EFLAGS = 11, 12, 13, 14, 16, 17

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_described: bool | None = None
_refused = False
_lock = threading.Lock()


class _SignalAction(ctypes.Structure):
    """`struct sigaction` of glibc on x86-64 Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor announces; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def has_bf16() -> bool:
    """Whether the processor computes in bf16, or does not say what it can do."""
    flags = processor_flags()
    return not flags or not flags.isdisjoint({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def describe_tiles() -> bool:
    """Make bf16 of this process safe where the hypervisor hides the tiles; True if that was needed.

    Must come before the first computation of the process: oneDNN asks for the tiles once, even
    for layers in fp32. Only the first call does anything. Does nothing on machines without AMX, or
    where the kernel cannot turn CPUID into a signal.
    """
    global _described
    if not {"amx_tile", "cpuid_fault"} <= processor_flags():
        return False
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    import torch

    with _lock:
        if _described is None:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # a thread that is born meanwhile would keep the signals
            try:
                image = torch.ones(1, 64, 9, 9, dtype=torch.bfloat16)
                kernel = torch.ones(64, 64, 3, 3, dtype=torch.bfloat16)
                with torch.no_grad():
                    _described = correcting_cpuid(lambda: torch.conv2d(image, kernel))
            finally:
                torch.set_num_threads(threads)
                torch.get_num_threads()  # makes it stick, see cores.set_threads
        return _described


def refuse_bf16() -> None:
    """From now on bf16 raises instead of ending the process: it is too late to describe tiles."""
    global _refused
    _refused = True


def check_bf16() -> None:
    """Raise where a layer in bf16 would end the process."""
    if _refused:
        raise StrategyError(
            "bf16 would end this process: it computed before Paceline could tell oneDNN about AMX's"
            " tiles, which the hypervisor hides. Train in a new process, or in fp32"
        )


def filled_in(leaf: int, subleaf: int, answer: tuple[int, ...]) -> tuple[int, ...]:
    """An answer of CPUID as it should have been: leaf 1Dh is never empty where AMX is there."""
    if leaf != TILE_LEAF or any(answer):
        return answer
    return PALETTES.get(subleaf, answer)


def correcting_cpuid(work: Callable[[], object]) -> bool:
    """Do `work` with every CPUID of this thread passed through `filled_in`; True if changed.

    The handlers are Python, which a signal handler seldom may be. Here the signal comes from an
    instruction of this very thread, never from the midst of an allocation or of the interpreter.
    """
    libc = ctypes.CDLL(None)
    asked: list[tuple[int, int]] = []
    changed: list[int] = []
    before = {number: _SignalAction() for number in (signal.SIGSEGV, signal.SIGTRAP)}

    def turn(signals: bool) -> None:
        libc.syscall(
            ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_CPUID), ctypes.c_ulong(not signals)
        )

    def registers(context: int) -> Any:
        return (ctypes.c_ulonglong * _COUNT).from_address(context + _REGISTERS)

    def refused(number: int, info: int, context: int) -> None:
        values = registers(context)
        if ctypes.string_at(values[_RIP], 2) != _CPUID:  # a fault of its own: as without us
            libc.sigaction(number, ctypes.byref(before[signal.SIGSEGV]), None)
            return
        asked.append((values[_RAX] & 0xFFFFFFFF, values[_RCX] & 0xFFFFFFFF))
        turn(signals=False)
        values[_EFLAGS] |= _TRAP_FLAG  # `stepped` comes right after the instruction

    def stepped(number: int, info: int, context: int) -> None:
        values = registers(context)
        places = (_RAX, _RBX, _RCX, _RDX)
        leaf, subleaf = asked.pop()
        given = tuple(values[place] for place in places)
        answer = filled_in(leaf, subleaf, given)
        if answer != given:
            changed.append(leaf)
        for place, value in zip(places, answer, strict=True):
            values[place] = value
        values[_EFLAGS] &= ~_TRAP_FLAG
        turn(signals=True)

    handlers = {signal.SIGSEGV: _HANDLER(refused), signal.SIGTRAP: _HANDLER(stepped)}
    for number, handler in handlers.items():
        action = _SignalAction(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
        libc.sigaction(int(number), ctypes.byref(action), ctypes.byref(before[number]))
    try:
        turn(signals=True)
        work()
    finally:
        turn(signals=False)
        for number, action in before.items():
            libc.sigaction(int(number), ctypes.byref(action), None)
    return bool(changed)
