"""How fast are emulated block formats beside FP32, and beside torchao's emulation?

A step is a forward and a backward pass. Every linear layer computes in blocks (``end_layers=compute``), but for those whose sizes are no
multiple of a block: the digits CNN's last one. Its convolutions compute in BF16, emulated like all else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from benchmarks.shared.harness import Row, interleave, median_ms, ratio, report, spread
from benchmarks.shared.models import LossOf, digits_cnn, small_models
from mezzo import Session

ROUNDS = 21
POLICIES = ("mxfp8", "mxfp4", "nvfp4", "nvfp4:hadamard=none", "nvfp4:scale_rule=four_or_six", "fp8-block", "fp8")
TARGETS = {"mxfp8": "2.0 or less", "nvfp4": "3.5 or less"}


def digits_cnn_with_layers() -> tuple[nn.Module, LossOf]:
    """Return the digits CNN with two more linear layers of width 256."""
    model, loss_of = digits_cnn()
    assert isinstance(model, nn.Sequential)
    wide = nn.Sequential(
        *model[:-1], nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return wide, loss_of


def small_gpt() -> tuple[nn.Module, LossOf]:
    _, model, loss_of = list(small_models())[-1]
    return model, loss_of


class OfTorchao(nn.Linear):
    """A linear layer by torchao's emulation of MXFP8, on BF16 operands."""

    def forward(self, input: Tensor) -> Tensor:
        choices = KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
        x, weight = input.bfloat16(), self.weight.bfloat16()
        y = mx_mm.apply(x, weight, *[torch.float8_e4m3fn] * 3, 32, *choices, ScaleCalculationMode.RCEIL, False)
        return y if self.bias is None else y + self.bias.bfloat16()


def step(model: nn.Module, loss_of: LossOf, policy: str) -> Callable[[], None]:
    """Return a forward and a backward pass of a copy of ``model``; ``torchao`` stands for BF16 with its layers."""
    model = copy.deepcopy(model)
    if policy == "torchao":
        for module in model.modules():
            if type(module) is nn.Linear and module.in_features % 32 == module.out_features % 32 == 0:
                module.__class__ = OfTorchao
    plain = {"torchao": "bf16:arithmetic=emulated", "fp32": "fp32"}
    blocks = policy if policy == "fp8" else f"{policy}:end_layers=compute"
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.0), policy=plain.get(policy, blocks))

    def run() -> None:
        with session.autocast():
            loss = loss_of(model)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    rows: list[Row] = []
    data = {}
    for name, make in (("digits CNN", digits_cnn_with_layers), ("small GPT", small_gpt)):
        model, loss_of = make()
        names = ("fp32", *POLICIES, "torchao")
        times = interleave({policy: step(model, loss_of, policy) for policy in names}, rounds=ROUNDS)
        for policy in POLICIES:
            rows.append((f"{name}: {policy} over fp32", spread(ratio(times, policy, "fp32")), TARGETS.get(policy, "")))
        rows.append((f"{name}: torchao's mxfp8 over fp32", spread(ratio(times, "torchao", "fp32")), ""))
        data[name] = median_ms(times)
    report("block_formats", rows, {"median_ms": data})
