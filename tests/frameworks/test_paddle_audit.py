"""Audits of Paddle scripts: products, phases, casts, causes and findings against hand counts."""

from __future__ import annotations

from typing import Any

import pytest
from paddle_runs import AS_IS, fit, observed, paddle

from mezzo.launch.paddle.audit import TITLES, shape_of
from mezzo.observe.audit.findings import RULES
from mezzo.observe.settings import AuditSettings
from mezzo.records import AuditRecord

nn, F = paddle.nn, paddle.nn.functional
FIRST, LAST = 2 * 32 * 8 * 16, 2 * 32 * 16 * 1
"""FLOPs of the forward products of the two layers."""


def perceptron(*, steps: int = 4, outside: bool = False) -> None:
    """Train two linear layers on 32 rows of 8 numbers, the first of which needs no gradient of its input."""
    first, last, x = nn.Linear(8, 16), nn.Linear(16, 1), paddle.randn([32, 8])
    net = nn.Sequential(first, nn.Tanh(), last)

    def loss_of(step: int) -> Any:
        output = net(x)
        return ((output @ paddle.ones([1, 1])) if outside else output).square().mean()

    fit(loss_of, net.parameters(), steps=steps)


def audited(policy: str, *, steps: tuple[int, ...] = (3,), outside: bool = False) -> AuditRecord:
    observer, run = observed(lambda: perceptron(outside=outside), policy, AuditSettings(steps=steps))
    record = observer.record(run)
    assert isinstance(record, AuditRecord)
    return record


@pytest.mark.parametrize(
    ("policy", "fmt"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "fp32"), (AS_IS, "fp32"), ("tf32", "fp32")]
)
def test_the_products_of_a_step_are_those_counted_by_hand(policy: str, fmt: str) -> None:
    record = audited(policy)
    assert record.steps == [3]
    assert record.flops_by_phase == {"forward": {fmt: FIRST + LAST}, "dgrad": {fmt: LAST}, "wgrad": {fmt: FIRST + LAST}}
    assert record.run.effective.flops_by_format == {fmt: 2 * FIRST + 3 * LAST}
    assert {p.module for p in record.products} == {"0", "2"}
    assert sum(p.flops for p in record.products) == 2 * FIRST + 3 * LAST


def test_several_steps_add_up() -> None:
    record = audited("fp16", steps=(1, 3))
    assert record.steps == [1, 3]
    assert record.flops_by_format == {"fp16": 2 * (2 * FIRST + 3 * LAST)}


def test_casts_are_those_of_operands_and_of_their_gradients() -> None:
    found = {(c.module, c.phase, c.of, c.source, c.target): (c.count, c.bytes) for c in audited("fp16").casts}
    to, back = ("fp32", "fp16"), ("fp16", "fp32")
    assert found == {
        ("0", "forward", "activation", *to): (1, 32 * 8 * 6),
        ("0", "forward", "weight", *to): (2, (8 * 16 + 16) * 6),
        ("0", "wgrad", "gradient", *back): (2, (8 * 16 + 16) * 6),
        ("2", "forward", "activation", *to): (1, 32 * 16 * 6),
        ("2", "forward", "weight", *to): (2, (16 + 1) * 6),
        ("2", "dgrad", "gradient", *back): (1, 32 * 16 * 6),
        ("2", "wgrad", "gradient", *back): (2, (16 + 1) * 6),
    }
    assert audited("fp32").casts == []


def test_updates_are_a_phase_of_their_own() -> None:
    operations = audited("fp16").operations
    updates = [o for o in operations if o.phase == "optimizer"]
    assert [(o.op, o.count, o.inputs, o.module) for o in updates] == [("sgd", 4, ["fp32"], "(script)")]
    assert not any(o.op in ("squared_l2_norm", "add_n", "full_like") for o in operations)


@pytest.mark.parametrize(
    ("policy", "codes", "causes"),
    [
        ("fp32", ["A101"], {("0", "off"), ("2", "off")}),
        ("fp16:fp32_modules=0", ["A103", "A201"], {("0", "excluded")}),
        ("fp16:fp32=matmul", ["A104"], {("0", "list"), ("2", "list")}),
        ("fp16", ["A201"], set()),
    ],
)
def test_causes_and_findings(policy: str, codes: list[str], causes: set[tuple[str, str]]) -> None:
    record = audited(policy)
    found = {(p.module, p.cause) for p in record.wide_products}
    assert found == causes
    assert sorted(f.code for f in record.findings) == codes


def test_code_outside_layers_is_named() -> None:
    record = audited("fp16", outside=True)
    (wide,) = record.wide_products
    assert (wide.op, wide.module, wide.cause, wide.flops) == ("matmul", "(script)", "off", 2 * 2 * 32)
    assert [f.code for f in record.findings if f.code == "A102"] == []  # less than a hundredth of the FLOPs
    assert [reason.what for reason in record.run.effective.left_alone] == ["FP32 code"]


def test_range_sensitive_operations_in_16_bits() -> None:
    def code() -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.Softmax())
        fit(lambda step: net(paddle.ones([4, 8])).square().mean(), net.parameters(), steps=3)

    observer, run = observed(code, "fp16:lower=softmax", AuditSettings(steps=(2,)))
    (finding,) = [f for f in observer.record(run).findings if f.code == "A402"]
    assert finding.modules == ["1"]
    assert finding.detail.startswith("softmax ran on fp16 operands")


def test_the_shapes_of_products() -> None:
    x, weight = paddle.ones([2, 16, 6, 6]), paddle.ones([24, 8, 3, 3])
    conv = shape_of(
        "conv2d", paddle.ones([2, 24, 4, 4]), (x, weight, [1, 1], [0, 0], "EXPLICIT", [1, 1], 2, "NCHW"), {}
    )
    assert conv is not None
    assert (conv.m, conv.n, conv.k, conv.batch) == (32, 12, 72, 2)
    assert list(conv.problems) == ["groups", "layout"]
    batched = shape_of("matmul", paddle.ones([5, 3, 8]), (paddle.ones([5, 3, 16]), paddle.ones([5, 16, 8])), {})
    assert batched is not None
    assert (batched.m, batched.n, batched.k, batched.batch, batched.problems) == (3, 8, 16, 5, {})
    assert shape_of("rnn", x, (), {}) is None


def test_the_titles_are_those_of_pytorch() -> None:
    known = {rule.code: rule.title for rule in RULES}
    assert TITLES.items() <= known.items()
