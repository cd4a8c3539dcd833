"""Facts about GPUs, by name: memory, bandwidth and peak rates by format, each row with its source. Imports no torch.

Rates are for dense products with FP32 accumulation, which is how torch multiplies in lower formats unless told otherwise.
``gpus.csv`` has the facts as their makers state them: rates in TFLOP/s (10^12), bandwidth in GB/s (10^9), and memory as sold, in
GiB, of which the driver keeps some.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from mezzo.devices import Device
from mezzo.errors import UsageError, nearest

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|radeon|instinct", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. A rate is None where the GPU has no unit for the format."""

    name: str
    label: str
    """Its maker's name for it."""
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: str
    """``8.0``; of AMD's GPUs the architecture, ``gfx942``."""
    memory_bytes: int
    bandwidth_bytes_per_s: float
    fp32_flops_per_s: float
    fp32_matrix_flops_per_s: float | None
    """FP32 in matrix units, which AMD's data-centre GPUs have."""
    tf32_flops_per_s: float | None
    fp16_flops_per_s: float | None
    bf16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    fp4_flops_per_s: float | None
    """In blocks that share scales; a GPU that has it takes MXFP8 as well, at the rate of FP8."""
    multiprocessors: int
    l2_bytes: int
    power_w: float
    """The board's power limit."""
    source: str
    checked: str
    """The source against which the row was checked."""

    @property
    def device(self) -> Device:
        """The device that torch would report, which knows its formats."""
        if self.compute_capability.startswith("gfx"):
            return Device(kind="cuda", name=self.label, architecture=self.compute_capability)
        major, _, minor = self.compute_capability.partition(".")
        return Device(kind="cuda", name=self.label, capability=(int(major), int(minor)))

    def flops_per_s(self, format_name: str) -> float | None:
        """Return the peak rate of products in a format, by the format's name; None where the GPU has no unit for it."""
        if format_name in ("mxfp8", "mxfp4", "nvfp4"):
            return self.fp8_flops_per_s if format_name == "mxfp8" and self.fp4_flops_per_s else self.fp4_flops_per_s
        name = "fp8" if format_name.startswith(("e4m3", "e5m2")) else format_name
        rate: float | None = getattr(self, f"{name}_flops_per_s", None)
        return rate


def gpu_named(text: str, *, option: str = "--gpu") -> Gpu:
    """Return the GPU that ``text`` names: case, spaces, dashes and the maker's name do not matter.

    Raises:
        UsageError: there is none of that name.
    """
    found = find_gpu(text)
    if found is None:
        raise UsageError(
            f"{option} {text!r} is not a GPU that Mezzo knows; {nearest(text.lower(), GPUS)}",
            hint=f"type one of these names, as in {option} a100-80gb",
        )
    return found


def find_gpu(text: str) -> Gpu | None:
    """Return the GPU of that name, as ``gpu_named`` does; None if there is none."""
    return _BY_KEY.get(_key(text))


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", text).lower())


def _gpu(row: Mapping[str, str]) -> Gpu:
    def rate(format_name: str) -> float | None:
        text = row[f"{format_name}_tflops"]
        return float(text) * 1e12 if text else None

    return Gpu(
        name=row["name"],
        label=row["label"],
        aliases=tuple(filter(None, row["aliases"].split("|"))),
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        memory_bytes=int(float(row["memory_gib"]) * 2**30),
        bandwidth_bytes_per_s=float(row["bandwidth_gb_per_s"]) * 1e9,
        fp32_flops_per_s=float(row["fp32_tflops"]) * 1e12,
        fp32_matrix_flops_per_s=rate("fp32_matrix"),
        tf32_flops_per_s=rate("tf32"),
        fp16_flops_per_s=rate("fp16"),
        bf16_flops_per_s=rate("bf16"),
        fp8_flops_per_s=rate("fp8"),
        fp4_flops_per_s=rate("fp4"),
        multiprocessors=int(row["multiprocessors"]),
        l2_bytes=int(float(row["l2_mib"]) * 2**20),
        power_w=float(row["power_w"]),
        source=row["source"],
        checked=row["checked"],
    )


def _read() -> dict[str, Gpu]:
    text = (files("mezzo") / "gpus.csv").read_text(encoding="utf-8")
    return {gpu.name: gpu for gpu in map(_gpu, csv.DictReader(text.splitlines()))}


GPUS: dict[str, Gpu] = _read()
"""By name."""

_BY_KEY = {_key(text): gpu for gpu in GPUS.values() for text in (gpu.name, gpu.label, *gpu.aliases)}
