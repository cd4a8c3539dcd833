"""What this machine can compute, format by format, and why.

Support for a format on a device is one of

``native``      the hardware multiplies in it faster than in FP32 ``emulated``    Mezzo rounds operands, results and
gradients to it and multiplies in FP32: the numerics of a GPU at about FP32 speed ``impossible``  neither

NVIDIA's matrix units take FP16 from compute capability 7.0, BF16 and TF32 from 8.0, FP8 from 8.9 (NVIDIA CUDA C++
Programming Guide, "Arithmetic Instructions" and "Compute Capabilities"). An x86 CPU has matrix or vector units for
BF16 with AVX512-BF16 or AMX-BF16 and for FP16 with AVX512-FP16 or AMX-FP16; without them torch's half-precision
kernels are 6 to 25 times slower than FP32 ones.

Importing this module imports no torch; the functions do.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mezzo.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, TF32, Format

Level = Literal["native", "emulated", "impossible"]

_MIN_CAPABILITY: dict[str, tuple[int, int]] = {
    FP16.name: (7, 0),
    BF16.name: (8, 0),
    TF32.name: (8, 0),
    E4M3.name: (8, 9),
    E5M2.name: (8, 9),
}
# torchao's row-wise recipe is measured on Hopper and datacenter Blackwell GPUs. On 12.0 torch hands such products to cuBLAS, which
# refuses them.
_ROW_SCALES: tuple[tuple[int, int], tuple[int, int]] = ((9, 0), (12, 0))
_CPU_FLAGS: dict[str, tuple[str, ...]] = {
    BF16.name: ("avx512_bf16", "amx_bf16"),
    FP16.name: ("avx512_fp16", "amx_fp16"),
}


@dataclass(frozen=True, kw_only=True)
class Support:
    """Say how a device computes in a format, and why."""

    format: str
    level: Level
    reason: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """Hold what decides the support for formats: the kind of device and what it reports of itself."""

    kind: str
    """torch's device type: ``cpu``, ``cuda``, ``mps``, ``xpu``."""
    name: str
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    flags: frozenset[str] = frozenset()
    """Instruction set extensions of a CPU, as /proc/cpuinfo names them."""

    def support(self, fmt: Format) -> Support:
        """Return how this device computes in ``fmt``."""
        if fmt in (FP32, FP64):
            return Support(format=fmt.name, level="native", reason="every device computes in it")
        if self.kind == "cuda" and self.capability is not None:
            return self._cuda_support(fmt, self.capability)
        if self.kind == "cpu":
            return self._cpu_support(fmt)
        return self._other_support(fmt)

    def support_for_row_scales(self) -> Support:
        """Return how this device multiplies FP8 matrices that have a scale a row."""
        found = self.support(E4M3)
        first, beyond = _ROW_SCALES
        if found.level != "native" or self.capability is None or first <= self.capability < beyond:
            return found
        has = f"compute capability {self.capability[0]}.{self.capability[1]}"
        reason = f"{has}, and row-wise FP8 is known to run from {first[0]}.{first[1]} to below {beyond[0]}.{beyond[1]}"
        return Support(format=E4M3.name, level="emulated", reason=f"{reason}; fp8_recipe=tensorwise is native here")

    def _cuda_support(self, fmt: Format, capability: tuple[int, int]) -> Support:
        needed = _MIN_CAPABILITY[fmt.name]
        has = f"compute capability {capability[0]}.{capability[1]}"
        needs = f"{needed[0]}.{needed[1]}"
        if capability >= needed:
            reason = f"{has}; matrix units take {fmt.name} from {needs}"
            return Support(format=fmt.name, level="native", reason=reason)
        reason = f"{has}, and matrix units take {fmt.name} only from {needs}"
        level: Level = "impossible" if fmt is TF32 else "emulated"
        return Support(format=fmt.name, level=level, reason=reason)

    def _cpu_support(self, fmt: Format) -> Support:
        if fmt is TF32:
            reason = "TF32 is a mode of NVIDIA's matrix units; FP32 is computed instead"
            return Support(format=fmt.name, level="impossible", reason=reason)
        wanted = _CPU_FLAGS.get(fmt.name, ())
        found = [flag for flag in wanted if flag in self.flags]
        if found:
            reason = f"this CPU has {' and '.join(found)}"
            return Support(format=fmt.name, level="native", reason=reason)
        lacks = " or ".join(wanted) if wanted else "units for 8-bit floating point"
        reason = f"this CPU lacks {lacks}; native kernels would be many times slower than FP32"
        return Support(format=fmt.name, level="emulated", reason=reason)

    def _other_support(self, fmt: Format) -> Support:
        if self.kind == "cuda":
            reason = "torch finds no CUDA device on this machine"
            return Support(format=fmt.name, level="impossible", reason=reason)
        if fmt is FP16 or (fmt is BF16 and self.kind == "xpu"):
            return Support(format=fmt.name, level="native", reason=f"torch runs it on {self.kind}")
        if fmt is TF32:
            return Support(format=fmt.name, level="impossible", reason="TF32 is NVIDIA's")
        return Support(format=fmt.name, level="emulated", reason=f"no known unit on {self.kind}")


def this_device(kind: str) -> Device:
    """Return what the first device of torch type ``kind`` reports of itself (imports torch)."""
    import torch

    if kind == "cuda" and torch.cuda.is_available():
        return Device(
            kind="cuda",
            name=torch.cuda.get_device_name(),
            capability=torch.cuda.get_device_capability(),
        )
    if kind == "cpu":
        return Device(kind="cpu", name=cpu_name(), flags=_cpu_flags())
    return Device(kind=kind, name=kind)


def device_kinds() -> list[str]:
    """Return the torch device types that this machine has, the CPU last (imports torch)."""
    import torch

    found = [kind for kind in ("cuda", "mps", "xpu") if getattr(torch, kind).is_available()]
    return [*found, "cpu"]


def cpu_name() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> frozenset[str]:
    # /proc/cpuinfo joins words as in "avx512_bf16"; elsewhere (macOS, Windows) nothing is known and the CPU is taken as plain.
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
