"""The counted step has its formats and bytes even if its update is skipped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from helpers_launch import ran
from mezzo.launch.torch import switched
from mezzo.observe.settings import AuditSettings, StopScript
from mezzo.policy import PRESETS, Policy

ROWS, INPUTS, OUTPUTS = 16, 8, 4
ONCE = 2 * ROWS * INPUTS * OUTPUTS
"""FLOPs of a linear layer forward; its backward pass has as many again for the weight, and none for the input."""


@pytest.mark.parametrize(
    ("skipped", "counted_on_step", "micro_batches"),
    [((), 2, 1), ((2,), 2, 2), ((1,), 3, 1), ((1, 2), 4, 2), ((2, 3), 2, 1)],
    ids=str,
)
def test_a_step_that_the_scripts_own_scaler_skips_is_counted(
    skipped: tuple[int, ...], counted_on_step: int, micro_batches: int
) -> None:
    torch.manual_seed(0)
    with switched(None) as (run, counted):
        model = nn.Linear(INPUTS, OUTPUTS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for step in range(1, 7):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(ROWS, INPUTS)).square().mean()
                scaler.scale(loss).backward()
            if step in skipped:
                assert model.weight.grad is not None
                model.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert [step for step, flag in enumerate(run.update.recorder.steps().skipped, 1) if flag] == list(skipped)
    found = counted.effective()
    assert found.counted_on_step == counted_on_step
    assert found.flops_by_format == {"fp16": 2 * ONCE * micro_batches}
    assert counted.memory().gradients_bytes == 4 * (INPUTS + 1) * OUTPUTS


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize("own", [(), ("wide",), ("wide", "compiled")], ids=["16 bits", "FP32", "FP32, compiled"])
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of differs by version
def test_an_optimizers_own_products_are_counted_and_are_no_forward_code(policy: str, own: tuple[str, ...]) -> None:
    torch.compiler.reset()
    effective = ran("muon", policy, *own).effective
    assert effective.left_alone == []
    assert set(effective.flops_by_format) == {policy, "fp32" if own else "bf16"}
    assert set(effective.update_flops_by_format) == {"fp32" if own else "bf16"}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_in_the_closure_of_an_optimizer_is_forward_code() -> None:
    torch.compiler.reset()
    weight, inputs = nn.Parameter(torch.ones(INPUTS, OUTPUTS)), torch.ones(4, INPUTS)
    loss_of = lambda x, w: (x @ w).square().mean()  # noqa: E731
    with switched(Policy.parse("bf16")) as (_, counted):
        compiled, optimizer = (
            torch.compile(loss_of, backend="aot_eager"),
            torch.optim.LBFGS([weight], lr=1e-3, max_iter=2),
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = compiled(inputs, weight)
            torch.autograd.backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert set(counted.effective().flops_by_format) == {"bf16", "fp32"}  # LBFGS computes dot products by itself
    torch.compiler.reset()


class Normed(nn.Module):
    """A model that Inductor and eager code round differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(INPUTS, 64), nn.LayerNorm(64), nn.Linear(64, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.gelu(self.norm(self.first(x))))
        return out


NORMED = 2 * ROWS * (2 * INPUTS * 64 + 3 * 64 * OUTPUTS)
"""FLOPs of a step of ``Normed``: its input needs no gradient."""


def _trained(called: Callable[[Any], Any]) -> list[torch.Tensor]:
    model = Normed()
    compiled, optimizer = called(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(step))
        compiled(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.slow  # Inductor runs a C++ compiler
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of differs by version
def test_code_that_inductor_compiled_runs_compiled_in_the_counted_step() -> None:
    torch.compiler.reset()
    plain = _trained(torch.compile)
    torch.compiler.reset()
    with switched(None) as (_, counted):
        found = _trained(lambda model: torch.compile(model))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert counted.effective().flops_by_format == {"fp32": NORMED}
    assert counted.operations() == []
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_operations_of_eager_backends_are_counted_as_they_run(backend: str) -> None:
    torch.compiler.reset()
    with switched(None) as (_, counted):
        _trained(lambda model: torch.compile(model, backend=backend))
    assert counted.effective().flops_by_format == {"fp32": NORMED}
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_code_of_an_unknown_backend_runs_eagerly_in_the_counted_step() -> None:
    """Operations of a graph that Mezzo does not see could not be counted."""
    num_calls = 0

    def unknown(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return graph(*args)

        return run

    torch.compiler.reset()
    with switched(None) as (_, counted):
        _trained(lambda model: torch.compile(model, backend=unknown))
    assert num_calls == 2  # the counted step ends in the third's backward pass
    assert counted.effective().flops_by_format == {"fp32": NORMED}
    torch.compiler.reset()


@pytest.mark.parametrize("observe", [None, AuditSettings(steps=(2,))], ids=["counted", "audited"])
def test_the_scripts_own_stance_towards_compiled_code_is_kept(observe: AuditSettings | None) -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        with switched(PRESETS["bf16"], observe=observe) as (run, _), suppress(StopScript):
            _trained(lambda model: torch.compile(model, backend="eager"))
        assert run.update.num_updates == (4 if observe is None else 2)
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    torch.compiler.reset()
