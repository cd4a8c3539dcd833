"""How much do sums in fewer bits lose, and how long does their emulation take?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mezzo.engine.gradients import round_sums
from mezzo.engine.matrix_units.accumulation import product
from mezzo.engine.matrix_units.emulation import float8_linear, quantise
from mezzo.formats import FORMATS, RECIPES

WORDS = ("fp32", "fp22", "fp22-128")
LENGTHS = (128, 1024, 4096, 16384)
RECIPE = RECIPES["tensorwise", "ocp"]
NUM_MICRO_BATCHES = (8, 64, 512)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def error_of_products(accumulate: str, length: int, draw: Callable[..., Tensor]) -> float:
    """Return the error of 4096 sums of ``length`` products, a share of their norm in FP64: of the same 8-bit numbers, results in FP32."""
    (a, by_a), (b, by_b) = (
        quantise(t, RECIPE.values, along=along) for t, along in ((draw(64, length), -1), (draw(length, 64), 0))
    )
    exact = (a.double() @ b.double()) / by_a.double() / by_b.double()
    if accumulate == "fp32":
        found = (a.float() / by_a) @ (b.float() / by_b)
    else:
        found = product(a, b, (by_a.reciprocal(), by_b.reciprocal()), accumulate=accumulate, of="results")
    return float((found.double() - exact).norm() / exact.norm())


def error_of_gradients(count: int, fmt: str) -> float:
    """Return the error of the sum of ``count`` gradients, a share of its norm: their mean is 1, their noise as large as that of the mean.

    So a batch of all of them has the critical size, beyond which a larger one no longer pays (arXiv:1812.06162).
    """
    gradients = 1 + math.sqrt(count) * torch.randn(count, 2**14, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(2**14)
    for gradient in gradients:
        total += gradient
        round_sums([total], FORMATS[fmt])
    exact = gradients.double().sum(0)
    return float((total.double() - exact).norm() / exact.norm())


def milliseconds(accumulate: str) -> float:
    """Return the median time of a layer, forward and backward, for 256 rows and 1024 inputs and outputs."""
    x, weight = normal(256, 1024).bfloat16().requires_grad_(), normal(1024, 1024).requires_grad_()
    taken = []
    for _ in range(7):
        begin_s = time.perf_counter()
        float8_linear(x, weight, recipe=RECIPE, accumulate=accumulate).float().sum().backward()
        taken.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(taken)


def main() -> None:
    print("| products | operands |", " | ".join(f"`accumulate={word}`" for word in WORDS), "|")
    for length in LENGTHS:
        for signs, draw in (("both signs", normal), ("one sign", lambda *shape: normal(*shape).abs())):
            errors = " | ".join(f"{error_of_products(word, length, draw):.2g}" for word in WORDS)
            print(f"| {length} | {signs} | {errors} |")
    print("| micro-batches | `gradients=auto` | `gradients=bf16` |")
    for count in NUM_MICRO_BATCHES:
        errors = " | ".join(f"{error_of_gradients(count, fmt):.2g}" for fmt in ("fp32", "bf16"))
        print(f"| {count} | {errors} |")
    print("| time of a layer |", " | ".join(f"{word} {milliseconds(word):.0f} ms" for word in WORDS), "|")
