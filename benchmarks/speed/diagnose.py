"""What does ``mezzo diagnose`` cost while nothing is wrong, and in the steps that it inspects?

The steps whose operations are inspected (1, 2, 4, 8 and so on) are not among those that are timed; their cost is measured
separately, and in a model of 3,000 modules under each format, where Python's share is the largest. Plain steps are a script without
Mezzo: forward, backward and torch's AdamW in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shared.harness import interleave, median_ms, ratio, report, spread
from benchmarks.shared.loops import plain_step, repeated
from benchmarks.shared.models import LossOf, small_models
from mezzo.launch.torch import switched
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy

ROUNDS, STEPS, DEEP = 75, 3, 600
NEVER = 10**9
INSPECTED = "a step whose operations are inspected"


def main() -> None:
    rows, data = [], {}
    for name, model, loss_of in small_models():
        steps = _steps(model, loss_of, STEPS)
        idle = partial(_diagnosed, (NEVER,), steps)
        inspecting = partial(_diagnosed, (*range(1, 4 * STEPS), NEVER), steps)
        times = interleave({"plain": steps, "armed": steps}, rounds=ROUNDS, around={"armed": idle})
        pieces = {"plain": steps, "inspected": steps}
        inspected = interleave(pieces, rounds=ROUNDS // 5, around={"inspected": inspecting})
        share = {key: 100 * (value - 1) for key, value in ratio(times, "armed", "plain").items()}
        rows.append((f"{name}: armed but idle, beyond a plain step", spread(share, "%"), "3% or less"))
        rows.append((f"{name}: {INSPECTED}", spread(ratio(inspected, "inspected", "plain")), "20 or less"))
        data[name] = {f"median_ms_of_{STEPS}_steps": {"idle": median_ms(times), "inspecting": median_ms(inspected)}}
    for policy in ("as-is", "bf16", "fp16"):
        text = spread(ratio(_deep_steps(policy), "inspected", "plain"))
        rows.append((f"{DEEP} blocks, 3,000 modules, {policy}: {INSPECTED}", text, "20 or less"))
    report("diagnose", rows, data)


def _deep_steps(policy: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *(_Block() for _ in range(DEEP)), nn.Linear(32, 4))
    images, classes = torch.randn(32, 16), torch.randint(0, 4, (32,))
    steps = _steps(model, lambda net: functional.cross_entropy(net(images), classes), 1)
    inspecting = partial(_diagnosed, (*range(1, 8), NEVER), steps, None if policy == "as-is" else Policy.parse(policy))
    return interleave({"plain": steps, "inspected": steps}, rounds=5, around={"inspected": inspecting})


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(32), nn.Linear(32, 32)
        self.activation, self.back = nn.ReLU(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.back(self.activation(self.wide(self.norm(x))))
        return added


def _steps(model: nn.Module, loss_of: LossOf, num: int) -> Callable[[], None]:
    return repeated(plain_step(model, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-4)), num)


@contextmanager
def _diagnosed(numbers: tuple[int, ...], steps: Callable[[], None], policy: Policy | None = None) -> Iterator[None]:
    with switched(policy, observe=DiagnoseSettings(steps=numbers)):
        steps()  # the first step's one-time work is not timed
        yield
