"""Training loops of Paddle under policies: numbers, loss scale, skips, what is counted, what is left alone, and what is undone."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from paddle_runs import AS_IS, batches, fit, network, numbers, paddle, ran

from mezzo.devices import Device
from mezzo.engine.scaling import DynamicScale
from mezzo.errors import NonFiniteLossError, PolicyError, ScaleFloorError
from mezzo.frameworks.paddle import to_paddle
from mezzo.policy import Policy

Array = np.ndarray[Any, Any]
nn, F, optimizers = paddle.nn, paddle.nn.functional, paddle.optimizer
# Paddle says so at every step of every batch normalisation.
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")

NO_EFFECT = "Paddle's AMP has no effect on a CPU: it turns itself off without a GPU"


def loop(
    *, steps: int = 6, overflows: tuple[int, ...] = (), accumulate: int = 1, clip: float | None = None, **amp: Any
) -> Callable[[], dict[str, Any]]:
    """Return a training loop as a person writes it; the loss is infinite at the steps in ``overflows`` (from 0)."""

    def train() -> dict[str, Any]:
        paddle.seed(1)
        model = network()
        schedule = optimizers.lr.ExponentialDecay(0.1, 0.5)
        grad_clip = None if clip is None else nn.ClipGradByGlobalNorm(clip)
        optimizer = optimizers.Momentum(schedule, parameters=model.parameters(), grad_clip=grad_clip)
        seen: dict[str, Any] = {"losses": [], "gradients": [], "weights": [], "rates": [], "model": model}
        scaler = paddle.amp.GradScaler(init_loss_scaling=4.0) if amp else None
        if amp:
            model, optimizer = paddle.amp.decorate(model, optimizer, level="O2")
        for step, (x, y) in enumerate(batches(steps)):
            for part in range(accumulate):
                rows = slice(part * 8 // accumulate, (part + 1) * 8 // accumulate)
                with paddle.amp.auto_cast(enable=bool(amp), **amp):
                    loss = F.cross_entropy(model(x[rows]), y[rows]) / accumulate
                loss = loss * (math.inf if step in overflows else 1.0)
                seen["losses"].append(float(loss))
                (loss if scaler is None else scaler.scale(loss)).backward()
            seen["gradients"].append([numbers(p.grad) for p in model.parameters() if p.grad is not None])
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            optimizer.clear_grad()
            seen["weights"].append([numbers(p) for p in model.parameters() if p.trainable])
            seen["rates"].append(schedule.get_lr())
        return seen

    return train


def equal(ones: list[Array], others: list[Array]) -> bool:
    return len(ones) == len(others) and all(np.array_equal(a, b) for a, b in zip(ones, others, strict=True))


# --- numbers ---------------------------------------------------------------------------------------------------------------------


def fp16(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def bf16(x: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


@pytest.mark.parametrize(("policy", "rounds"), [("fp16:init_scale=1024", fp16), ("bf16", bf16)])
def test_a_linear_layer_has_a_matrix_units_numbers(policy: str, rounds: Callable[[Array], Array]) -> None:
    """All sums are of few numbers with few bits, so that their order does not matter and every bit has to agree."""
    draw = np.random.Generator(np.random.PCG64(2))
    x, w, b = (draw.integers(-4000, 4000, shape).astype(np.float32) / 4096 for shape in ((4, 2), (2, 3), (3,)))
    target = draw.integers(-8, 8, (4, 3)).astype(np.float32)

    def train() -> list[Array]:
        layer = nn.Linear(2, 3)
        layer.weight.set_value(w)
        layer.bias.set_value(b)
        given = paddle.to_tensor(x, stop_gradient=False)
        y = layer(given)
        (y * paddle.to_tensor(target)).sum().backward()
        optimizers.SGD(0.0, parameters=layer.parameters()).step()
        return [numbers(t) for t in (y, given.grad, layer.weight.grad, layer.bias.grad)]

    scale = Policy.parse(policy).init_scale if "init" in policy else 1.0
    low_x, low_w, low_b = rounds(x), rounds(w), rounds(b)
    gradient = rounds(target * np.float32(scale))
    wanted = [
        rounds(low_x @ low_w + low_b),
        rounds(gradient @ low_w.T) / np.float32(scale),
        rounds(low_x.T @ gradient) / np.float32(scale),
        rounds(gradient.sum(0)) / np.float32(scale),
    ]
    assert equal(ran(train, policy).value, wanted)


@pytest.mark.parametrize("policy", [AS_IS, "fp32", "bf16:arithmetic=native", "fp16:op_lists=device:loss_scale=none"])
def test_what_casts_nothing_changes_no_bit(policy: str) -> None:
    plain, found = loop()(), ran(loop(), policy, seed=None)
    assert found.value["losses"] == plain["losses"]
    assert equal(found.value["weights"][-1], plain["weights"][-1])
    assert found.steps.loss == pytest.approx(plain["losses"], abs=0)
    assert set(found.effective.flops_by_format) == {"fp32"}
    assert not found.effective.emulated
    if "=" in policy:
        assert found.reasons == {f"{policy[:4]} fp32": NO_EFFECT}


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16-master", "bf16-pure"])
def test_emulated_policies_say_so(policy: str) -> None:
    found, plain = ran(loop(), policy), ran(loop(), "fp32")
    assert found.effective.emulated
    assert set(found.effective.flops_by_format) == {policy[:4]}
    assert found.steps.loss == pytest.approx(plain.steps.loss, rel=0.05)
    assert found.steps.loss != plain.steps.loss
    compute = found.explanation[0]
    assert compute.value.startswith(f"{policy[:4]}, emulated on ")
    assert compute.reason == NO_EFFECT


def test_pure_weights_are_16_bit_numbers_and_masters_are_not() -> None:
    pure, master = (ran(loop(), name).value["weights"][-1] for name in ("bf16-pure", "bf16-master"))
    assert equal(pure, [bf16(w) for w in pure])
    assert not equal(master, [bf16(w) for w in master])


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [("bf16", []), ("bf16-master", ["relu", "sigmoid", "add"]), ("bf16-pure", ["relu", "sigmoid", "add", "norm"])],
)
def test_a_cast_model_runs_everything_but_norms_and_losses_in_16_bits(policy: str, rounds: list[str]) -> None:
    x = paddle.to_tensor(np.linspace(0.1, 2.3, 12, dtype=np.float32).reshape(3, 4))
    calls: dict[str, Callable[[Any], Any]] = {
        "relu": F.relu,
        "sigmoid": F.sigmoid,
        "add": lambda t: t + t * 0.37,
        "norm": lambda t: F.layer_norm(t, [4]),
        "loss": lambda t: F.cross_entropy(t, paddle.to_tensor([0, 1, 2])),
    }

    def train() -> list[str]:
        found = []
        for name, call in calls.items():
            layer = nn.Layer()
            layer.forward = call
            result = numbers(layer(x))
            found += [name] if np.array_equal(result, bf16(result)) else []
        return found

    assert ran(train, policy).value == rounds


def test_on_a_gpu_a_region_is_paddles_auto_cast() -> None:
    """The calls only: there is no GPU here, and on a CPU Paddle warns and casts nothing."""
    module = importlib.import_module("paddle.amp.auto_cast")
    asked: list[dict[str, Any]] = []

    def guard(**kwargs: Any) -> contextlib.AbstractContextManager[None]:
        asked.append(kwargs)
        return contextlib.nullcontext()

    gpu = Device(kind="cuda", name="H100", capability=(9, 0))
    memory = {"max_memory_allocated": lambda: 1, "max_memory_reserved": lambda: 2}
    with (
        mock.patch("mezzo.launch.paddle.state.this_device", return_value=gpu),
        mock.patch.object(module, "amp_guard", guard),
        mock.patch.multiple(paddle.device.cuda, **memory),
    ):
        found = ran(loop(steps=1), "bf16:fp32_modules=4")
    assert asked == [to_paddle(Policy.parse("bf16")).auto_cast, {"enable": False}]
    assert not found.effective.emulated
    assert (found.memory.cuda_allocated_bytes, found.memory.cuda_reserved_bytes) == (1, 2)


# --- scale and skips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["", ":hysteresis=2", ":growth_factor=4:backoff_factor=0.25"])
def test_skips_and_scale_go_the_engines_way(settings: str) -> None:
    text = f"fp16:init_scale=256:growth_interval=2{settings}"
    overflows = (2, 3, 7)
    found = ran(loop(steps=10, overflows=overflows), text)
    policy = Policy.parse(text)
    scale = DynamicScale(
        256.0,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=2,
        hysteresis=policy.hysteresis,
    )
    wanted = []
    for step in range(10):
        scale.update(torch.tensor(float(step in overflows)))
        wanted.append(scale.value())
    assert found.steps.loss_scale == wanted
    assert found.steps.skipped == [step in overflows for step in range(10)]
    weights, rates = found.value["weights"], found.value["rates"]
    for step in range(1, 10):
        assert equal(weights[step], weights[step - 1]) == (step in overflows)
    assert rates == [0.1 * 0.5 ** sum(s not in overflows for s in range(step + 1)) for step in range(10)]
    assert [math.isfinite(n) for n in found.steps.grad_norm] == [step not in overflows for step in range(10)]


def test_a_skipped_step_leaves_the_optimizers_state() -> None:
    def train(steps: int) -> dict[str, Array]:
        layer = nn.Linear(2, 1)
        optimizer = optimizers.AdamW(0.1, parameters=layer.parameters())
        for step in range(steps):
            loss = layer(paddle.ones([1, 2])).sum() * (math.inf if step == 1 else 1.0)
            loss.backward()
            optimizer.minimize(loss)
            optimizer.clear_grad()
        return {name: numbers(t) for name, t in optimizer.state_dict().items() if hasattr(t, "numpy")}

    one, two = (ran(lambda steps=steps: train(steps), "fp16:init_scale=64").value for steps in (1, 2))
    assert len(one) == len(two) == 8
    assert equal(list(one.values()), list(two.values()))


@pytest.mark.parametrize(
    "policy", ["fp16:loss_scale=static:init_scale=1", "fp16:init_scale=1024", "fp16:init_scale=4096"]
)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (1, 0.1)])
def test_a_script_sees_true_gradients_whatever_the_scale_is(policy: str, accumulate: int, clip: float | None) -> None:
    code = loop(steps=2, accumulate=accumulate, clip=clip)
    found, plain = ran(code, policy), ran(code, "fp32")
    for ours, theirs in zip(found.value["gradients"][0], plain.value["gradients"][0], strict=True):
        assert ours == pytest.approx(theirs, rel=0.02, abs=0.002)
    assert found.steps.grad_norm[0] == pytest.approx(plain.steps.grad_norm[0], rel=0.01)
    losses = found.value["losses"]
    sums = [sum(losses[i : i + accumulate]) for i in range(0, len(losses), accumulate)]
    assert found.steps.loss == pytest.approx(sums)
    if clip is not None:
        before = _start()
        moved = math.sqrt(
            sum(float(((a - b) ** 2).sum()) for a, b in zip(found.value["weights"][0], before, strict=True))
        )
        assert moved == pytest.approx(0.1 * clip, rel=1e-3)  # the first step of Momentum is rate x gradient


def _start() -> list[Array]:
    paddle.seed(1)
    return [numbers(p) for p in network().parameters() if p.trainable]


def test_an_overflow_of_one_optimizer_skips_only_its_own_update() -> None:
    seen: list[list[Array]] = []

    def train() -> None:
        good, bad, x = nn.Linear(2, 1), nn.Linear(2, 1), paddle.ones([1, 2])
        both = [optimizers.SGD(0.5, parameters=layer.parameters()) for layer in (good, bad)]

        def loss_of(step: int) -> Any:
            seen.append([numbers(layer.weight) for layer in (good, bad)])
            return good(x).sum() + bad(x).sum() * (1e30 if step == 2 else 1.0)

        fit(loss_of, [], steps=3, optimizer=both)

    found = ran(train, "fp16:init_scale=16")
    first, second = seen[1:]
    assert (np.array_equal(first[0], second[0]), np.array_equal(first[1], second[1])) == (False, True)
    assert found.steps.skipped == [False, True, False]
    assert found.steps.loss_scale == [16, 8, 8]


def test_the_scales_floor_is_an_error() -> None:
    with pytest.raises(ScaleFloorError, match="gradients overflow at the loss scale's floor of 4, update 3"):
        ran(loop(overflows=(1, 2, 3)), "fp16:init_scale=8:min_scale=4")


def test_a_first_loss_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(NonFiniteLossError, match="the loss is inf before the first update"):
        ran(loop(overflows=(0,)), "fp16")


# --- modules, formats, bytes -----------------------------------------------------------------------------------------------------


def test_named_layers_stay_in_fp32() -> None:
    found = ran(loop(), "bf16:fp32_modules=4")  # the linear layer
    linear = 3 * 2 * 8 * 16 * 3  # forward, and backward for input and weight
    assert found.effective.flops_by_format == {"bf16": 2 * (2 * 8 * 4 * 9 * 4), "fp32": linear}


def test_a_pattern_that_matches_no_layer_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"no layer is named 'heads'; allowed: 0, 1"):
        ran(loop(), "bf16:fp32_modules=heads")


class Wrapped(nn.Layer):  # type: ignore[misc, name-defined]
    """A model inside another, under the name that ``paddle.DataParallel`` uses."""

    def __init__(self) -> None:
        super().__init__()
        self._layers = network()

    def forward(self, x: Any) -> Any:
        return self._layers(x)


def test_the_names_offered_for_a_pattern_are_those_that_patterns_match() -> None:
    def train() -> None:
        model, ((x, _),) = Wrapped(), batches(1)
        fit(lambda step: model(x).sum(), model.parameters(), steps=1)

    with pytest.raises(PolicyError, match=r"no layer is named 'heads'; allowed: 0, 1"):
        ran(train, "bf16:fp32_modules=heads")


def _once(call: Callable[[Any, Any], Any], x: list[int], w: list[int]) -> Callable[[], None]:
    def train() -> None:
        weight, layer = paddle.create_parameter(w, "float32"), nn.Layer()
        layer.forward = lambda value: call(value, weight)
        fit(lambda step: layer(paddle.ones(x)).sum(), [weight], steps=2)

    return train


@pytest.mark.parametrize(
    ("call", "x", "w", "flops"),
    [
        (lambda x, w: x @ w, [4, 5], [5, 6], 2 * 4 * 5 * 6),
        (lambda x, w: paddle.matmul(x, w, transpose_x=True), [5, 4], [5, 6], 2 * 4 * 5 * 6),
        (lambda x, w: F.linear(x, w), [2, 4, 5], [5, 6], 2 * 8 * 5 * 6),
        (lambda x, w: paddle.mm(x, w), [4, 5], [5, 6], 2 * 4 * 5 * 6),
        (lambda x, w: paddle.bmm(x, w), [3, 4, 5], [3, 5, 6], 2 * 3 * 4 * 5 * 6),
        (lambda x, w: paddle.mv(x, w), [4, 5], [5], 2 * 4 * 5),
        (lambda x, w: paddle.addmm(paddle.ones([4, 6]), x, w), [4, 5], [5, 6], 2 * 4 * 5 * 6),
        (lambda x, w: paddle.einsum("bij,jk->bik", x, w), [2, 4, 5], [5, 6], 2 * 2 * 4 * 5 * 6),
        (lambda x, w: F.conv2d(x, w, padding=1), [2, 3, 4, 5], [7, 3, 3, 3], 2 * 2 * 20 * 7 * 27),
        (lambda x, w: F.conv2d(x, w, groups=3), [2, 3, 4, 5], [3, 1, 3, 3], 2 * 2 * 6 * 3 * 9),
        (lambda x, w: F.conv1d(x, w), [2, 3, 8], [7, 3, 3], 2 * 2 * 6 * 7 * 9),
        (lambda x, w: F.conv3d(x, w), [2, 3, 4, 4, 4], [7, 3, 2, 2, 2], 2 * 2 * 27 * 7 * 24),
        (lambda x, w: F.conv2d_transpose(x, w), [2, 3, 4, 5], [3, 7, 3, 3], 2 * 2 * 20 * 3 * 63),
    ],
)
def test_flops_of_an_operation(call: Callable[[Any, Any], Any], x: list[int], w: list[int], flops: int) -> None:
    for policy, name in (("fp32", "fp32"), ("bf16", "bf16")):
        found = ran(_once(call, x, w), policy).effective
        assert found.flops_by_format == {name: 2 * flops}  # forward, and the gradient of the weight
        assert found.counted_on_step == 2


def test_code_outside_any_layer_is_named() -> None:
    def train() -> None:
        weight = paddle.create_parameter([5, 6], "float32")
        fit(lambda step: (paddle.ones([4, 5]) @ weight).sum(), [weight], steps=2)

    found = ran(train, "fp16")
    assert found.effective.flops_by_format == {"fp32": 2 * 2 * 4 * 5 * 6}
    assert found.reasons == {
        "FP32 code 100% of FLOPs and their backward pass": "forward code outside any layer: only layers and auto_cast regions are switched"
    }


def test_a_users_lists_are_rounded_too() -> None:
    def train() -> Array:
        layer = nn.Layer()
        layer.forward = lambda value: F.softmax(value)
        return numbers(layer(paddle.to_tensor([[0.1, 0.7, 0.3]])))

    lowered, plain = ran(train, "bf16:lower=softmax").value, ran(train, "bf16").value
    assert np.array_equal(lowered, bf16(lowered))
    assert not np.array_equal(plain, bf16(plain))


def test_bytes_of_a_step() -> None:
    def train() -> None:
        layer = nn.Linear(4, 3)
        adam = optimizers.Adam(0.1, parameters=layer.parameters())
        fit(lambda step: F.relu(layer(paddle.ones([2, 4]))).sum(), [], steps=3, optimizer=adam)

    policies = ("fp16", "bf16", "fp32", "fp16:arithmetic=native", AS_IS)
    assert [ran(train, name).memory.of_emulation for name in policies] == [True, True, False, False, False]
    memory = ran(train, "fp32").memory
    assert memory.parameters_bytes == memory.gradients_bytes == 4 * (12 + 3)
    assert memory.optimizer_bytes == 2 * 4 * (12 + 3) + 2 * 2 * 4  # two moments, and two powers of beta a parameter
    assert memory.activations_bytes == 4 * (2 * 4) + 4 * (2 * 3)  # the input, and what relu gave


# --- a script's own mixed precision ----------------------------------------------------------------------------------------------


def test_as_is_says_that_paddles_amp_does_nothing_here() -> None:
    found = ran(loop(level="O2"), AS_IS, seed=None)
    names = ["auto_cast", "decorate", "GradScaler"]
    assert found.reasons == {f"the script's {name} fp32": NO_EFFECT for name in names}
    assert found.value["losses"] == loop()()["losses"]


def test_a_policy_wins_over_the_scripts_own() -> None:
    own, plain = (ran(code, "fp16:init_scale=64") for code in (loop(level="O1"), loop()))
    assert own.steps.loss == plain.steps.loss
    assert own.steps.loss_scale == plain.steps.loss_scale == [64.0] * 6
    assert own.reasons == {}


def test_a_scaler_that_works_is_listened_to() -> None:
    """On a CPU one works only where Paddle is made to believe that it runs a static graph."""

    def train() -> list[float]:
        paddle.seed(1)
        with mock.patch("paddle.amp.grad_scaler.in_dynamic_mode", return_value=False):
            scaler = paddle.amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3)
        model, losses = nn.Linear(2, 1), []
        optimizer = optimizers.SGD(0.1, parameters=model.parameters())
        for step in range(5):
            loss = model(paddle.ones([1, 2])).sum() * (math.inf if step == 1 else 1.0)
            losses.append(float(loss))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
        return losses

    found = ran(train, AS_IS)
    assert found.steps.loss == pytest.approx(found.value)
    assert found.steps.skipped == [False, True, False, False, False]
    assert found.steps.loss_scale == [64, 32, 32, 32, 64]


# --- other ways to train ---------------------------------------------------------------------------------------------------------


def test_a_sparse_gradient_is_unscaled_and_weighed() -> None:
    def train() -> Array:
        paddle.seed(1)
        table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
        parameters = [*table.parameters(), *head.parameters()]
        fit(lambda step: head(table(paddle.to_tensor([1, 2, 2]))).sum(), parameters, steps=2)
        return numbers(table.weight)

    scaled, plain = ran(train, "fp16:init_scale=256"), ran(train, "fp32")
    assert scaled.value == pytest.approx(plain.value, rel=0.01, abs=1e-4)
    assert scaled.steps.grad_norm == pytest.approx(plain.steps.grad_norm, rel=0.01)


def test_an_optimizer_that_evaluates_the_loss_itself() -> None:
    def train() -> list[float]:
        layer, seen = nn.Linear(4, 1), []
        optimizer = optimizers.LBFGS(0.5, max_iter=3, parameters=layer.parameters())

        def closure() -> Any:
            optimizer.clear_grad()
            loss = (layer(paddle.ones([1, 4])) ** 2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            seen.append(optimizer.step(closure).item())
        return seen

    found = ran(train, "fp16:init_scale=64")
    assert found.steps.loss == pytest.approx(found.value)
    assert found.reasons == ran(train, "fp32").reasons == {}


def test_a_scripts_own_optimizer_class_and_parameter_groups() -> None:
    def train() -> None:
        class Own(optimizers.SGD):
            def step(self) -> None:
                super().step()

        first, second = nn.Linear(2, 2), nn.Linear(2, 1)
        groups = [{"params": first.parameters()}, {"params": second.parameters(), "learning_rate": 0.1}]
        both = [Own(0.1, parameters=first.parameters()), optimizers.AdamW(0.1, parameters=groups)]
        times = {2: math.inf}
        fit(lambda step: second(first(paddle.ones([2, 2]))).mean() * times.get(step, 1.0), [], steps=3, optimizer=both)

    assert ran(train, "fp16:init_scale=64").steps.skipped == [False, True, False]


def gan() -> list[float]:
    """Train two models, each with an optimizer and a loss of its own, in turn; return the losses."""
    paddle.seed(1)
    makes, judges, losses = nn.Linear(2, 2), nn.Linear(2, 1), []
    update_makes = optimizers.SGD(0.01, parameters=makes.parameters())
    update_judges = optimizers.SGD(0.01, parameters=judges.parameters())
    for _ in range(4):
        batch = paddle.randn([4, 2])
        for loss, update in ((judges(makes(batch).detach()), update_judges), (-judges(makes(batch)), update_makes)):
            loss.mean().backward()
            update.step()
            losses.append(float(loss.mean()))
            makes.clear_gradients()
            judges.clear_gradients()
    return losses


def one_loss() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    both = [optimizers.SGD(0.01, parameters=model.parameters()) for model in (body, head)]
    fit(lambda step: head(body(paddle.ones([4, 2]))).mean(), [], steps=3, optimizer=both)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_losses_of_two_optimizers_in_turn_are_told_apart(policy: str) -> None:
    found = ran(gan, policy)
    assert found.steps.loss == pytest.approx(found.value, rel=1e-5)
    assert [(loss.name, loss.steps) for loss in found.steps.losses] == [
        ("judges", [1, 3, 5, 7]),
        ("makes", [2, 4, 6, 8]),
    ]
    for loss, first in zip(found.steps.losses, (0, 1), strict=True):
        assert loss.values == pytest.approx(found.value[first::2], rel=1e-5)
    assert ran(one_loss, policy).steps.losses == []


STARTS: dict[str, tuple[Callable[[Any], Any], float]] = {  # of a loss of 2
    "nothing given": (lambda loss: loss.backward(), 2.0),
    "the critic of a WGAN": (lambda loss: loss.backward(paddle.to_tensor(-1.0)), -2.0),
    "a share of a window": (lambda loss: loss.backward(grad_tensor=paddle.to_tensor(0.25)), 0.5),
    "gradients of two losses": (
        lambda loss: paddle.autograd.backward([loss, 3 * loss], [None, paddle.to_tensor(-1.0)]),
        -4.0,
    ),
}


@pytest.mark.parametrize("policy", [AS_IS, "fp32", "fp16:init_scale=1024"])
@pytest.mark.parametrize(("start", "expected"), STARTS.values(), ids=STARTS)
def test_a_loss_counts_times_the_gradient_that_its_backward_pass_starts_from(
    start: Callable[[Any], Any], expected: float, policy: str
) -> None:
    def train() -> None:
        model = nn.Linear(2, 1, weight_attr=nn.initializer.Constant(1.0), bias_attr=False)
        sgd = optimizers.SGD(0.0, parameters=model.parameters())
        for _ in range(3):
            start(model(paddle.ones([4, 2])).mean())
            sgd.step()
            sgd.clear_grad()

    assert ran(train, policy).steps.loss == [expected] * 3


def test_a_run_of_one_step_has_no_activations_to_tell_of() -> None:
    def train() -> None:
        model = nn.Linear(2, 1)
        fit(lambda step: model(paddle.ones([4, 2])).mean(), model.parameters(), steps=1)

    memory = ran(train, "fp32").memory
    assert (memory.parameters_bytes, memory.activations_bytes, memory.total_bytes) == (12, None, None)


def test_clipped_values_do_not_hide_an_overflow() -> None:
    def train() -> None:
        layer = nn.Linear(2, 2)
        optimizer = optimizers.SGD(0.1, parameters=layer.parameters())
        for step in range(3):
            (layer(paddle.ones([2, 2])).mean() * (1e30 if step == 1 else 1.0)).backward()
            nn.utils.clip_grad_value_(layer.parameters(), 0.5)
            optimizer.step()
            optimizer.clear_grad()

    assert ran(train, "fp16:init_scale=64").steps.skipped == [False, True, False]


@pytest.mark.parametrize("amp", [None, "O1"])
def test_model_fit(amp: str | None) -> None:
    def train() -> None:
        paddle.seed(1)
        model = paddle.Model(network())
        parts = batches(4)
        data = paddle.io.TensorDataset([paddle.concat([x for x, _ in parts]), paddle.concat([y for _, y in parts])])
        optimizer = optimizers.Adam(0.01, parameters=model.parameters())
        model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(), amp_configs=amp)
        model.fit(data, batch_size=8, epochs=2, verbose=0, shuffle=False)

    plain, bf16_, fp16_ = (ran(train, policy) for policy in (AS_IS, "bf16", "fp16:init_scale=1024"))
    assert len(plain.steps) == len(bf16_.steps) == len(fp16_.steps) == 8
    assert bf16_.steps.loss == pytest.approx(plain.steps.loss, rel=0.05)
    assert fp16_.steps.loss_scale == [1024.0] * 8
    assert [set(r.effective.flops_by_format) for r in (plain, bf16_, fp16_)] == [{"fp32"}, {"bf16"}, {"fp16"}]
    expected = {f"the script's {name} fp32": NO_EFFECT for name in ("GradScaler", "auto_cast")} if amp else {}
    assert plain.reasons == expected


def test_traced_code_runs_eagerly_under_a_policy_only() -> None:
    def train() -> None:
        paddle.seed(1)
        model, pairs = paddle.jit.to_static(network()), batches(3)
        fit(lambda step: F.cross_entropy(model(pairs[step - 1][0]), pairs[step - 1][1]), model.parameters(), steps=3)

    plain, lowered = ran(train, AS_IS), ran(train, "bf16")
    assert plain.reasons == {
        "to_static not counted": "the operations of a traced program are not seen: no FLOPs, no formats"
    }
    assert lowered.reasons == {
        "to_static run eagerly": "a traced program would not be under the policy; as-is keeps it traced"
    }
    assert set(lowered.effective.flops_by_format) == {"bf16"}
    assert lowered.steps.loss == pytest.approx(plain.steps.loss, rel=0.05)


def test_activation_checkpointing_computes_again_what_it_computed() -> None:
    def train(*, again: bool) -> list[Array]:
        paddle.seed(1)
        model, (x, _) = network(), batches(1)[0]
        layer, head = model[0], model[4]

        class Net(nn.Layer):
            def forward(self, x: Any) -> Any:
                part = lambda value: F.relu(layer(value))  # noqa: E731
                middle = paddle.distributed.fleet.utils.recompute(part, x) if again else part(x)
                return head(middle.flatten(1))

        x.stop_gradient = False
        Net()(x).sum().backward()
        return [numbers(p.grad) for p in (*layer.parameters(), *head.parameters())]

    once, twice = (ran(lambda again=again: train(again=again), "bf16").value for again in (False, True))
    assert equal(once, twice)


def test_seeds_are_shifted() -> None:
    def draws() -> list[Any]:
        paddle.seed(5)
        np.random.seed(5)
        return [paddle.rand([1]).item(), float(np.random.rand()), float(np.random.default_rng(5).random())]

    def wanted(seed: int) -> list[Any]:
        paddle.seed(seed)
        np.random.seed(seed)
        return [paddle.rand([1]).item(), float(np.random.rand()), float(np.random.default_rng(seed).random())]

    assert ran(draws, "fp32", seed=3).value == wanted(8)
    assert ran(draws, "fp32", seed=None).value == wanted(5)


def test_every_patch_is_undone() -> None:
    owners = [paddle.amp, paddle.nn.Layer, paddle.base.core.eager, paddle._C_ops, paddle.Tensor, paddle, np.random]
    owners += [paddle.amp.GradScaler, paddle.amp.AmpScaler]
    owners += [optimizers.Optimizer, optimizers.AdamW, optimizers.lr.LRScheduler]

    def state() -> list[dict[str, Any]]:
        return [dict(vars(owner)) for owner in owners]

    before = state()
    ran(loop(steps=2), "fp16")
    assert state() == before
    assert loop()()["losses"] == loop()()["losses"]
