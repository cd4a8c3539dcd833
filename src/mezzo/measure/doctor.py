"""Report what this machine can compute, format by format, and advise on improvements.

``facts`` queries the machine; everything else is a pure function of the answer, so that advice for
any machine can be tested on any other.

Importing this module imports no torch; ``facts`` and ``examine`` do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from mezzo import devices
from mezzo.devices import Device
from mezzo.formats import BF16, E4M3, E5M2, FP8_PAIRS, FP16, FP32, FP64, TF32, Format
from mezzo.measure.environment import TRITON_PACKAGES, environment, nvidia_driver, package_version
from mezzo.records import DeviceReport, DoctorRecord, FormatSupport, Note

_FORMATS = (FP32, TF32, FP16, BF16, E4M3, E5M2)
_COMPILERS = ("c++", "g++", "clang++", "cl")
_MATMUL = "torch.backends.cuda.matmul.fp32_precision"
_CONVOLUTION = "torch.backends.cudnn.conv.fp32_precision"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that the advice is based on."""

    devices: tuple[Device, ...]
    """The devices that torch sees, the CPU last."""
    cuda_build: str | None = None
    """CUDA version that torch was built for; None for a build without CUDA."""
    driver: str | None = None
    """Version of NVIDIA's driver, if ``nvidia-smi`` finds a GPU."""
    gpu_memory_bytes: int | None = None
    triton: str | None = None
    compiler: str | None = None
    """Path of a C++ compiler."""
    matmul_precision: str | None = None
    """torch's ``fp32_precision`` for matrix products; None if torch has no such setting."""
    conv_precision: str | None = None

    @property
    def gpu(self) -> Device | None:
        """The CUDA device, or None."""
        return next((device for device in self.devices if device.kind == "cuda"), None)


def examine() -> DoctorRecord:
    """Return the capabilities of this machine, format by format, and advice (imports torch)."""
    found = facts()
    return DoctorRecord(
        environment=environment(found.devices[0].kind),
        devices=[device_report(device, facts=found) for device in found.devices],
        tf32=tf32_state(found),
        advice=advice(found),
    )


def facts() -> Facts:
    """Return what this machine and its torch report about themselves (imports torch)."""
    import torch

    has_gpu = torch.cuda.is_available()
    compilers = (shutil.which(name) for name in _COMPILERS)
    return Facts(
        devices=tuple(devices.this_device(kind) for kind in devices.device_kinds()),
        cuda_build=torch.version.cuda,
        driver=nvidia_driver(),
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        triton=package_version(*TRITON_PACKAGES),
        compiler=next((path for path in compilers if path), None),
        matmul_precision=_precision(torch.backends.cuda.matmul),
        conv_precision=_precision(getattr(torch.backends.cudnn, "conv", None)),
    )


def device_report(device: Device, *, facts: Facts) -> DeviceReport:
    """Return the formats of ``device`` and its other properties."""
    fnuz = FP8_PAIRS["fnuz"] if device.support(FP8_PAIRS["fnuz"][0]).level == "native" else ()
    own = () if device.has_fp64 else (FP64,)
    supports = [device.support(fmt) for fmt in (*own, *_FORMATS, *fnuz)]
    capability = device.capability
    return DeviceReport(
        kind=device.kind,
        name=f"{device.name} ({device.architecture})" if device.architecture else device.name,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=facts.gpu_memory_bytes if device.kind == "cuda" else None,
        formats=[FormatSupport(format=s.format, level=s.level, reason=s.reason) for s in supports],
    )


def tf32_state(facts: Facts) -> list[Note]:
    """Return whether FP32 matrix products and convolutions are computed in TF32, and why."""
    return [
        _tf32_reason(facts, what="matrix products", setting=_MATMUL, value=facts.matmul_precision),
        _tf32_reason(facts, what="convolutions", setting=_CONVOLUTION, value=facts.conv_precision),
    ]


def advice(facts: Facts) -> list[Note]:
    """Return what to change on a machine with these facts.

    ``what`` names a finding, ``value`` the remedy and ``reason`` its benefit.
    """
    gpu = facts.gpu
    parts = [_missing_gpu_advice(facts) if gpu is None else _gpu_advice(gpu, facts=facts)]
    parts += [_evidence(facts), _cpu_advice(facts)]
    return [reason for part in parts for reason in part]


def _tf32_reason(facts: Facts, *, what: str, setting: str, value: str | None) -> Note:
    gpu = facts.gpu
    if gpu is None:
        return Note(what=what, value="no effect", reason="TF32 needs an NVIDIA GPU, and this machine has none")
    support = gpu.support(TF32)
    if support.level != "native":
        return Note(what=what, value="no effect", reason=support.reason)
    if value is None:
        return Note(what=what, value="unknown", reason=f"this torch has no {setting}")
    state = "on" if value == TF32.name else "off"
    return Note(what=what, value=state, reason=f"{setting} is {value!r}")


def _missing_gpu_advice(facts: Facts) -> Iterator[Note]:
    if facts.driver is None:
        return
    if facts.cuda_build is None:
        value = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        why = "this torch was built without CUDA; with it, training runs on that GPU"
    else:
        value = f"check that CUDA_VISIBLE_DEVICES is not empty and that the driver is new enough for CUDA {facts.cuda_build}"
        why = "torch sees none; once it does, training runs on that GPU"
    found = f"nvidia-smi finds a GPU (driver {facts.driver}), but {why}"
    yield Note(what="a GPU that torch cannot use", value=value, reason=found)


def _gpu_advice(gpu: Device, *, facts: Facts) -> Iterator[Note]:
    yield _half_precision_advice(gpu)
    settings = {"matrix products": facts.matmul_precision, "convolutions": facts.conv_precision}
    off = [what for what, value in settings.items() if value not in (None, TF32.name)]
    if off and gpu.support(TF32).level == "native":
        yield Note(
            what=f"{TF32.name.upper()} is off for {' and '.join(off)}",
            value=f"mezzo run --policy {TF32.name}",
            reason=f"{gpu.name} has matrix units for it: {FP32.name.upper()} operands are read with"
            f" {TF32.mantissa_bits} instead of {FP32.mantissa_bits} mantissa bits, and no tensor"
            " changes its format",
        )
    if facts.triton is None:
        yield Note(
            what="Triton is missing",
            value="pip install triton (on Windows: triton-windows)",
            reason="torch.compile needs it to generate GPU kernels",
        )


def _evidence(facts: Facts) -> Iterator[Note]:
    for device in facts.devices:
        if device.kind != "cpu":
            yield Note(
                what=f"Mezzo on {device.name}",
                value="python -m pytest -m gpu, or bash benchmarks/first_gpu.sh, in the repository; tell us what they say",
                reason=device.evidence,
            )


def _half_precision_advice(gpu: Device) -> Note:
    if _is_native(gpu, BF16):
        return Note(
            what="the 16-bit format to begin with",
            value=f"mezzo run --policy {BF16.name}",
            reason=f"{gpu.name} computes in it natively, and it has the range of"
            f" {FP32.name.upper()}: no loss scale to tune",
        )
    if _is_native(gpu, FP16):
        return Note(
            what="the 16-bit format to begin with",
            value=f"mezzo run --policy {FP16.name}",
            reason=f"it is {gpu.name}'s only native 16-bit format; its dynamic loss"
            " scale keeps small gradients from becoming zero",
        )
    return Note(
        what="no matrix units for half precision",
        value="compare losses and memory here, times on a GPU that has them"
        + (" (NVIDIA: compute capability 7.0 or later)" if gpu.architecture is None else ""),
        reason=f"half precision is emulated on {gpu.name}: {gpu.support(FP16).reason}",
    )


def _cpu_advice(facts: Facts) -> Iterator[Note]:
    cpu = facts.devices[-1]
    emulated = [fmt.name.upper() for fmt in (FP16, BF16) if not _is_native(cpu, fmt)]
    if len(facts.devices) == 1 and emulated:
        yield Note(
            what=f"{' and '.join(emulated)} on this CPU",
            value="compare losses and memory here, and times on a GPU",
            reason="half precision is emulated here: numerics match a GPU's, times do not",
        )
    if facts.compiler is None:
        yield Note(
            what="no C++ compiler",
            value="install g++ or clang++ (on Windows: Visual Studio Build Tools)",
            reason="torch.compile needs one to generate CPU kernels and fails there without it",
        )


def _is_native(device: Device, fmt: Format) -> bool:
    return device.support(fmt).level == "native"


def _precision(backend: object) -> str | None:
    # Only fp32_precision is read: torch refuses a program that mixes it with the older allow_tf32.
    value = getattr(backend, "fp32_precision", None)
    return None if value is None else str(value)
