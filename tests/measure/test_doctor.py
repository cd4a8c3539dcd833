"""What the doctor reports about machines: this one, and made-up ones with GPUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mezzo import devices
from mezzo.devices import Device
from mezzo.measure import doctor
from mezzo.measure.doctor import Facts, advice, device_report, examine, facts, tf32_state
from mezzo.records import DoctorRecord, Note

CPU = Device(kind="cpu", name="a CPU")
AMX_CPU = Device(kind="cpu", name="a server CPU", flags=frozenset({"amx_bf16", "amx_fp16"}))
BF16_CPU = Device(kind="cpu", name="a BF16 CPU", flags=frozenset({"avx512_bf16"}))


def gpu(capability: tuple[int, int]) -> Device:
    return Device(kind="cuda", name="a GPU", capability=capability)


def machine(*found: Device, **fields: str | None) -> Facts:
    """Return facts of a machine in order: a compiler is there, and for a GPU its driver, CUDA, Triton and TF32."""
    known: dict[str, str | None] = {"compiler": "/usr/bin/c++"}
    if len(found) > 1:
        known |= {"driver": "570.86", "cuda_build": "12.8", "triton": "3.4"}
        known |= {"matmul_precision": "tf32", "conv_precision": "tf32"}
    return Facts(devices=found, **known | fields)  # type: ignore[arg-type]


EMULATED = (
    "FP16 and BF16 on this CPU",
    "compare losses and memory here, and times on a GPU",
    "half precision is emulated here: numerics match a GPU's, times do not",
)
BEGIN_BF16 = (
    "the 16-bit format to begin with",
    "mezzo run --policy bf16",
    "a GPU computes in it natively, and it has the range of FP32: no loss scale to tune",
)
BEGIN_FP16 = (
    "the 16-bit format to begin with",
    "mezzo run --policy fp16",
    "it is a GPU's only native 16-bit format; its dynamic loss scale keeps small gradients from becoming zero",
)
TF32_REASON = (
    "a GPU has matrix units for it: FP32 operands are read with 10 instead of 23 mantissa bits,"
    " and no tensor changes its format"
)


NO_COMPILER = (
    "no C++ compiler",
    "install g++ or clang++ (on Windows: Visual Studio Build Tools)",
    "torch.compile needs one to generate CPU kernels and fails there without it",
)
NO_CUDA = (
    "a GPU that torch cannot use",
    "install a CUDA build of torch: https://pytorch.org/get-started/locally",
    "nvidia-smi finds a GPU (driver 570.86), but this torch was built without CUDA; with it, training runs on that GPU",
)
NOT_SEEN = (
    "a GPU that torch cannot use",
    "check that CUDA_VISIBLE_DEVICES is not empty and that the driver is new enough for CUDA 12.8",
    "nvidia-smi finds a GPU (driver 470.1), but torch sees none; once it does, training runs on that GPU",
)
NO_UNITS = (
    "no matrix units for half precision",
    "compare losses and memory here, times on a GPU that has them (NVIDIA: compute capability 7.0 or later)",
    "half precision is emulated on a GPU: compute capability 6.1, and matrix units take fp16 only from 7.0",
)
TF32_OFF = ("TF32 is off for matrix products", "mezzo run --policy tf32", TF32_REASON)
ALL_TF32_OFF = ("TF32 is off for matrix products and convolutions", "mezzo run --policy tf32", TF32_REASON)
NO_TRITON = (
    "Triton is missing",
    "pip install triton (on Windows: triton-windows)",
    "torch.compile needs it to generate GPU kernels",
)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (machine(AMX_CPU), []),
        (machine(CPU), [EMULATED]),
        (machine(BF16_CPU), [("FP16 on this CPU", *EMULATED[1:])]),
        (machine(AMX_CPU, compiler=None), [NO_COMPILER]),
        (machine(AMX_CPU, driver="570.86"), [NO_CUDA]),
        (machine(AMX_CPU, driver="470.1", cuda_build="12.8"), [NOT_SEEN]),
        (machine(AMX_CPU, cuda_build="12.8"), []),
        (machine(gpu((9, 0)), CPU), [BEGIN_BF16]),
        (machine(gpu((7, 5)), CPU), [BEGIN_FP16]),
        (machine(gpu((7, 5)), CPU, matmul_precision="none", conv_precision="none"), [BEGIN_FP16]),
        (machine(gpu((6, 1)), CPU), [NO_UNITS]),
        (machine(gpu((8, 0)), CPU, matmul_precision="none"), [BEGIN_BF16, TF32_OFF]),
        (machine(gpu((8, 0)), CPU, matmul_precision="ieee", conv_precision="ieee"), [BEGIN_BF16, ALL_TF32_OFF]),
        (machine(gpu((8, 0)), CPU, matmul_precision=None), [BEGIN_BF16]),
        (machine(gpu((8, 0)), CPU, triton=None), [BEGIN_BF16, NO_TRITON]),
    ],
)
def test_advice_follows_from_the_facts(found: Facts, expected: list[tuple[str, str, str]]) -> None:
    told = [(a.what, a.value, a.reason) for a in advice(found)]
    evidence = [one for one in told if one[0].startswith("Mezzo on ")]
    assert [one for one in told if one not in evidence] == expected
    assert [(what, reason) for what, _, reason in evidence] == [
        (f"Mezzo on {device.name}", device.evidence) for device in found.devices if device.kind != "cpu"
    ]


def test_an_amd_gpu_is_reported_with_its_own_formats() -> None:
    device = Device(kind="cuda", name="AMD Instinct MI300X", architecture="gfx942")
    report = device_report(device, facts=machine(device, CPU))
    assert (report.name, report.compute_capability) == ("AMD Instinct MI300X (gfx942)", None)
    native, emulated = ("fp32", "fp16", "bf16", "e4m3fnuz", "e5m2fnuz"), ("e4m3", "e5m2")
    levels = dict.fromkeys(native, "native") | dict.fromkeys(emulated, "emulated") | {"tf32": "impossible"}
    assert {f.format: f.level for f in report.formats} == levels
    assert [state.value for state in tf32_state(machine(device, CPU))] == ["no effect", "no effect"]


def test_a_device_without_fp64_is_reported() -> None:
    device = Device(kind="mps", name="an Apple GPU", has_fp64=False)
    first = device_report(device, facts=machine(device, CPU)).formats[0]
    assert (first.format, first.level) == ("fp64", "impossible")


NO_GPU = ("no effect", "TF32 needs an NVIDIA GPU, and this machine has none")
TOO_OLD = ("no effect", "compute capability 7.5, and matrix units take tf32 only from 8.0")
MATMUL = "torch.backends.cuda.matmul.fp32_precision"
CONVOLUTION = "torch.backends.cudnn.conv.fp32_precision"


CONV_ON, CONV_UNKNOWN = ("on", f"{CONVOLUTION} is 'tf32'"), ("unknown", f"this torch has no {CONVOLUTION}")


@pytest.mark.parametrize(
    ("found", "matmul", "convolution"),
    [
        (machine(CPU, matmul_precision="tf32"), NO_GPU, NO_GPU),
        (machine(gpu((7, 5)), CPU), TOO_OLD, TOO_OLD),
        (machine(gpu((8, 0)), CPU, matmul_precision="none"), ("off", f"{MATMUL} is 'none'"), CONV_ON),
        (machine(gpu((8, 0)), CPU, conv_precision=None), ("on", f"{MATMUL} is 'tf32'"), CONV_UNKNOWN),
    ],
)
def test_the_state_of_tf32(found: Facts, matmul: tuple[str, str], convolution: tuple[str, str]) -> None:
    assert tf32_state(found) == [
        Note(what="matrix products", value=matmul[0], reason=matmul[1]),
        Note(what="convolutions", value=convolution[0], reason=convolution[1]),
    ]


@pytest.mark.parametrize(
    ("device", "capability", "memory_bytes", "levels"),
    [
        (gpu((9, 0)), "9.0", 80, ["native"] * 6),
        (gpu((8, 0)), "8.0", 80, ["native"] * 4 + ["emulated"] * 2),
        (gpu((7, 5)), "7.5", 80, ["native", "impossible", "native", "emulated", "emulated", "emulated"]),
        (CPU, None, None, ["native", "impossible"] + ["emulated"] * 4),
        (BF16_CPU, None, None, ["native", "impossible", "emulated", "native", "emulated", "emulated"]),
    ],
)
def test_a_device_is_reported_format_by_format(
    device: Device, capability: str | None, memory_bytes: int | None, levels: list[str]
) -> None:
    report = device_report(device, facts=dataclasses.replace(machine(gpu((9, 0)), CPU), gpu_memory_bytes=80))
    assert (report.kind, report.name) == (device.kind, device.name)
    assert (report.compute_capability, report.memory_bytes) == (capability, memory_bytes)
    assert [f.format for f in report.formats] == ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
    assert [f.level for f in report.formats] == levels
    assert all(f.reason for f in report.formats)


def test_facts_read_the_current_settings_of_torch() -> None:
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        found = facts()
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before
    assert (found.matmul_precision, found.conv_precision) == ("tf32", "ieee")
    assert [device.kind for device in found.devices] == devices.device_kinds()
    assert found.cuda_build == torch.version.cuda


def test_facts_do_without_settings_that_a_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())
    monkeypatch.setattr(torch.backends.cudnn, "conv", object())
    found = facts()
    assert (found.matmul_precision, found.conv_precision) == (None, None)


@pytest.mark.parametrize(
    ("installed", "compiler"),
    [({"g++": "/g++", "clang++": "/clang++"}, "/g++"), ({"clang++": "/clang++"}, "/clang++"), ({}, None)],
)
def test_facts_find_a_compiler(
    installed: dict[str, str], compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", installed.get)
    assert facts().compiler == compiler


def test_the_record_puts_the_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine(gpu((8, 0)), CPU, matmul_precision="none")
    monkeypatch.setattr(doctor, "facts", lambda: found)
    record = examine()
    assert record.environment.device == "cuda"  # the first device is what a run would take
    assert record.devices == [device_report(device, facts=found) for device in found.devices]
    assert (record.tf32, record.advice) == (tf32_state(found), advice(found))
    assert DoctorRecord.model_validate_json(record.model_dump_json()) == record


def test_this_machine_is_examined() -> None:
    record = examine()
    assert [device.kind for device in record.devices] == devices.device_kinds()
    assert record.devices[-1].name == devices.cpu_name()
