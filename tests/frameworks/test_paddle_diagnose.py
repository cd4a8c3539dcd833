"""Diagnosis of Paddle scripts: planted faults are named by layer, operation, step and direction; healthy trainings have no finding."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paddle_loops import Square
from paddle_runs import AS_IS, fit, numbers, observed, paddle

from mezzo.commands.diagnose.verdict import ScriptRun, diagnosis
from mezzo.formats import BF16, FP16
from mezzo.launch.paddle.nonfinite_values import NonFinite, ValueFollower
from mezzo.launch.paddle.replay import KEPT, NO_UPPER, NONE, gradients, rounded_within
from mezzo.launch.paddle.surveys import round_to_fp16
from mezzo.observe.settings import DiagnoseSettings
from mezzo.policy import Policy
from mezzo.records import DiagnoseRecord

nn, F = paddle.nn, paddle.nn.functional
Code = Callable[[], None]


def diagnosed(code: Code, policy: str, *, last: int = 8) -> DiagnoseRecord:
    """Return the verdict on one run of ``code`` whose steps are all inspected."""
    settings = DiagnoseSettings(steps=tuple(range(1, last + 1)))
    observer, run = observed(code, policy, settings)
    chosen = None if policy == AS_IS else Policy.parse(policy)
    evidence = observer.evidence(run)
    assert evidence.problems == {}
    return diagnosis([ScriptRun(role="first", reason="", policy=chosen, settings=settings, run=run, evidence=evidence)])


class Net(nn.Layer):  # type: ignore[misc, name-defined]
    """Two linear layers with something between them that a test plants."""

    def __init__(self, between: Callable[[Any], Any], after: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.first, self.planted, self.head = nn.Linear(8, 16), Planted(between), nn.Linear(16, 1)
        self.after = after

    def forward(self, x: Any) -> Any:
        """Return the output."""
        return self.after(self.head(self.planted(self.first(x))))


class Planted(nn.Layer):  # type: ignore[misc, name-defined]
    """A layer that does what a test wants."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(16, 16), does

    def forward(self, x: Any) -> Any:
        """Return the output."""
        return self.does(self, x)


def planted(
    does: Callable[[int], Callable[[Any, Any], Any]],
    *,
    data: Callable[[int, Any], Any] = lambda step, x: x,
    factor: float = 1.0,
) -> Code:
    """Return a training whose layer ``planted`` does ``does(step)``, on ``data(step, x)``, with its loss times ``factor``."""

    def code() -> None:
        net = Net(lambda layer, x: does(now[0])(layer, x))
        now = [0]
        x = paddle.randn([32, 8])
        y = x.sum(axis=1, keepdim=True)

        def loss_of(step: int) -> Any:
            now[0] = step
            return ((net(data(step, x)) - y) ** 2).mean() * factor

        fit(loss_of, net.parameters())

    return code


def healthily(layer: Any, x: Any) -> Any:
    return paddle.tanh(layer.linear(x))


def from_step(first: int, does: Callable[[Any, Any], Any]) -> Code:
    return planted(lambda step: does if step >= first else healthily)


def root_at_zero(layer: Any, x: Any) -> Any:
    return paddle.sqrt(layer.linear(x) * 0.0)


NOT_A_NUMBER = paddle.to_tensor(np.full((32, 8), np.nan, np.float32))

FAULTS: dict[str, tuple[Code, str, tuple[str, str, str, str, int]]] = {
    # name: the training, its policy, and the verdict, layer, operation, direction and step
    "a product": (
        from_step(3, lambda layer, x: layer.linear(layer.linear.weight.T.sum() * 0 + 6e4 * (x * 0 + 1)) * 1e-6),
        "fp16:loss_scale=none",
        ("range_overflow", "planted.linear", "linear", "forward", 3),
    ),
    "an operand": (
        from_step(4, lambda layer, x: layer.linear(x * 0 + 3e5) * 1e-6),
        "fp16",
        ("range_overflow", "planted.linear", "cast", "forward", 4),
    ),
    "a logarithm": (
        from_step(2, lambda layer, x: paddle.log(layer.linear(x) * 0.0)),
        "bf16",
        ("invalid_operation", "planted", "log", "forward", 2),
    ),
    "a logarithm in its own precision": (
        from_step(5, lambda layer, x: paddle.log(layer.linear(x) * 0.0)),
        AS_IS,
        ("invalid_operation", "planted", "log", "forward", 5),
    ),
    "a quotient": (
        from_step(3, lambda layer, x: layer.linear(x) / (x * 0.0)),
        "fp32",
        ("invalid_operation", "planted", "divide", "forward", 3),
    ),
    "a root at 0": (from_step(3, root_at_zero), "bf16", ("invalid_operation", "planted", "sqrt", "backward", 3)),
    "a value in the data": (
        planted(lambda step: healthily, data=lambda step, x: NOT_A_NUMBER if step == 4 else x),
        "fp16",
        ("invalid_operation", "first", "linear", "forward", 4),
    ),
    "a scale that never changes": (
        planted(lambda step: healthily),
        "fp16:loss_scale=static:init_scale=16777216",
        ("scale_overflow", "(script)", "subtract", "backward", 1),
    ),
    "gradients too small for FP16": (
        planted(lambda step: healthily, factor=1e-9),
        "fp16:loss_scale=none",
        ("silent_saturation", "(script)", "subtract", "backward", 1),
    ),
    "an infinity that has no derivative": (
        from_step(3, lambda layer, x: 1e6 / (1e6 + paddle.abs(layer.linear(x * 0 + 6e4)))),
        "fp16:loss_scale=none",
        ("range_overflow", "planted.linear", "linear", "forward", 3),
    ),
    "an infinity that a quotient swallows": (
        from_step(3, lambda layer, x: 1e6 / (1e6 + layer.linear(x * 0 + 6e4))),
        "fp16:loss_scale=none",
        ("silent_saturation", "planted.linear", "linear", "forward", 3),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    code, policy, expected = FAULTS[name]
    found = diagnosed(code, policy)
    verdict = found.perhaps or found.verdict  # one run alone
    assert (verdict, found.module, found.op, found.phase, found.step) == expected, found.detail


# --- healthy trainings -------------------------------------------------------------------------------------------------------------


def convolutional() -> None:
    """Train a network with batch normalisation, dropout, pooling and clipped gradients."""
    net = nn.Sequential(
        *(nn.Conv2D(1, 4, 3), nn.BatchNorm2D(4), nn.ReLU(), nn.MaxPool2D(2), nn.Dropout(0.2), nn.Flatten()),
        nn.Linear(4, 3),
    )
    images, labels = paddle.randn([16, 1, 4, 4]), paddle.randint(0, 3, [16])
    clip = nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters(), grad_clip=clip)

    def loss_of(step: int) -> Any:
        net.eval()
        with paddle.no_grad():
            net(images)
        net.train()
        return F.cross_entropy(net(images), labels)

    fit(loss_of, [], steps=5, optimizer=optimizer)


def recurrent() -> None:
    """Train an embedding, an LSTM and a linear layer on words."""
    embedding, lstm, head = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)
    words = paddle.randint(0, 20, [4, 6])

    def loss_of(step: int) -> Any:
        seen = head(lstm(embedding(words[:, :-1]))[0])
        return F.cross_entropy(seen.reshape([-1, 20]), words[:, 1:].reshape([-1]))

    fit(loss_of, [*embedding.parameters(), *lstm.parameters(), *head.parameters()])


def adversarial() -> None:
    """Train a generator and a discriminator in turn."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    of_generator = paddle.optimizer.Adam(1e-3, parameters=generator.parameters())
    of_critic = paddle.optimizer.Adam(1e-3, parameters=critic.parameters())
    real, fake = paddle.ones([16, 1]), paddle.zeros([16, 1])
    judge = F.binary_cross_entropy_with_logits
    for _ in range(4):
        made = generator(paddle.randn([16, 4]))
        (judge(critic(paddle.randn([16, 2])), real) + judge(critic(made.detach()), fake)).backward()
        of_critic.step()
        of_critic.clear_grad()
        judge(critic(made), real).backward()
        of_generator.step()
        of_generator.clear_grad()
        of_critic.clear_grad()


def with_own_amp(level: str) -> Code:
    """Return a training with Paddle's own mixed precision."""

    def code() -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters())
        if level == "O2":
            net, optimizer = paddle.amp.decorate(net, optimizer, level=level)
        scaler, x = paddle.amp.GradScaler(init_loss_scaling=1024.0), paddle.randn([16, 8])
        for _ in range(5):
            with paddle.amp.auto_cast(level=level):
                loss = F.mse_loss(net(x), x.sum(axis=1, keepdim=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()

    return code


def accumulating() -> None:
    """Train with four backward passes an update."""
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), paddle.randn([16, 8])
    optimizer = paddle.optimizer.SGD(1e-2, parameters=net.parameters())
    for step in range(16):
        (F.mse_loss(net(x), x.sum(axis=1, keepdim=True)) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.clear_grad()


def attentive() -> None:
    """Train a transformer with a mask of -1e9 and dropout."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)
    encoder, head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)
    mask = paddle.to_tensor(np.triu(np.full((6, 6), -1e9, np.float32), 1))
    x, labels = paddle.randn([4, 6, 16]), paddle.randint(0, 3, [4])
    parameters = [*encoder.parameters(), *head.parameters()]
    fit(lambda step: F.cross_entropy(head(encoder(x, mask).mean(1)), labels), parameters, steps=4)


def in_place() -> None:
    """Train with operations that overwrite their operands, an own ``PyLayer`` and activation checkpointing."""
    recompute = importlib.import_module("paddle.distributed.fleet.utils").recompute
    first, last, x = nn.Linear(8, 16), nn.Linear(16, 1), paddle.randn([16, 8])
    x.stop_gradient = False

    def loss_of(step: int) -> Any:
        hidden = F.relu_(recompute(first, x) * 1.0)
        return Square.apply(last(hidden)).mean()

    fit(loss_of, [*first.parameters(), *last.parameters()])


HEALTHY: dict[str, Code] = {
    "convolutions": convolutional,
    "words": recurrent,
    "adversarial": adversarial,
    "own O1": with_own_amp("O1"),
    "own O2": with_own_amp("O2"),
    "accumulation": accumulating,
    "attention": attentive,
    "in place": in_place,
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, policy) for name in HEALTHY for policy in ("fp16", AS_IS)),
        ("words", "bf16"),
        ("in place", "fp16-master"),
    ],
)
def test_a_healthy_training_has_no_finding(name: str, policy: str) -> None:
    found = diagnosed(HEALTHY[name], policy)
    assert found.verdict == "healthy", found.detail
    assert len(found.run.steps) >= 4


def test_a_mask_beyond_the_format_is_harmless() -> None:
    found = diagnosed(attentive, "fp16-master")
    assert found.verdict == "healthy"
    assert [note.what for note in found.notes] == ["harmless"]


@pytest.mark.parametrize("policy", ["fp16", "bf16", AS_IS])
def test_no_operation_of_mezzos_own_is_recorded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    def finished(self: ValueFollower, operation: Any) -> None:
        names.add(operation.name)

    monkeypatch.setattr(ValueFollower, "finished", finished)
    observed(planted(lambda step: healthily), policy, DiagnoseSettings(steps=(1, 2)))
    assert {"linear", "tanh"} <= names
    assert not names & {"empty_like", "full_like", "squared_l2_norm", "add_n", "isfinite", "cast", "isnan"}


# --- replays ------------------------------------------------------------------------------------------------------------------------


def test_a_replay_with_the_limits_rounds_as_the_run_does() -> None:
    values = np.random.Generator(np.random.PCG64(1)).standard_normal(4096).astype(np.float32)
    values *= 10.0 ** np.linspace(-9, 6, 4096).astype(np.float32)
    expected = np.empty_like(values)
    round_to_fp16(values, expected)
    assert np.array_equal(rounded_within(values, FP16, KEPT), expected)
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded_within(values, FP16, KEPT), values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("value", "limits", "expected"),
    [
        (1e-9, NONE, 1e-9),
        (1e-9, NO_UPPER, 0.0),
        (1e6, NO_UPPER, 1e6),
        (1e6, KEPT, np.inf),
        (-1e6, KEPT, -np.inf),
        (1.0 + 2**-11, NONE, 1.0),
        (1.0 + 3 * 2**-11, NONE, 1.0 + 2**-9),
        (np.inf, NONE, np.inf),
    ],
)
def test_a_replay_keeps_the_digits_and_the_limits_that_it_is_told(value: float, limits: Any, expected: float) -> None:
    found = rounded_within(np.array([value], np.float32), FP16, limits)[0]
    assert found == pytest.approx(expected, rel=2**-11)


def test_bf16_has_as_many_digits_as_paddle_gives_it() -> None:
    values = np.random.Generator(np.random.PCG64(2)).standard_normal(1000).astype(np.float32)
    expected = numbers(paddle.to_tensor(values).astype("bfloat16").astype("float32"))
    assert np.array_equal(rounded_within(values, BF16, KEPT), expected)


@pytest.mark.parametrize("name", ["convolutions", "words", "attention", "adversarial"])
def test_a_replay_with_the_limits_has_the_gradients_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def judge(self: NonFinite, norm: Any) -> None:
        weights = {id(p): p for p in self.run.parameters() if p.grad is not None}
        lost = self._followed
        with lost.tape.paused():
            again = gradients(lost.tape.operations, self._passes, list(weights.values()), FP16, KEPT)
        for key, gradient in again.items():
            np.testing.assert_allclose(
                gradient / self.run.scale.value, numbers(weights[key].grad), rtol=1e-4, atol=1e-6
            )
            compared.append(key)

    monkeypatch.setattr(NonFinite, "judge", judge)
    observed(HEALTHY[name], "fp16:init_scale=64", DiagnoseSettings(steps=(1, 2, 3)))
    assert compared


STATIC: dict[str, Callable[[], Any]] = {
    "paddle.enable_static()": lambda: paddle.enable_static(),
    "paddle.jit.to_static": lambda: paddle.jit.to_static(nn.Linear(2, 1))(paddle.ones([1, 2])).sum().backward(),
}


@pytest.mark.parametrize("what", STATIC)
def test_a_static_graph_is_refused_by_name(what: str) -> None:
    _, run = observed(STATIC[what], AS_IS, DiagnoseSettings())
    assert run.exit_code == 7
    assert run.error is not None
    assert run.error.startswith(f"the script uses {what}, and mezzo diagnose observes the operations of Paddle's")
