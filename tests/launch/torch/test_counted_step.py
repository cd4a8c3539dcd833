"""The counted step has its formats and bytes even if its update is skipped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import cond
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from helpers_compare import run
from helpers_launch import ran
from mezzo.launch.torch import switched
from mezzo.launch.torch.counted_step import counts_of
from mezzo.measure.flops import Counted, FlopCounter, effective
from mezzo.observe.settings import AuditSettings, StopScript
from mezzo.policy import PRESETS, Policy
from mezzo.records import Effective

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


# --- Operations of a traced graph are counted as the dispatch mode counts them while they run ---


Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "product": lambda a, b: a @ b,
    "two formats": lambda a, b: (a @ b).half() @ b.half().T,
    "rounded": lambda a, b: (a * 2).bfloat16().float(),
    "convolution": lambda a, b: F.conv1d(a.T[None], b[:, :, None]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
    "nothing": lambda a, b: a + 1,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_a_graph_counts_as_its_operations_do(function: Function, tracing: str) -> None:
    a, b = torch.ones(8, 16), torch.ones(16, 16)
    ran, traced = (FlopCounter(in_region=lambda: True) for _ in range(2))
    with ran:
        function(a, b)
    for operation in counts_of(make_fx(function, tracing_mode=tracing)(a, b)).operations:
        traced.count(*operation)
    assert (traced.by_format, traced.num_lowered) == (ran.by_format, ran.num_lowered)
    assert all(type(flops) is int for flops in traced.by_format.values())


def test_an_operation_whose_sizes_depend_on_values_is_listed() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a.nonzero().half() @ b.half()).sum() + (b @ b).sum()

    counter = FlopCounter(in_region=lambda: True)
    found = counts_of(make_fx(function, tracing_mode="symbolic")(torch.ones(4, 5), torch.ones(2, 2)))
    for operation in found.operations:
        counter.count(*operation)
    assert counter.by_format == {"fp32": 2 * 2 * 2 * 2}
    assert found.uncounted == {"mm": "its sizes depend on values"}
    assert found.num_lowered == 3  # the conversion, the product and its sum


def test_a_higher_order_operator_is_listed() -> None:
    def function(a: Tensor) -> Tensor:
        out: Tensor = cond(a.sum() > 0, lambda x: x @ x, lambda x: x + x, (a,))
        return out

    found = counts_of(make_fx(function, tracing_mode="symbolic")(torch.ones(4, 4)))
    assert found.uncounted == {"cond": "it is compiled as a whole"}


@pytest.mark.parametrize(
    ("uncounted", "no_effect"), [({}, "changed nothing"), ({"mm": "its sizes depend on values"}, "")]
)
def test_a_policy_is_not_judged_by_a_part_of_the_products(uncounted: dict[str, str], no_effect: str) -> None:
    for by_format in ({}, {"fp32": 8}):
        counted = Counted(by_format=by_format, num_lowered=0, outside=0, switched_off=0, step=2, uncounted=uncounted)
        found = effective(counted, Policy.parse("bf16"), emulates=False, uncounted=Effective())
        assert run("bf16", [1.0], effective=found).no_effect == no_effect
        listed = {(one.value, one.reason) for one in found.left_alone if one.what == "FLOPs not counted"}
        assert listed == set(uncounted.items())
        assert found.uncounted == sorted(uncounted)
