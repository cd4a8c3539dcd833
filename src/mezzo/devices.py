"""Which number formats this machine can compute in, and why.

Support for a format on a device is one of

``native``      the hardware multiplies in it faster than in FP32
``emulated``    Mezzo rounds operands, results and gradients to it and multiplies in FP32: the numerics of a GPU at about FP32 speed
``impossible``  neither

NVIDIA's matrix units take FP16 from compute capability 7.0, BF16 and TF32 from 8.0, FP8 from 8.9 (NVIDIA CUDA C++
Programming Guide, "Arithmetic Instructions" and "Compute Capabilities"). An x86 CPU has matrix or vector units for
BF16 with AVX512-BF16 or AMX-BF16 and for FP16 with AVX512-FP16 or AMX-FP16; without them torch's half-precision
kernels are 6 to 25 times slower than FP32 ones. AMD's GPUs report numbers that look like compute capabilities but are not: they are
identified by their architecture (``gfx942``). docs/hardware.md has the sources of every table.

Mezzo's tests run on x86 CPUs, and those for GPUs ran on an H100. Statements about other devices come from their makers' documents and
torch's source, as ``Device.evidence`` says.

Importing this module imports no torch; the functions do.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mezzo.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, FP32, FP64, MX_BLOCK, RECIPE_NAMES, TF32, Format

if TYPE_CHECKING:
    import torch

Level = Literal["native", "emulated", "impossible"]

_MIN_CAPABILITY: dict[str, tuple[int, int]] = {
    FP16.name: (7, 0),
    BF16.name: (8, 0),
    TF32.name: (8, 0),
    E4M3.name: (8, 9),
    E5M2.name: (8, 9),
    E2M1.name: (10, 0),
}
# torchao's row-wise recipe is measured on Hopper and datacenter Blackwell GPUs. On 12.0 torch hands such products to cuBLAS, which
# refuses them.
_ROW_SCALES: tuple[tuple[int, int], tuple[int, int]] = ((9, 0), (12, 0))
# torchao's MXFP8 kernels are built for datacenter Blackwell GPUs (torchao 0.18, ``is_sm_at_least_100``).
_MXFP8: tuple[tuple[int, int], tuple[int, int]] = ((10, 0), (12, 0))
_ROCM: dict[str, tuple[str, str]] = {
    # architecture: the GPUs, and the formats that its matrix units take
    "gfx908": ("MI100", "fp16 bf16"),
    "gfx90a": ("MI210, MI250, MI250X", "fp16 bf16"),
    "gfx940": ("the first MI300", "fp16 bf16 e4m3fnuz e5m2fnuz"),
    "gfx941": ("the first MI300", "fp16 bf16 e4m3fnuz e5m2fnuz"),
    "gfx942": ("MI300A, MI300X, MI325X", "fp16 bf16 e4m3fnuz e5m2fnuz"),
    "gfx950": ("MI350X, MI355X", "fp16 bf16 e4m3 e5m2"),
    "gfx1100": ("RX 7900", "fp16 bf16"),
    "gfx1101": ("RX 7700, RX 7800", "fp16 bf16"),
    "gfx1102": ("RX 7600", "fp16 bf16"),
    "gfx1151": ("Ryzen AI Max", "fp16 bf16"),
    "gfx1200": ("RX 9060", "fp16 bf16 e4m3 e5m2"),
    "gfx1201": ("RX 9070", "fp16 bf16 e4m3 e5m2"),
}
_WITHOUT_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")
"""Names of Turing GPUs (7.5) that have FP16 units in place of Tensor Cores."""
_CPU_FLAGS: dict[str, tuple[str, ...]] = {
    BF16.name: ("avx512_bf16", "amx_bf16"),
    FP16.name: ("avx512_fp16", "amx_fp16"),
}


@dataclass(frozen=True, kw_only=True)
class Support:
    """How a device computes in a format, and why."""

    format: str
    level: Level
    reason: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device: its kind and what it reports about itself, from which the formats that it supports follow."""

    kind: str
    """torch's device type: ``cpu``, ``cuda``, ``mps``, ``xpu``."""
    name: str
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for other makers' GPUs."""
    architecture: str | None = None
    """Of AMD GPUs: ``gfx942``."""
    has_fp64: bool = True
    """Whether tensors may be FP64: Apple's GPUs and Intel's Arc A-series have none."""
    has_bf16: bool = True
    """Whether torch's autocast accepts BF16 here: on Apple's GPUs from macOS 14."""
    flags: frozenset[str] = frozenset()
    """Instruction set extensions of a CPU, as /proc/cpuinfo names them."""

    def support(self, fmt: Format) -> Support:
        """Return how this device computes in ``fmt``."""
        level, reason = self._level(fmt)
        if fmt.scaling is not None and not isinstance(fmt.scaling.extent, str) and level != "impossible":
            level, reason = self._blocks_level(fmt)
            return Support(format=fmt.name, level=level, reason=reason)
        first, beyond = _ROW_SCALES
        if level == "native" and fmt.scaling is not None and fmt.scaling.extent == "row":
            if self.architecture is not None:
                level, reason = "emulated", f"row-wise FP8 is not known to run on {self.architecture}"
            elif self.capability is not None and not first <= self.capability < beyond:
                known = f"from {first[0]}.{first[1]} to below {beyond[0]}.{beyond[1]}"
                level, reason = "emulated", f"{_capability(self.capability)}, and row-wise FP8 is known to run {known}"
            if level == "emulated":
                reason += f"; fp8_recipe={RECIPE_NAMES[0]} is native here"
        return Support(format=fmt.name, level=level, reason=reason)

    @property
    def evidence(self) -> str:
        """What is known from runs of Mezzo on such a device."""
        if self.kind == "cpu":
            return "Mezzo's tests run on x86 CPUs"
        if self.has_run:
            return "Mezzo's GPU tests, kernels and commands ran on one H100, with torch 2.11 (docs/h100.md)"
        return "Mezzo has never run on such a device: statements about it follow from documents and from torch's source"

    @property
    def has_run(self) -> bool:
        """Whether Mezzo has run on such a device."""
        return self.kind == "cpu" or (self.kind == "cuda" and self.architecture is None and "H100" in self.name)

    def _blocks_level(self, fmt: Format) -> tuple[Level, str]:
        if self.kind == "cpu":
            return "emulated", "this CPU lacks units for blocks that share a scale"
        assert fmt.scaling is not None
        first, beyond = _MXFP8
        if fmt.name != E4M3.name or fmt.scaling.format.name != E8M0.name or fmt.scaling.extent != MX_BLOCK:
            return (
                "emulated",
                f"{fmt.name} in such blocks is emulated on every device: Mezzo does not drive a GPU's units for it",
            )
        if self.capability is None:
            return "emulated", "torchao's MXFP8 layers are for NVIDIA's GPUs"
        if first <= self.capability < beyond:
            return "native", f"{_capability(self.capability)}; torchao's MXFP8 layers run from {first[0]}.{first[1]}"
        known = f"from {first[0]}.{first[1]} to below {beyond[0]}.{beyond[1]}"
        return "emulated", f"{_capability(self.capability)}, and torchao's MXFP8 layers are known to run {known}"

    def _level(self, fmt: Format) -> tuple[Level, str]:
        if fmt is FP64 and not self.has_fp64:
            return "impossible", f"{self.name} has no FP64; FP32 is used in its place"
        if fmt in (FP32, FP64):
            return "native", "every device computes in it"
        if self.architecture is not None:
            return self._rocm_level(fmt, self.architecture)
        if self.kind == "cuda" and self.capability is not None:
            return self._cuda_level(fmt, self.capability)
        return self._cpu_level(fmt) if self.kind == "cpu" else self._other_level(fmt)

    def _cuda_level(self, fmt: Format, capability: tuple[int, int]) -> tuple[Level, str]:
        if fmt.fnuz:
            return "emulated", f"NVIDIA's matrix units take no {fmt.name}; use fp8_formats=ocp"
        needed, has = _MIN_CAPABILITY[fmt.name], _capability(capability)
        needs = f"{needed[0]}.{needed[1]}"
        if fmt is FP16 and capability == (7, 5) and _WITHOUT_TENSOR_CORES.search(self.name):
            return "native", f"{has} without Tensor Cores; its {fmt.name} units compute at twice the rate of FP32"
        if capability >= needed:
            return "native", f"{has}; matrix units take {fmt.name} from {needs}"
        reason = f"{has}, and matrix units take {fmt.name} only from {needs}"
        return ("impossible" if fmt is TF32 else "emulated"), reason

    def _rocm_level(self, fmt: Format, architecture: str) -> tuple[Level, str]:
        names, formats = _ROCM.get(architecture, ("", ""))
        if fmt is TF32:
            return "impossible", f"{architecture}: torch computes FP32 products in FP32 here"
        if fmt.name in formats.split():
            return "native", f"{architecture} ({names}); its matrix units take {fmt.name}"
        if not names:
            return "emulated", f"{architecture} is not among the architectures whose matrix units are known here"
        return "emulated", f"{architecture} ({names}), and its matrix units take {', '.join(formats.split())}"

    def _cpu_level(self, fmt: Format) -> tuple[Level, str]:
        if fmt is TF32:
            return "impossible", "TF32 is a mode of NVIDIA's matrix units; FP32 is used instead"
        needed = _CPU_FLAGS.get(fmt.name, ())
        found = [flag for flag in needed if flag in self.flags]
        if found:
            return "native", f"this CPU has {' and '.join(found)}"
        lacks = " or ".join(needed) if needed else "units for 8-bit floating point"
        return "emulated", f"this CPU lacks {lacks}; native kernels would be many times slower than FP32"

    def _other_level(self, fmt: Format) -> tuple[Level, str]:
        if self.kind == "cuda":
            return "impossible", "torch finds no CUDA device on this machine"
        if fmt is BF16 and not self.has_bf16:
            return "emulated", "torch's autocast accepts it on Apple's GPUs from macOS 14"
        if fmt in (FP16, BF16) and self.kind in ("mps", "xpu"):
            return "native", f"torch runs it on {self.kind}"
        if fmt is TF32:
            return "impossible", "TF32 is NVIDIA's"
        return "emulated", f"no known unit on {self.kind}"


def _capability(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"


def this_device(kind: str) -> Device:
    """Return what the first device of torch type ``kind`` reports about itself (imports torch)."""
    import torch

    if kind == "cpu":
        return Device(kind="cpu", name=cpu_name(), flags=_cpu_flags())
    if kind == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.version.hip is None:
            return Device(kind="cuda", name=name, capability=torch.cuda.get_device_capability())
        reported = str(torch.cuda.get_device_properties(0).gcnArchName)  # "gfx90a:sramecc+:xnack-"
        return Device(kind="cuda", name=name, architecture=reported.split(":")[0])
    if kind == "mps":
        newer = torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)
        return Device(kind=kind, name="an Apple GPU", has_fp64=False, has_bf16=newer)
    if kind == "xpu" and torch.xpu.is_available():
        return Device(kind=kind, name=torch.xpu.get_device_name(), has_fp64=has_fp64(torch.device(kind)))
    return Device(kind=kind, name=kind)


def has_fp64(device: torch.device) -> bool:
    """Return whether tensors on ``device`` may be FP64."""
    if device.type == "mps":
        return False
    return device.type != "xpu" or _xpu_has_fp64(device.index)


@functools.cache
def _xpu_has_fp64(index: int | None) -> bool:
    import torch

    return bool(torch.xpu.get_device_properties(index).has_fp64)


def device_kinds() -> list[str]:
    """Return the torch device types that this machine has, the CPU last (imports torch)."""
    import torch

    found = ["cuda"] if torch.cuda.is_available() else []
    other = torch.accelerator.current_accelerator(check_available=True)
    return [*found, *([other.type] if other is not None and other.type not in found else []), "cpu"]


def cuda_devices_in_use() -> list[int]:
    """Return the numbers of the CUDA devices on which this process has memory; asking creates no context on the others."""
    import torch

    return [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(number)]


def lacks_cuda() -> bool:
    """Return whether this machine has no CUDA device that torch could use (imports torch).

    The driver is not asked: it reads ``CUDA_VISIBLE_DEVICES`` when it is first called, and a script may still set that.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return True
    if torch.version.hip is not None:
        return not Path("/dev/kfd").exists()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return hidden in ("", "-1") or not _has_cuda_driver()


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def cpu_name() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> frozenset[str]:
    # Only Linux has /proc/cpuinfo: on macOS and Windows a CPU counts as one without these units.
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
