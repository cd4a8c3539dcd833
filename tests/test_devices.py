"""Support for formats on devices with made-up capabilities and instruction sets."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mezzo import devices
from mezzo.devices import Device, Level, device_kinds, this_device
from mezzo.formats import FORMATS

NAMES = ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
LETTERS: dict[str, Level] = {"n": "native", "e": "emulated", "x": "impossible"}


def gpu(major: int, minor: int) -> Device:
    return Device(kind="cuda", name=f"GPU {major}.{minor}", capability=(major, minor))


def amd(architecture: str) -> Device:
    return Device(kind="cuda", name="an AMD GPU", architecture=architecture)


def cpu(*flags: str) -> Device:
    return Device(kind="cpu", name="a CPU", flags=frozenset(flags))


TURING = Device(kind="cuda", name="NVIDIA GeForce GTX 1660 Ti", capability=(7, 5))
APPLE = Device(kind="mps", name="an Apple GPU", has_fp64=False)
ARC = Device(kind="xpu", name="Intel Arc A770", has_fp64=False)
MAX = Device(kind="xpu", name="Intel Data Center GPU Max 1550")

LEVELS = [
    # device, then fp64 fp32 tf32 fp16 bf16 e4m3 e5m2 e4m3fnuz e5m2fnuz
    (gpu(6, 1), "n n x e e e e e e"),
    (gpu(7, 0), "n n x n e e e e e"),
    (gpu(7, 5), "n n x n e e e e e"),
    (TURING, "n n x n e e e e e"),
    (gpu(8, 0), "n n n n n e e e e"),
    (gpu(8, 6), "n n n n n e e e e"),
    (gpu(8, 9), "n n n n n n n e e"),
    (gpu(9, 0), "n n n n n n n e e"),
    (gpu(12, 0), "n n n n n n n e e"),
    (amd("gfx906"), "n n x e e e e e e"),
    (amd("gfx908"), "n n x n n e e e e"),
    (amd("gfx90a"), "n n x n n e e e e"),
    (amd("gfx942"), "n n x n n e e n n"),
    (amd("gfx950"), "n n x n n n n e e"),
    (amd("gfx1030"), "n n x e e e e e e"),
    (amd("gfx1100"), "n n x n n e e e e"),
    (amd("gfx1201"), "n n x n n n n e e"),
    (cpu(), "n n x e e e e e e"),
    (cpu("avx2", "f16c"), "n n x e e e e e e"),
    (cpu("avx512_bf16"), "n n x e n e e e e"),
    (cpu("amx_bf16"), "n n x e n e e e e"),
    (cpu("avx512_fp16"), "n n x n e e e e e"),
    (cpu("amx_fp16", "amx_bf16"), "n n x n n e e e e"),
    (APPLE, "x n x n n e e e e"),
    (Device(kind="mps", name="before macOS 14", has_fp64=False, has_bf16=False), "x n x n e e e e e"),
    (ARC, "x n x n n e e e e"),
    (MAX, "n n x n n e e e e"),
    (Device(kind="cuda", name="absent"), "n n x x x x x x x"),
]


@pytest.mark.parametrize(
    ("device", "letters"), LEVELS, ids=[f"{d.name}-{d.architecture or '+'.join(sorted(d.flags))}" for d, _ in LEVELS]
)
def test_level_of_every_format(device: Device, letters: str) -> None:
    supports = [device.support(FORMATS[name]) for name in NAMES]

    assert [s.level for s in supports] == [LETTERS[letter] for letter in letters.split()]
    assert [s.format for s in supports] == list(NAMES)
    assert all(s.reason for s in supports)


REASONS = [
    (gpu(7, 5), "fp32", "every device computes in it"),
    (gpu(7, 5), "fp16", "compute capability 7.5; matrix units take fp16 from 7.0"),
    (gpu(7, 5), "bf16", "compute capability 7.5, and matrix units take bf16 only from 8.0"),
    (gpu(8, 6), "e4m3", "compute capability 8.6, and matrix units take e4m3 only from 8.9"),
    (cpu("amx_bf16", "avx512_bf16"), "bf16", "this CPU has avx512_bf16 and amx_bf16"),
    (
        cpu("avx2"),
        "fp16",
        "this CPU lacks avx512_fp16 or amx_fp16; native kernels would be many times slower than FP32",
    ),
    (
        cpu("avx512_fp16"),
        "e5m2",
        "this CPU lacks units for 8-bit floating point; native kernels would be many times slower than FP32",
    ),
    (cpu(), "tf32", "TF32 is a mode of NVIDIA's matrix units; FP32 is used instead"),
    (gpu(9, 0), "e4m3fnuz", "NVIDIA's matrix units take no e4m3fnuz; use fp8_formats=ocp"),
    (TURING, "fp16", "compute capability 7.5 without Tensor Cores; its fp16 units compute at twice the rate of FP32"),
    (TURING, "bf16", "compute capability 7.5, and matrix units take bf16 only from 8.0"),
    (amd("gfx90a"), "e4m3", "gfx90a (MI210, MI250, MI250X), and its matrix units take fp16, bf16"),
    (amd("gfx942"), "e4m3fnuz", "gfx942 (MI300A, MI300X, MI325X); its matrix units take e4m3fnuz"),
    (amd("gfx942"), "tf32", "gfx942: torch computes FP32 products in FP32 here"),
    (amd("gfx906"), "fp16", "gfx906 is not among the architectures whose matrix units are known here"),
    (MAX, "bf16", "torch runs it on xpu"),
    (APPLE, "bf16", "torch runs it on mps"),
    (APPLE, "tf32", "TF32 is NVIDIA's"),
    (APPLE, "fp64", "an Apple GPU has no FP64; FP32 is used in its place"),
    (Device(kind="cuda", name="absent"), "fp16", "torch finds no CUDA device on this machine"),
]


@pytest.mark.parametrize(("device", "name", "reason"), REASONS)
def test_reason(device: Device, name: str, reason: str) -> None:
    assert device.support(FORMATS[name]).reason == reason


def test_this_cpu_reports_what_the_kernel_reports() -> None:
    device = this_device("cpu")

    assert (device.kind, device.capability) == ("cpu", None)
    assert device.name == devices.cpu_name() != ""
    assert {device.support(FORMATS[n]).level for n in ("fp64", "fp32")} == {"native"}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "\nflags" in cpuinfo.read_text(encoding="utf-8"):
        assert "fpu" in device.flags  # every x86-64 processor reports it


CPUINFO = """\
processor\t: 0
model name\t: Example 9000: Turbo
flags\t\t: fpu sse2 avx512_fp16

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_cpu_is_read_from_the_first_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO, encoding="utf-8")
    monkeypatch.setattr(devices, "Path", lambda _: path)

    assert this_device("cpu") == Device(
        kind="cpu",
        name="Example 9000: Turbo",
        flags=frozenset({"fpu", "sse2", "avx512_fp16"}),
    )


def test_a_machine_without_cpuinfo_has_a_plain_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "Path", lambda _: tmp_path / "absent")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    assert this_device("cpu") == Device(kind="cpu", name="riscv64")


def test_cuda_reports_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))

    assert this_device("cuda") == Device(kind="cuda", name="NVIDIA H200", capability=(9, 0))
    assert device_kinds()[0] == "cuda"
    assert device_kinds()[-1] == "cpu"


def test_cuda_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert this_device("cuda") == Device(kind="cuda", name="cuda")
    assert "cuda" not in device_kinds()


def test_amds_numbers_are_no_compute_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.hip", "7.0.0")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "AMD Instinct MI250X")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)

    device = this_device("cuda")
    assert device == Device(kind="cuda", name="AMD Instinct MI250X", architecture="gfx90a")
    assert [device.support(FORMATS[name]).level for name in ("tf32", "e4m3")] == ["impossible", "emulated"]


@pytest.mark.parametrize(("newer", "bf16"), [(True, "native"), (False, "emulated")])
def test_apples_gpu(monkeypatch: pytest.MonkeyPatch, newer: bool, bf16: str) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: newer)

    device = this_device("mps")
    assert (device.has_fp64, device.support(FORMATS["bf16"]).level) == (False, bf16)
    assert not devices.has_fp64(torch.device("mps"))


@pytest.mark.parametrize("has_fp64", [True, False])
def test_intels_gpu(monkeypatch: pytest.MonkeyPatch, has_fp64: bool) -> None:
    devices._xpu_has_fp64.cache_clear()
    monkeypatch.setattr("torch.xpu.is_available", lambda: True)
    monkeypatch.setattr("torch.xpu.get_device_name", lambda: "Intel Arc")
    monkeypatch.setattr("torch.xpu.get_device_properties", lambda index: SimpleNamespace(has_fp64=has_fp64))
    try:
        assert this_device("xpu") == Device(kind="xpu", name="Intel Arc", has_fp64=has_fp64)
    finally:
        devices._xpu_has_fp64.cache_clear()


def test_an_accelerator_is_found_by_torchs_common_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("xpu"))

    assert device_kinds() == ["xpu", "cpu"]


def test_nothing_is_claimed_of_devices_that_no_test_ran_on() -> None:
    ran = {device.name for device, _ in LEVELS if device.has_run}
    assert {name for name in ran if "H100" not in name} == {device.name for device, _ in LEVELS if device.kind == "cpu"}
    assert ran == {device.name for device, _ in LEVELS if "ever run" not in device.evidence}
    assert Device(kind="cuda", name="NVIDIA H100 80GB HBM3", capability=(9, 0)).has_run
    assert not Device(kind="cuda", name="NVIDIA H200", capability=(9, 0)).has_run
