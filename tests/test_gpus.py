"""Facts about GPUs: names as people type them, units, and a source for each row."""

from __future__ import annotations

import re

import pytest

from mezzo.errors import UsageError
from mezzo.formats import BF16, E4M3, FP16, TF32
from mezzo.gpus import GPUS, find_gpu, gpu_named
from paths import ROOT


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100-80gb", "a100-80gb"),
        ("A100 80GB", "a100-80gb"),
        ("a100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),  # as torch names it
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_as_people_and_torch_name_it(typed: str, name: str) -> None:
    assert gpu_named(typed).name == name


def test_no_name_means_two_gpus() -> None:
    for gpu in GPUS.values():
        assert [find_gpu(text) for text in (gpu.name, gpu.label, *gpu.aliases)] == [gpu] * (2 + len(gpu.aliases))


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UsageError) as caught:
        gpu_named("rtx-4080")
    assert str(caught.value).startswith("--gpu 'rtx-4080' is not a GPU that Mezzo knows; did you mean rtx-")
    assert find_gpu("rtx-4080") is None


def test_facts_are_in_units() -> None:
    a100 = GPUS["a100-80gb"]
    assert a100.memory_bytes == 80 * 2**30
    assert a100.bandwidth_bytes_per_s == 2.039e12
    assert (a100.fp32_flops_per_s, a100.tf32_flops_per_s, a100.bf16_flops_per_s) == (19.5e12, 156e12, 312e12)
    assert a100.flops_per_s("e4m3") is None
    assert GPUS["h100-sxm"].flops_per_s("e5m2") == 1979e12
    assert a100.flops_per_s("complex64") is None


def test_every_row_has_a_source_and_says_what_it_was_compared_with() -> None:
    assert all(gpu.source and gpu.checked for gpu in GPUS.values())


def test_rates_and_supported_formats_agree() -> None:
    for gpu in GPUS.values():
        if gpu.architecture.startswith("CDNA"):
            continue  # torch computes FP32 products in FP32 there, whatever the units can do
        for fmt in (TF32, FP16, BF16, E4M3):
            native = gpu.device.support(fmt).level == "native"
            assert native == (gpu.flops_per_s(fmt.name) is not None), (gpu.name, fmt.name)


def test_the_table_of_peaks_in_the_docs_is_that_of_the_facts() -> None:
    section = (
        (ROOT / "docs/hardware.md")
        .read_text(encoding="utf-8")
        .split("## TFLOPS and bandwidth by GPU")[1]
        .split("\n## ")[0]
    )
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in re.findall(r"^\| `.*$", section, re.M)]
    for name, *cells in rows[1:]:
        gpu = GPUS[name]
        rates = [gpu.flops_per_s(found) for found in ("fp32", "tf32", "fp16", "bf16", "e4m3")]
        facts = [gpu.memory_bytes / 2**30, gpu.bandwidth_bytes_per_s / 1e9, *(rate and rate / 1e12 for rate in rates)]
        assert [None if cell == "-" else float(cell) for cell in cells] == pytest.approx(facts), name
    assert len(rows) > 10
