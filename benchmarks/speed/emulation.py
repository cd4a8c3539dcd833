"""How fast is emulated 16-bit arithmetic, and how often are its results bit-identical to native kernels?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.models import digits_cnn, small_transformer
from mezzo import Policy
from mezzo.engine.casts.casting import Casting

ROUNDS = 15


def main() -> None:
    rows, data = [], {}
    for name, make, limit in (("digits CNN", digits_cnn, 1.4), ("small transformer", small_transformer, 1.8)):
        times = _time(make)
        native, plain = ratio(times, "autocast fp16", "emulated fp16"), ratio(times, "emulated fp16", "fp32")
        rows.append((f'{name}: torch.autocast("cpu", float16) over emulated', spread(native), "8 or more"))
        rows.append((f"{name}: emulated fp16 over fp32", spread(plain), f"{limit} or less"))
        rows.append(
            (f"{name}: emulated bf16 over fp32", spread(ratio(times, "emulated bf16", "fp32")), f"{limit} or less")
        )
        data[name] = median_ms(times)
    for dtype in (torch.float16, torch.bfloat16):
        for against, what in (
            ("native", "native kernels that add in FP32"),
            ("float64", "float64 rounded once, all results"),
        ):
            same, within, total = _agreement(dtype, against)
            name = str(dtype).removeprefix("torch.")
            rows.append((f"{name} elements equal to {what}", f"{same / total:.3%} of {total}", "99.7% or more"))
            rows.append(("  within one unit in the last place", f"{within / total:.4%}", "100%"))
    report("emulation", rows, {"median_ms": data})


def _time(make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]) -> dict[str, list[float]]:
    model, loss_of = make()

    def step(region: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with region():
                loss = loss_of(model)
            loss.backward()
            model.zero_grad(set_to_none=True)

        return run

    return interleave(
        {
            "fp32": step(nullcontext),
            "emulated fp16": step(Casting.of(Policy.parse("fp16"), "cpu").region),
            "emulated bf16": step(Casting.of(Policy.parse("bf16"), "cpu").region),
            "autocast fp16": step(lambda: torch.autocast("cpu", dtype=torch.float16)),
        },
        rounds=ROUNDS,
    )


def _cases(dtype: torch.dtype) -> Iterator[tuple[Callable[..., Tensor], tuple[Tensor, ...], str]]:
    """Yield operations, operands, and which results torch's CPU kernels add up in FP32: all, or the forward one.

    torch 2.13's CPU kernels round partial sums to 16 bits in the gradients of convolutions (45 to 60% of their elements are the
    correctly rounded ones) and in transposed convolutions; GPU kernels do not. There only float64 is a yardstick.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    yield F.linear, (draw(64, 96), draw(80, 96), draw(80)), "all"
    yield torch.matmul, (draw(4, 48, 64), draw(4, 64, 40)), "all"
    yield torch.bmm, (draw(6, 32, 64), draw(6, 64, 32)), "all"
    yield F.conv1d, (draw(4, 16, 40), draw(24, 16, 3), draw(24)), "forward"
    yield F.conv2d, (draw(4, 16, 12, 12), draw(24, 16, 3, 3), draw(24)), "forward"
    yield F.conv3d, (draw(2, 8, 6, 6, 6), draw(12, 8, 3, 3, 3), draw(12)), "forward"
    yield F.conv_transpose2d, (draw(4, 16, 8, 8), draw(16, 12, 3, 3), draw(12)), "none"


def _agreement(dtype: torch.dtype, against: str) -> tuple[int, int, int]:
    """Return the numbers of elements that are equal, that are within one unit in the last place, and of all elements."""
    torch.manual_seed(0)
    region = Casting.of(Policy.parse("fp16" if dtype is torch.float16 else "bf16"), "cpu").region
    same = within = total = 0
    for op, operands, fp32_sums in _cases(dtype):
        with region():
            ours = _results(op, operands, dtype)
        if against == "float64":
            exact = _results(op, tuple(o.detach().double().requires_grad_() for o in operands), dtype)
            others = [r.to(dtype) for r in exact]
        else:
            others = _results(op, operands, dtype)[: {"all": None, "forward": 1, "none": 0}[fp32_sums]]
        for mine, other in zip(ours, others, strict=False):
            # Neighbouring values of one sign have neighbouring bit patterns.
            apart = (mine.view(torch.int16).int() - other.view(torch.int16).int()).abs()
            same += int((apart == 0).sum())
            within += int((apart <= 1).sum())
            total += mine.numel()
    return same, within, total


def _results(op: Callable[..., Tensor], operands: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    out = op(*operands)
    start = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, operands, start)]
