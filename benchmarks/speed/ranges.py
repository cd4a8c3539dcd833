"""What does it cost to count all gradients of a step by exponent, as ``mezzo ranges`` does?

A step is forward, backward and torch's AdamW in FP32. One call counts all gradients: once with the kernel chosen for this machine
(compiled if there is a compiler), once with plain torch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.models import LossOf, digits_cnn, small_transformer
from mezzo.engine.kernels import exponents

ROUNDS = 25
TARGET = "2% or less"
LARGE = 4 * 2**20
COUNTED, FALLBACK, READ = "counted", "counted by torch operations", "sum"


def main() -> None:
    rows, data = [], {}
    for name, make in (("digits_cnn", digits_cnn), ("small_transformer", small_transformer)):
        model, loss_of = make()
        step = _step(model, loss_of)
        step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        times = interleave({"step": step, **_counters(gradients)}, rounds=ROUNDS)
        what = f"{name}, {sum(g.numel() for g in gradients)} gradients in {len(gradients)} tensors"
        for piece, target in ((COUNTED, TARGET), (FALLBACK, "")):
            share = {key: 100 * value for key, value in ratio(times, piece, "step").items()}
            rows.append((f"{what}: {piece}, share of a step", spread(share, "%"), target))
        data[name] = {"median_ms": median_ms(times)}
    values = [torch.randn(LARGE, generator=torch.Generator().manual_seed(0)) * 1e-3]
    times = interleave({**_counters(values), READ: values[0].sum}, rounds=ROUNDS)
    per_element = {piece: time * 1e6 / LARGE for piece, time in median_ms(times).items()}
    rows += [(f"{LARGE} values: {piece}", f"{ns:.2f} ns an element", "") for piece, ns in per_element.items()]
    report("ranges", rows, {"counter": exponents.counter("cpu")[1], "ns_per_element": per_element, **data})


def _step(model: nn.Module, loss_of: LossOf) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # the gradients that are counted stay the same tensors
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _counters(gradients: list[Tensor]) -> dict[str, Callable[[], None]]:
    ways = {COUNTED: exponents.add, FALLBACK: exponents.reference}
    return {name: partial(add, gradients, list(exponents.tables(len(gradients)))) for name, add in ways.items()}
