"""The fallback search on Paddle trainings: planted layers are found, healthy ones need nothing, local errors are NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle_runs import batches, fit, network, numbers, observed, paddle

from mezzo.commands.fallback.find import find
from mezzo.commands.fallback.search import TrialsAhead
from mezzo.errors import ScriptError
from mezzo.launch.paddle.fallback import relative_error
from mezzo.observe.fallback.evidence import Measured, checked, read_measured
from mezzo.observe.settings import FallbackSettings
from mezzo.policy import Policy
from mezzo.records import FallbackRecord, RunRecord

nn, F = paddle.nn, paddle.nn.functional


class Big(nn.Layer):  # type: ignore[misc, name-defined]
    """A layer that gives its own linear layer values beyond FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        """Return the output."""
        return self.inner(3e5 * x) * 1e-6


def training_of(build: Callable[[], Any], optimizer: Callable[[Any], Any]) -> Callable[[], None]:
    def code() -> None:
        net = build()

        def loss_of(step: int) -> Any:
            x = paddle.randn([32, 8])
            return ((net(x) - x.sum(axis=1, keepdim=True)) ** 2).mean()

        fit(loss_of, [], optimizer=optimizer(net.parameters()))

    return code


def sgd(parameters: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=parameters)


def healthy() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def fragile() -> Any:
    """A layer with a fifth of the FLOPs, so that keeping it in FP32 pays."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), Big(), nn.Linear(16, 1))


def searched(code: Callable[[], None], policy: str, folder: Path) -> FallbackRecord:
    def measure(chosen: Policy, settings: FallbackSettings, ahead: TrialsAhead) -> tuple[Measured, RunRecord]:
        observer, run = observed(code, str(chosen), settings)
        observer.record(run)
        return checked(read_measured(settings), run, where="here", role=settings.role), run

    return find(measure, Policy.parse(policy), folder=str(folder))


def test_a_fragile_layer_is_found(tmp_path: Path) -> None:
    found = searched(training_of(fragile, sgd), "fp16", tmp_path)
    assert (found.verdict, found.kept) == ("found", ["4.inner"])
    assert found.suggested == "fp16:fp32_modules=4.inner"
    assert "4.inner" in [module.module for module in found.modules[:2]]
    assert found.error_after is not None
    assert found.error_after < found.tolerance
    flops = {module.module: module.flops for module in found.modules}
    assert flops["4.inner"] == 3 * 2 * 32 * 16 * 16
    assert flops["0"] == 2 * 2 * 32 * 8 * 64  # no gradient of the data


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_a_healthy_training_needs_nothing(policy: str, tmp_path: Path) -> None:
    found = searched(training_of(healthy, lambda p: paddle.optimizer.AdamW(1e-2, parameters=p)), policy, tmp_path)
    assert (found.verdict, found.kept) == ("not needed", [])
    assert found.steps == [1, 2, 3]
    assert found.error_after is not None
    assert 0 < found.error_after < found.tolerance


def test_every_kind_of_layer_runs_alone(tmp_path: Path) -> None:
    def code() -> None:
        net, lstm, norm = network(), nn.LSTM(3, 8), nn.LayerNorm(8)
        optimizer = sgd([*net.parameters(), *lstm.parameters(), *norm.parameters()])
        for images, _ in batches(2):
            norm(lstm(F.dropout(net(images), 0.2).unsqueeze(0))[0]).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()

    settings = FallbackSettings(steps=(1,), folder=str(tmp_path), policy=Policy.parse("bf16"))
    observer, run = observed(code, "fp32", settings)
    observer.record(run)
    found = {one.module: one for one in read_measured(settings).local}
    assert not any(one.reason for one in found.values())
    assert {name for name, one in found.items() if (one.output or 0.0) > 1e-4} == {"0", "4", "LSTM"}


def test_steps_repeat_because_updates_are_held_back(tmp_path: Path) -> None:
    kept: list[np.ndarray[Any, Any]] = []

    def code() -> None:
        net, x = healthy(), paddle.ones([4, 8])
        optimizer = sgd(net.parameters())
        for _ in range(3):
            net(x).mean().backward()
            kept.append(numbers(net[0].weight.grad))
            optimizer.step()
            optimizer.clear_grad()

    settings = FallbackSettings(steps=(1, 2, 3), folder=str(tmp_path))
    observer, run = observed(code, "fp32", settings)
    observer.record(run)
    assert len(kept) == 3
    assert all(np.array_equal(kept[0], gradient) for gradient in kept)
    with np.load(tmp_path / "reference.npz") as reference:
        assert np.array_equal(reference["2 0.weight"], kept[0])
    assert [step.step for step in read_measured(settings).steps] == [1, 2, 3]


def test_the_error_of_a_layer_is_that_of_numpys_halves(tmp_path: Path) -> None:
    seen: dict[str, np.ndarray[Any, Any]] = {}

    def code() -> None:
        net, x = nn.Sequential(nn.Linear(8, 16, bias_attr=False), nn.Tanh()), paddle.randn([32, 8])
        output = net(x)
        output.sum().backward()
        seen.update(x=numbers(x), weight=numbers(net[0].weight), output=numbers(output))
        sgd(net.parameters()).step()

    settings = FallbackSettings(steps=(1,), folder=str(tmp_path), policy=Policy.parse("fp16:loss_scale=none"))
    observer, run = observed(code, "fp32", settings)
    observer.record(run)

    def half(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values.astype(np.float16).astype(np.float32)

    local = {one.module: one for one in read_measured(settings).local}
    exact, low = seen["x"] @ seen["weight"], half(half(seen["x"]) @ half(seen["weight"]))
    gradient = 1 - seen["output"] ** 2
    gradients = seen["x"].T @ gradient, half(half(seen["x"]).T @ half(gradient))
    assert local["0"].output == pytest.approx(relative_error([exact], [low]), rel=1e-3)
    assert local["0"].wgrad == pytest.approx(relative_error([gradients[0]], [gradients[1]]), rel=1e-2)
    assert local["0"].dgrad is None
    assert local["1"].output == 0.0
    assert local["1"].dgrad == 0.0


def test_an_optimizer_with_a_closure_is_refused(tmp_path: Path) -> None:
    def code() -> None:
        net, x = healthy(), paddle.ones([4, 8])
        optimizer = paddle.optimizer.LBFGS(parameters=net.parameters(), max_iter=2)

        def closure() -> Any:
            optimizer.clear_grad()
            loss = (net(x) ** 2).mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    with pytest.raises(ScriptError, match="LBFGS moves the weights inside its step"):
        searched(code, "fp16", tmp_path)
