"""Constants of the time formulas and their errors, read from ``constants.json``.

``benchmarks/predict_fit.py`` writes that file from public measurements. The errors are those of GPUs of an architecture that
was left out of the fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The free parameters of the formulas; the defaults are where a fit begins."""

    half: float = 0.75
    """Share of the peak rate that 16-bit products reach."""
    tf32: float = 0.75
    fp32: float = 0.75
    depthwise: float = 0.2
    """Share of the FP32 rate that depthwise convolutions reach."""
    grouped: float = 0.5
    """Rate of grouped convolutions over that of others."""
    winograd: float = 2.0
    """Rate of FP32 convolutions of 3 x 3 over what their multiplications allow: Winograd's algorithm needs fewer."""
    bandwidth: float = 0.75
    """Share of the memory's bandwidth that is reached."""
    issue_bytes: float = 20.0
    """Bytes that one multiprocessor moves in a cycle, at most."""
    block_elements: float = 1.25
    """Elements that one block of threads moves in a cycle: channels-first batch normalisation has one block per channel."""
    feed_bytes: float = 40.0
    """Bytes that matrix units get from the L2 cache, per cycle and multiprocessor."""
    layout_copies: float = 0.5
    """Copies of a channels-first 16-bit convolution's operands, in reads and writes of all of them."""
    norm_passes: float = 1.0
    """Extra reads of batch normalisation's operands."""
    l2_share: float = 0.2
    """Share of the L2 cache in which an operation finds what the last one wrote."""
    overlap: float = 2.0
    """1 where arithmetic and traffic wait for each other, large where they overlap."""
    depth_latency: float = 32.0
    """Products of a sum that pass before its units are full."""
    latency_s: float = 3e-6
    """From the end of one kernel to the start of the next."""
    launch_s: float = 6e-6
    """Host time of one kernel; assumed, not fitted: the rows have large batches."""
    full_clock_w: float = 2.2
    """Board power for each multiprocessor and GHz below which the clock falls."""
    waiting: float = 0.8
    """Rate of 16-bit products where loads into shared memory are not asynchronous, over that where they are."""
    old_libraries: float = 1.15
    """Time of steps on matrix units in containers of 2020 and 2021, over later ones."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants, and the rows that they were fitted to."""

    constants: Constants
    num_rows: int
    low: float
    """10th percentile of measured over predicted throughput, architectures left out."""
    high: float
    """90th percentile."""
    validated: dict[str, list[str]]
    """Architecture: the precisions that rows have measured."""

    def covers(self, architecture: str, precision: str) -> bool:
        """Return whether rows of that architecture and precision were measured."""
        return precision in self.validated.get(family(architecture), ())


def family(architecture: str) -> str:
    """Return the group with which a fit leaves an architecture out: ``GA10x`` for ``Ampere GA102``."""
    name = architecture.split()[0] if architecture.startswith(("Ada", "Blackwell")) else architecture.split()[-1]
    return "GA10x" if name in ("GA102", "GA104") else name


def fitted() -> Fitted:
    """Return the constants that ship."""
    data: dict[str, Any] = json.loads((files("mezzo.measure.predict") / "constants.json").read_text(encoding="utf-8"))
    return Fitted(**{**data, "constants": Constants(**data["constants"])})
