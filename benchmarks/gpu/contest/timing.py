"""Times, memory and the roofs of the device: the rates of a copy and of a large matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.shared.harness import summary
from mezzo.engine.matrix_units.native_units import set_fp32_products

Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes and durations of the measurements."""

    rounds: int
    block_ms: float
    loss_steps: int
    copied: int
    """FP32 elements of the copy."""
    product: int
    """Side of the matrix product."""
    parameters: int
    """Layers of BERT-base in the optimizer's case."""


FULL = Sizes(rounds=9, block_ms=200.0, loss_steps=30, copied=256 * 2**20, product=8192, parameters=12)
TINY = Sizes(rounds=3, block_ms=1.0, loss_steps=3, copied=2**18, product=64, parameters=0)


@dataclass
class Roofs:
    """The rates that the device reached."""

    copy_gb_per_s: float = 0.0
    """Bytes read and written."""
    tflops: dict[str, float] = field(default_factory=dict)
    """The rate of a large square product, by format."""

    def percent_of_peak(self, policy: str, tflops: float) -> float | None:
        """Return a step's percentage of the matrix peak of the policy's format, or None if no peak was measured."""
        peak = self.tflops.get(policy.split("-")[0])
        return 100 * tflops / peak if peak else None


def block_ms(run: Step, steps: int, device: str) -> float:
    """Return the total milliseconds of ``steps`` runs, by CUDA events or by the clock."""
    if device != "cuda":
        started = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - started) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def steps_for(run: Step, device: str, sizes: Sizes) -> int:
    once = block_ms(run, 2, device) / 2
    return max(1, min(200, round(sizes.block_ms / max(once, 1e-3))))


def in_turn(
    runs: dict[str, Step], device: str, sizes: Sizes, deadline: float
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Time all runs alternately; return the milliseconds of each, round by round, and the errors of those that failed.

    The order rotates by one every round. There are at least three rounds, and no further one begins after the deadline. A run that fails is
    removed from ``runs``, which frees its memory for the others.
    """
    failed: dict[str, Exception] = {}
    steps: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(sizes.rounds):
        if number >= 3 and time.time() > deadline:
            break
        names = list(runs)
        begin = number % max(len(names), 1)
        for name in names[begin:] + names[:begin]:
            try:
                steps[name] = steps.get(name) or steps_for(runs[name], device, sizes)
                times[name].append(block_ms(runs[name], steps[name], device) / steps[name])
            except Exception as error:
                failed[name] = bare(error)
                del runs[name], times[name]
    return times, failed


def bare(error: Exception) -> Exception:
    """Return an error and its causes without tracebacks, which would keep the tensors of the failed way alive."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def spread(times: list[float]) -> dict[str, float]:
    """Return a way's median, smallest and largest milliseconds."""
    return {f"ms_{name}": value for name, value in summary(times).items()}


def speed(times: list[float], reference: list[float]) -> dict[str, float]:
    """Return how many times as fast a way is as the reference, round by round."""
    ratios = summary([r / t for t, r in zip(times, reference, strict=True)])
    return {f"speed_{name}": value for name, value in ratios.items()}


def measure_roofs(device: str, sizes: Sizes) -> Roofs:
    """Copy a large tensor and multiply large matrices of every format."""
    roofs = Roofs(copy_gb_per_s=_copy_gb_per_s(device, sizes))
    side = sizes.product
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
    for name, dtype in formats.items():
        set_precision(name)
        x, y = a.to(dtype), b.to(dtype)
        roofs.tflops[name] = 2 * side**3 / _median_ms(lambda x=x, y=y: x @ y, device, sizes) / 1e9
    set_precision("")
    return roofs


def _copy_gb_per_s(device: str, sizes: Sizes) -> float:
    source = torch.randn(sizes.copied, device=device)
    target = torch.empty_like(source)
    return 8 * sizes.copied / _median_ms(lambda: target.copy_(source), device, sizes) / 1e6


def _median_ms(run: Step, device: str, sizes: Sizes) -> float:
    """Return the median milliseconds of one run, from blocks."""
    steps = steps_for(run, device, sizes)
    return statistics.median(block_ms(run, steps, device) / steps for _ in range(sizes.rounds))


def set_precision(policy: str) -> None:
    """Set how FP32 products are computed: as the policy says, or torch's default for other policies."""
    if policy in ("fp32", "tf32"):
        set_fp32_products("ieee" if policy == "fp32" else "tf32")
    else:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


class Memory:
    """The memory that a way allocates from now on."""

    def __init__(self, device: str) -> None:
        self.on = device == "cuda"
        if self.on:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            self.reserved = torch.cuda.memory_reserved()

    def found(self) -> dict[str, float | None]:
        """Return the peak of allocated memory and the memory reserved now, in MiB above the beginning."""
        if not self.on:
            return {"peak_mib": None, "reserved_mib": None}
        peak = torch.cuda.max_memory_allocated() - self.before
        return {"peak_mib": peak / 2**20, "reserved_mib": (torch.cuda.memory_reserved() - self.reserved) / 2**20}
