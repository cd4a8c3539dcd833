"""What the launcher does to torch: compiled code, worker processes, seeds, loss scales, and everything put back afterwards."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler, optimizer
from torch.overrides import _get_current_function_mode_stack

from helpers_launch import AS_IS, PLAIN, Ran, ran
from mezzo.engine.casts.casting import Casting
from mezzo.errors import PolicyError, ScaleFloorError
from mezzo.launch.patches import Patches
from mezzo.launch.torch import switched
from mezzo.policy import Policy

FP16 = 4 * 2.0**-11  # four roundings to fp16

# --- torch.compile -----------------------------------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of differs by version, and is none of ours


def slow(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@quiet
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("what", ["module", "function", "step", *map(slow, ("in-place", "breaks", "update"))])
def test_compiled_code_runs_under_the_policy(what: str) -> None:
    expected = ran("compiled", PLAIN, what, "aot_eager")
    found = ran("compiled", "fp16", what, "aot_eager")
    differences = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    assert max(differences) < FP16 * max(expected.losses)
    assert found.losses != expected.losses
    norms = zip(found.values["norms"], expected.values["norms"], strict=True)
    assert all(math.isclose(a, b, rel_tol=4 * FP16) for a, b in norms)
    assert (len(found.steps), found.steps.num_skipped) == (8, 0)
    assert found.steps.loss_scale == [65536.0] * 8
    assert found.effective.flops_by_format == {"fp16": 2 * 8 * (6 * 16 * 2 + 16 * 2 * 3)}
    assert found.reasons == []


@quiet
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("what", ["function", "update", "step"])
def test_compiled_code_skips_an_overflow(what: str) -> None:
    found = ran("compiled", "fp16:init_scale=1048576", what, "aot_eager")
    skipped = found.steps.num_skipped
    assert 1 <= skipped <= 6
    assert found.losses[: skipped + 1] == [found.losses[0]] * (skipped + 1)
    assert found.losses[-1] < found.losses[0]


@quiet
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("scales", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("policy", [None, "bf16:op_lists=device", "fp16:op_lists=device"], ids=str)
@pytest.mark.parametrize("what", ["module", *map(slow, ("in-place", "step"))])
def test_compiled_code_goes_on_once_everything_has_been_checked(what: str, policy: str | None, scales: bool) -> None:
    """After 64 and after 100 updates, hooks are removed that compiled code may have kept."""
    with switched(None if policy is None else Policy.of(policy)) as (run, _):
        model: Any = nn.Sequential(nn.Linear(4, 1))
        if what == "module":
            model = torch.compile(model, backend="aot_eager")
        elif what == "in-place":
            model.compile(backend="aot_eager")
        loss_of = lambda x: model(x).float().square().mean()  # noqa: E731
        if what == "step":
            loss_of = torch.compile(loss_of, backend="aot_eager")
        sgd, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=scales)
        for _ in range(120):
            sgd.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=scales):
                loss = loss_of(torch.ones(2, 4))
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
        run.close_update()
        losses = run.update.recorder.steps().loss
    assert len(losses) == 120
    assert losses[-1] < losses[0]


@pytest.mark.slow
@quiet
@pytest.mark.usefixtures("compiler")
def test_kernels_of_inductor_run_under_the_policy() -> None:
    expected, found = ran("compiled", PLAIN, "module", "inductor"), ran("compiled", "bf16", "module", "inductor")
    differences = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    assert 0 < max(differences) < 8 * FP16 * max(expected.losses)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "2 - x": lambda x: 2 - x,
    "2 / x": lambda x: 2 / x,
    "x // 2": lambda x: x // 2,
    "2 // x": lambda x: 2 // x,
    "2 % x": lambda x: 2 % x,
    "x.pow(3)": lambda x: x.pow(3),
    "x @ x": lambda x: x @ x,
    "x.norm()": lambda x: x.norm(),
}


@quiet
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compile_to_what_they_are(name: str) -> None:
    region = Casting.of(Policy.parse("fp16"), "cpu").region
    values = torch.linspace(0.5, 2, 16).reshape(4, 4).half()
    with region():
        expected = OPERATORS[name](values)
        found = torch.compile(OPERATORS[name], backend="aot_eager", fullgraph=True)(values)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


# --- worker processes and seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_data_comes_from_worker_processes(method: str) -> None:
    found = ran("workers", "fp16", method, seed=1)
    assert sorted(found.values["order"]) == list(range(32))
    assert len(found.steps) == 4
    assert found.effective.flops_by_format == {"fp16": 4608}
    if method == "fork":
        assert found.values["order"] == ran("workers", "fp32", method, seed=1).values["order"]


def test_the_order_of_the_data_is_the_same_under_every_policy_and_another_for_every_seed() -> None:
    policies = ["fp32", "fp16", "bf16", "fp16-master", AS_IS]
    orders = {policy: [ran("shuffled", policy, seed=k).values["order"] for k in (0, 1)] for policy in policies}
    assert all(orders[policy] == orders["fp32"] for policy in policies)
    assert orders["fp32"][0] != orders["fp32"][1]
    # Dropout draws the same numbers too: only the rounding is another.
    fp32, bf16 = ran("shuffled", "fp32", seed=1), ran("shuffled", "bf16", seed=1)
    assert max(abs(a - b) for a, b in zip(fp32.losses, bf16.losses, strict=True)) < 4 * 2.0**-8 * max(fp32.losses)


def test_seed_zero_is_the_script_alone_and_no_seed_too() -> None:
    alone = ran("shuffled", PLAIN).values
    assert ran("shuffled", "fp32", seed=0).values == alone
    assert ran("shuffled", "fp32").values == alone


def test_every_kind_of_seed_is_shifted_once() -> None:
    zero, one = (ran("shuffled", "fp32", seed=k).values["drawn"] for k in (0, 1))
    assert {name for name in zero if zero[name] == one[name]} == {"split"}  # generators of libraries stay
    assert one["generator"] == torch.rand((), generator=torch.Generator().manual_seed(8)).item()
    assert one["default_rng"] == np.random.default_rng(5).random()
    assert one["random"] == random.Random(2).random()
    assert one["numpy"] == np.random.RandomState(3).rand()


def test_a_script_without_seeds_is_repeatable() -> None:
    def drawn(seed: int) -> list[float]:
        with switched(None, seed=seed):
            return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    assert drawn(3) == drawn(3)
    assert not set(drawn(3)) & set(drawn(4))


def test_seeds_of_other_types_pass() -> None:
    with switched(None, seed=2):
        np.random.seed(np.int64(5))
        shifted = np.random.rand()
        np.random.seed(None)
        np.random.default_rng()
        random.seed("text")
        torch.manual_seed(np.int32(1))
    assert shifted == np.random.RandomState(7).rand()


# --- a script's own mixed precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["new", "fused"])
def test_under_fp32_the_scripts_own_mixed_precision_is_off(names: str) -> None:
    found = ran("own_amp", "fp32", names, "65536")
    assert found.values["autocasts"] == [False]
    assert found.values["dtypes"] == ["torch.float32"]
    assert found.values["scales"] == [1.0] * 12
    assert found.steps.loss_scale == []
    assert set(found.effective.flops_by_format) == {"fp32"}
    assert len(found.steps) == 12


@pytest.mark.parametrize("names", ["new", "fused"])
def test_a_policy_takes_over_and_scales_once(names: str) -> None:
    found, fp32 = ran("own_amp", "fp16", names, "16777216"), ran("own_amp", "fp32", names, "65536")
    assert found.values["autocasts"] == [True]
    assert found.values["dtypes"] == ["torch.float16"]  # an operation outside modules, in the script's own region
    assert found.values["scales"] == [1.0] * 12
    assert found.steps.loss_scale == [65536.0] * 12
    assert found.steps.num_skipped == 0
    assert set(found.effective.flops_by_format) == {"fp16"}
    assert found.reasons == found.findings == []
    assert max(abs(a - b) for a, b in zip(found.losses, fp32.losses, strict=True)) < FP16 * max(fp32.losses)
    norms = zip(found.values["norms"], fp32.values["norms"], strict=True)
    assert all(math.isclose(a, b, rel_tol=4 * FP16) for a, b in norms)


def test_another_format_takes_over_too() -> None:
    found = ran("own_amp", "bf16", "new", "65536")
    assert found.values["dtypes"] == ["torch.bfloat16"]
    assert found.steps.loss_scale == []


@pytest.mark.parametrize("init_scale", ["65536", "16777216"])
def test_as_is_records_the_true_losses_scales_and_skips(init_scale: str) -> None:
    alone, found = ran("own_amp", PLAIN, "new", init_scale), ran("own_amp", AS_IS, "new", init_scale)
    assert found.values == alone.values
    assert found.steps.loss_scale == alone.values["scales"]
    before = [float(init_scale), *alone.values["scales"]]
    assert found.steps.skipped == [after < first for first, after in pairwise(before)]
    assert found.steps.num_skipped == (0 if init_scale == "65536" else 8)
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found.steps.loss, alone.losses, strict=True))
    assert found.effective.flops_by_format == {"fp16": 4864}
    assert found.findings == []


def test_as_is_records_unscaled_norms_of_an_optimizer_that_unscales_itself() -> None:
    scaled, separate = ran("own_amp", AS_IS, "fused", "65536"), ran("own_amp", AS_IS, "new", "65536")
    assert math.isclose(scaled.steps.grad_norm[0], separate.values["norms"][0], rel_tol=1e-6)
    assert scaled.findings == separate.findings == []


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the script's model is on the CPU")
def test_the_old_names_of_mixed_precision_work() -> None:
    found = ran("own_amp", "fp16", "old", "65536")
    assert (len(found.steps), found.steps.loss_scale[-1]) == (12, 65536.0)
    assert found.findings == []
    assert found.values["scales"] == [1.0] * 12


def test_autocast_as_a_decorator_and_inside_a_module_stays_what_it_is() -> None:
    seen: dict[str, torch.dtype] = {}

    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                seen["off"] = (x @ x).dtype
            seen["on"] = (x @ x).dtype
            return x

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def decorated(x: Tensor) -> Tensor:
        return x @ x

    with switched(Policy.parse("fp16")):
        Careful()(torch.randn(3, 3))
        seen["decorated"] = decorated(torch.randn(3, 3)).dtype
        seen["outside"] = (torch.randn(3, 3) @ torch.randn(3, 3)).dtype
    assert seen == {"off": torch.float32, "on": torch.float16, "decorated": torch.float16, "outside": torch.float32}


# --- loss scales -------------------------------------------------------------------------------------------------------------


def trained(policy: str, pattern: list[bool]) -> Ran:
    """Train one parameter with gradients that are infinite where ``pattern`` says so."""
    model = nn.Linear(2, 1)
    model.weight.register_hook(lambda g: g * torch.inf if pattern[run.update.recorder.num_closed] else g)
    with switched(Policy.parse(policy)) as (run, counted):
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in pattern:
            sgd.zero_grad()
            model(torch.randn(4, 2)).mean().backward()
            sgd.step()
    return Ran({}, "", run.update.recorder.steps(), counted.effective(), counted.memory(), run.lint.findings())


def test_the_scale_goes_the_way_of_gradscaler() -> None:
    generator = random.Random(0)
    pattern = [generator.random() < 0.3 for _ in range(60)]
    found = trained("fp16:init_scale=16:growth_interval=3:growth_factor=4:backoff_factor=0.25", pattern)
    scaler = torch.amp.GradScaler("cpu", init_scale=16, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
    parameter = nn.Parameter(torch.ones(1))
    sgd, expected = torch.optim.SGD([parameter], lr=0.01), []
    for infinite in pattern:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([torch.inf if infinite else 1.0])
        scaler.step(sgd)
        scaler.update()
        expected.append(scaler.get_scale())
    assert max(expected) < 65536  # where nothing overflows but what the pattern says
    assert found.steps.loss_scale == expected
    assert found.steps.skipped == pattern
    assert len(set(expected)) > 5


@pytest.mark.parametrize(
    ("policy", "infinite", "scales"),
    [
        ("fp16:loss_scale=static:init_scale=128", [False, True, False], [128.0] * 3),
        ("fp16:init_scale=1024:hysteresis=2", [True, False, True, True], [1024.0, 1024.0, 1024.0, 512.0]),
    ],
)
def test_a_static_scale_stays_and_hysteresis_bears_an_overflow(
    policy: str, infinite: list[bool], scales: list[float]
) -> None:
    found = trained(policy, infinite)
    assert found.steps.loss_scale == scales
    assert found.steps.skipped == infinite


def test_an_overflow_at_the_floor_is_an_error() -> None:
    with pytest.raises(ScaleFloorError, match="floor of 512, update 1"):
        trained("fp16:init_scale=1024:min_scale=512", [True, True, True])


def test_a_clamp_does_not_hide_an_overflow() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    with switched(Policy.parse("fp16:init_scale=16777216")) as (run, _):
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        (model(torch.ones(4, 2)).sum() * 100).backward()
        assert model.weight.grad is not None
        model.weight.grad.clamp_(-1, 1)  # 1, had infinity been let through
        sgd.step()
        assert torch.equal(model.weight, before)
    assert run.update.recorder.steps().skipped == [True]


def test_losses_on_their_own_do_not_count_and_other_outputs_have_none() -> None:
    model = nn.Linear(2, 2)
    with switched(Policy.parse("fp16:init_scale=1024")) as (run, _):
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.randn(4, 2)).sum()
        model(torch.randn(4, 2)).backward(torch.full((4, 2), 0.5))
        sgd.step()
    steps = run.update.recorder.steps()
    assert len(steps) == 1
    assert math.isnan(steps.loss[0])
    assert model.bias.grad is not None
    assert torch.allclose(model.bias.grad, torch.full((2,), 2.0))


def _assigned(loss: Tensor, model: nn.Module, inputs: Any, gradient: Tensor | None) -> None:
    found = torch.autograd.grad(loss, inputs, gradient)
    for parameter, one in zip(model.parameters(), found, strict=True):
        parameter.grad = one


STARTS: dict[str, tuple[Callable[[Tensor, nn.Module], Any], float]] = {  # of a loss of 2
    "nothing given": (lambda loss, _: loss.backward(), 2.0),
    "the critic of a WGAN": (lambda loss, _: loss.backward(torch.tensor(-1.0)), -2.0),
    "a share of a window": (lambda loss, _: loss.backward(gradient=torch.tensor(0.25)), 0.5),
    "two losses": (lambda loss, _: torch.autograd.backward([loss, 3 * loss], [None, torch.tensor(-1.0)]), -4.0),
    "losses of an iterator": (lambda loss, _: torch.autograd.backward(iter([loss, loss])), 4.0),
    "gradients asked for": (lambda loss, m: _assigned(loss, m, [*m.parameters()], torch.tensor(-1.0)), -2.0),
    "of an iterator": (lambda loss, m: _assigned(loss, m, m.parameters(), torch.tensor(-1.0)), -2.0),
    "of a view": (lambda loss, m: _assigned(loss, m, dict(m.named_parameters()).values(), None), 2.0),
}


@pytest.mark.parametrize("policy", [None, "fp32", "fp16:init_scale=1024"])
@pytest.mark.parametrize(("start", "expected"), STARTS.values(), ids=STARTS)
def test_a_loss_counts_times_the_gradient_that_its_backward_pass_starts_from(
    start: Callable[[Tensor, nn.Module], Any], expected: float, policy: str | None
) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    with switched(None if policy is None else Policy.parse(policy)) as (run, _):
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(5):
            sgd.zero_grad()
            start(model(torch.ones(4, 2)).mean(), model)
            sgd.step()
    assert [*run.update.recorder.steps().loss] == [expected] * 5


def test_gradients_for_some_inputs_only_and_in_a_mapping() -> None:
    x, w = torch.randn(3, 3), torch.eye(3, requires_grad=True)
    model = nn.Linear(3, 1)
    with switched(Policy.parse("fp16:init_scale=1024")):
        inner = x @ w
        model(inner).sum().backward(inputs=[inner, model.bias])
        (found,) = torch.autograd.grad(model(x @ w).sum(), [w])
    assert inner.grad is not None
    assert torch.allclose(inner.grad, model.weight.expand(3, 3), rtol=FP16)
    assert model.bias.grad is not None
    assert model.bias.grad.item() == 3.0
    assert (w.grad, model.weight.grad) == (None, None)
    assert torch.allclose(found, x.T @ model.weight.expand(3, 3), rtol=0.1, atol=0.01)


def test_retained_gradients_add_up_over_backward_passes() -> None:
    model, x = nn.Linear(3, 1), torch.randn(2, 3)
    with switched(Policy.parse("fp16:init_scale=1024")):
        inner = x.clone().requires_grad_() * 1
        inner.retain_grad()
        loss = model(inner).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert inner.grad is not None
    assert torch.allclose(inner.grad, 2 * model.weight.expand(2, 3), rtol=FP16)


def test_an_optimizer_around_another_makes_one_update() -> None:
    class Around(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, lr=0.0)
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    model = nn.Linear(2, 1)
    parameters = list(model.parameters())
    with switched(Policy.parse("fp16:init_scale=1024")) as (run, _):
        around = Around(torch.optim.SGD(parameters, lr=0.01), parameters)
        model(torch.ones(1, 2)).sum().backward()
        around.step()
    assert math.isclose(run.update.recorder.steps().grad_norm[0], math.sqrt(3), rel_tol=1e-6)


# --- modules kept in FP32 ----------------------------------------------------------------------------------------------------


def test_named_modules_stay_in_fp32() -> None:
    found = ran("plain", "fp16:fp32_modules=2")
    assert found.effective.flops_by_format == {"fp16": 2 * 2 * 8 * 6 * 16, "fp32": 3 * 2 * 8 * 16 * 2}
    assert found.reasons == []


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"no module is named 'second'; allowed: 0, 1, 2"):
        ran("plain", "fp16:fp32_modules=second")
    with pytest.raises(PolicyError, match=r"no module is named '7'"):
        ran("by_hand", "fp16:fp32_modules=7", "grad")


# --- everything is put back --------------------------------------------------------------------------------------------------


def patched() -> list[Any]:
    """Return every attribute of torch and numpy that the launcher replaces."""
    schedulers = [
        c for c in vars(lr_scheduler).values() if isinstance(c, type) and c.__module__ == lr_scheduler.__name__
    ]
    owners: list[tuple[Any, str]] = [
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch, "compile"),
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"),
        (torch, "Generator"),
        (random, "seed"),
        (np.random, "seed"),
        (np.random, "default_rng"),
        (F, "binary_cross_entropy"),
        (clip_grad, "_get_total_norm"),
        (torch.utils.checkpoint, "checkpoint"),
        (torch.autocast, "__init__"),
        (torch.autocast, "__enter__"),
        (torch.autocast, "__exit__"),
        *[(torch.amp.GradScaler, name) for name in ("__init__", "scale", "step", "update", "unscale_", "get_scale")],
        *[(torch.optim.Optimizer, name) for name in ("__init__", "step", "zero_grad")],
        *[
            (owner, f"clip_grad{name}_")
            for owner in (clip_grad, nn.utils)
            for name in ("_norm", "_value", "s_with_norm")
        ],
        (nn.Module, "zero_grad"),
        (torch.optim.swa_utils.AveragedModel, "update_parameters"),
        *[(Tensor, name) for name in ("register_hook", "retain_grad", "backward")],
        *[(nn.Module, name) for name in ("__call__", "register_full_backward_hook", "register_full_backward_pre_hook")],
        *[(c, name) for c in schedulers for name in ("__init__", "step")],
    ]
    return [vars(owner).get(name, getattr(owner, name, None)) for owner, name in owners]


def state() -> list[Any]:
    """Return torch's global state that the launcher touches."""
    dictionaries = [
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks_always_called,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ]
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    modes = [*_get_current_function_mode_stack(), torch._C._len_torch_dispatch_stack()]
    return [*map(dict, dictionaries), devices, modes, torch.is_grad_enabled()]


@pytest.mark.parametrize(
    ("policy", "raises"),
    [*((p, False) for p in ("fp32", "tf32", "bf16", "fp16", "fp16-pure", "fp16-master", "fp8", None)), ("fp16", True)],
)
def test_everything_is_put_back(policy: str | None, raises: bool) -> None:
    before, state_before = patched(), state()
    model = nn.Linear(2, 2)
    body = contextlib.suppress(ZeroDivisionError) if raises else contextlib.nullcontext()
    with body, switched(None if policy is None else Policy.parse(policy), seed=1):
        assert [a is b for a, b in zip(patched(), before, strict=True)].count(False) > 5
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            F.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 2)).backward()
            sgd.step()
        if raises:
            model.register_forward_hook(lambda *_: 1 / 0)
            with torch.autocast("cpu"):
                model(torch.ones(2, 2))
    assert [a is b for a, b in zip(patched(), before, strict=True)].count(False) == 0
    assert state() == state_before
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("policy", "inside", "result"), [("fp16-master", torch.float32, torch.half), ("fp16-pure", torch.half, torch.half)]
)
def test_a_norm_written_by_hand_stays_in_fp32_with_its_weight_in_masters(
    policy: str, inside: torch.dtype, result: torch.dtype
) -> None:
    class OwnRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            variance = x.pow(2).mean(-1, keepdim=True)
            inner.append(variance.dtype)
            return self.weight * (x * torch.rsqrt(variance + 1e-6))

    inner: list[torch.dtype] = []
    outer: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(8, 8), OwnRMSNorm(), nn.Linear(8, 2))
    with switched(Policy.parse(policy), seed=None):
        model[1].register_forward_hook(lambda _, __, found: outer.append(found.dtype))
        # A mean square of 1e-6: its rsqrt has a derivative of 5e8, which FP16 cannot hold.
        model(1e-3 * torch.ones(4, 8)).pow(2).mean().backward()
    assert inner == [inside]
    assert outer == [result]


def test_a_module_that_fails_leaves_no_region_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(str(self.inner(x).dtype))

    with switched(Policy.parse("fp16")):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"torch\.float16"):
                Fails()(torch.ones(2, 2))
            assert _get_current_function_mode_stack() == []
            assert not torch.is_autocast_enabled("cpu")
        assert nn.Linear(2, 2)(torch.ones(2, 2)).dtype is torch.float32


def test_models_and_optimizers_are_not_kept_alive() -> None:
    with switched(Policy.parse("fp16")) as (run, _):
        for _ in range(3):
            model = nn.Linear(2, 2)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 2)).sum().backward()
            sgd.step()
        assert (len(run.objects.roots), len(run.objects.optimizers)) == (1, 1)
    assert run.update.recorder.num_closed == 3


def test_patches_put_back_inherited_and_computed_attributes() -> None:
    class Base:
        def method(self) -> int:
            return 1

    class Derived(Base):
        pass

    class Computed:
        __slots__ = ()
        value = 1

        def __setattr__(self, name: str, value: int) -> None:
            type(self).value = value

    computed = types.SimpleNamespace(inner=Computed())
    computed.__dict__["inner"] = type("Holder", (), {"__setattr__": Computed.__setattr__, "value": 1})()
    patches = Patches()
    patches.replace(Derived, "method", lambda self: 2)
    patches.replace(computed.inner, "value", 5)
    assert (Derived().method(), computed.inner.value) == (2, 5)
    patches.undo()
    assert (Derived().method(), computed.inner.value) == (1, 1)
    assert "method" not in vars(Derived)


def test_a_thread_that_ends_leaves_the_others_region_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    dtypes: list[torch.dtype] = []

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: dtypes.append(model(x.float()).dtype))
            thread.start()
            thread.join()
            dtypes.append((x @ x).dtype)
            return x

    with switched(Policy.parse("fp16")):
        Outer()(torch.ones(2, 2))
    assert dtypes == [torch.float32, torch.float16]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_inside_a_modules_forward_pass_computes_as_one_outside(make: Any) -> None:
    """A -master policy lists nearly all operations to run in 16 bits; the norm and the optimizer's arithmetic are not the model's."""

    class Whole(nn.Module):
        def __init__(self, *, steps: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
            self.steps = steps

        def forward(self, x: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(self.net(x), torch.ones(8, 2))
            loss.backward()
            if self.steps:
                self.optimizer.step()
            return loss.detach()

    def trained(*, inside: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        with switched(Policy.of("bf16-master")) as (run, _):
            whole = Whole(steps=inside)
            whole.optimizer = make(whole.parameters(), lr=0.01)
            for _ in range(12):
                whole.optimizer.zero_grad()
                whole(torch.randn(8, 6))
                if not inside:
                    whole.optimizer.step()
        return run.update.recorder.steps().grad_norm, [p.detach().clone() for p in whole.parameters()]

    (norms, weights), (plain_norms, plain_weights) = trained(inside=True), trained(inside=False)
    assert norms == plain_norms
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


class Unasking(torch.optim.Optimizer):
    """An optimizer that reads every gradient without asking whether there is one, as K-FAC does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Descend."""
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


class Inheriting(Unasking):
    """Its step is that of its base."""


@pytest.mark.parametrize("kind", [Unasking, Inheriting])
def test_a_skipped_update_does_not_call_an_optimizer_that_needs_gradients(kind: type[Unasking]) -> None:
    raw = vars(Unasking)["step"]
    with switched(Policy.parse("fp16:arithmetic=emulated")) as (run, _):
        torch.manual_seed(0)
        model, optimizers = nn.Linear(8, 8), []
        for _ in range(2):  # torch hooks the class at its first optimizer
            optimizers.append(kind(model.parameters()))
            for _ in range(6):
                optimizers[-1].zero_grad()
                (model(torch.ones(4, 8)).sum() * 64.0).backward()
                optimizers[-1].step()
    skipped = run.update.recorder.steps().skipped
    assert sum(skipped[:6]) > 0
    assert [one.num_steps for one in optimizers] == [6 - sum(skipped[:6]), 6 - sum(skipped[6:])]
    assert model.weight.isfinite().all()
    assert vars(Unasking)["step"] is raw


class Listing(nn.Module):
    """Its parameters are a list, and no iterator, as in MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])

    def parameters(self, recurse: bool = True) -> Any:
        """Return the list."""
        return self.weights

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x @ self.weights[0]


class Learner(nn.Module):
    """Its forward pass is a whole step, and returns an array."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Listing()
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.125)

    def forward(self, x: Tensor) -> np.ndarray[Any, Any]:
        """Step, and return the loss twice."""
        loss = self.inner(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return np.full(2, loss.item())


@pytest.mark.parametrize("policy", ["fp32", "fp16:arithmetic=emulated:init_scale=1024"])
def test_a_module_may_return_an_array_and_list_its_parameters(policy: str) -> None:
    """A step of 0.125 along a gradient of 2 takes each weight from 1 to 0.75, and each output from 2 to 1.5."""
    with switched(Policy.parse(policy)):
        Listing()(torch.ones(1, 2))
        learner = Learner()
        losses = [learner(torch.ones(1, 2)).tolist() for _ in range(2)]
    assert losses == [[4.0, 4.0], [2.25, 2.25]]
