"""Lines through timed operations: exact on times that lie on a line, and which rates an untimed kind gets."""

from __future__ import annotations

import pytest

from mezzo.measure.predict.rates import CostLine, MachineRates, TimedOperation, is_depthwise, kind_of, line_through
from mezzo.measure.predict.tape import CostedOperation, ProductSize

NO_SHAPE = ProductSize()


def _operation(
    name: str = "relu", *, flops: int = 0, read: int = 0, written: int = 0, shape: ProductSize = NO_SHAPE
) -> CostedOperation:
    return CostedOperation(name, "forward", "", "fp32", flops, read, written, shape)


def test_a_line_is_found_again() -> None:
    line = CostLine(2e-6, 1e-10, 5e-11)
    operations = [
        _operation("mm", flops=f, read=r, written=w)
        for f, r, w in ((10, 8, 8), (10**6, 300, 40), (10**8, 10**6, 20), (7, 10**7, 9))
    ]
    found = line_through([TimedOperation(op, line.seconds(op)) for op in operations])
    assert found == pytest.approx(line, rel=1e-6)


def test_no_rate_is_negative() -> None:
    falling = [TimedOperation(_operation(read=10**6), 3e-6), TimedOperation(_operation(read=10**7), 1e-6)]
    assert min(line_through(falling)) >= 0


def test_a_normalisation_has_a_cost_for_each_channel() -> None:
    norms = [
        _operation("native_batch_norm", read=r, shape=ProductSize(1, c, 4, 0))
        for r, c in ((10**3, 8), (10**6, 8), (10**3, 512))
    ]
    line = line_through([TimedOperation(op, 1e-6 + 1e-9 * op.read_bytes + 1e-7 * op.shape.rows) for op in norms])
    assert line == pytest.approx(CostLine(1e-6, 1e-9, 1e-7), rel=1e-6)


@pytest.mark.parametrize("between_s", [5e-7, -2e-7])
def test_whole_steps_give_what_lies_between_operations_or_what_timing_them_cost(between_s: float) -> None:
    lines = {"(others)": CostLine(1e-6, 0.0, 0.0)}
    steps = [([_operation(read=1)] * n, n * (1e-6 * 1.1 + between_s)) for n in (10, 100)]
    steps.append(([_operation("mm", flops=1, read=10**6)], 1.1 + between_s))
    found = MachineRates({**lines, "(products)": CostLine(1.0, 0.0, 0.0)}).with_steps(steps)
    assert (found.scale, found.between_s) == pytest.approx((1.1, between_s), rel=1e-3)
    assert found.seconds(steps[0][0]).sum() == pytest.approx(steps[0][1], rel=1e-3)


DEPTHWISE = ProductSize(64, 1000, 1, 9, 9)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (_operation(), "relu fp32"),
        (_operation(written=33 << 20), "relu fp32 large"),
        (_operation("mm", flops=1, shape=ProductSize(1, 64, 64, 64)), "mm fp32"),
        (_operation("mm", flops=1, shape=ProductSize(1, 4, 64, 64)), "mm fp32 thin rows"),
        (_operation("convolution", flops=1, shape=ProductSize(1, 64, 64, 64, 1)), "convolution fp32 pointwise"),
        (_operation("convolution", flops=1, shape=ProductSize(1, 64, 64, 27, 9)), "convolution fp32 window thin depth"),
        (_operation("convolution", flops=1, read=9, written=8, shape=DEPTHWISE), "convolution fp32 depthwise"),
        (_operation("convolution", flops=1, read=32, written=8, shape=DEPTHWISE), "convolution fp32 depthwise strided"),
        (
            _operation("convolution_input_gradient", flops=1, read=8, written=32, shape=DEPTHWISE),
            "convolution_input_gradient fp32 depthwise strided",
        ),
        (
            _operation("convolution_input_gradient", flops=1, read=8, written=16, shape=DEPTHWISE),  # twice: not more
            "convolution_input_gradient fp32 depthwise",
        ),
        (_operation("convolution", flops=1, read=16, written=8, shape=DEPTHWISE), "convolution fp32 depthwise"),
        (
            _operation("convolution", flops=1, read=8, written=8, shape=ProductSize(2, 64, 64, 72, 9)),
            "convolution fp32 grouped",
        ),
    ],
)
def test_kinds(operation: CostedOperation, kind: str) -> None:
    assert kind_of(operation) == kind


def test_the_weight_gradient_of_a_depthwise_convolution_is_depthwise() -> None:
    assert is_depthwise(ProductSize(64, 1, 9, 1000, 9))
    assert not is_depthwise(ProductSize(2, 32, 288, 1000, 9))


def test_an_operation_that_was_not_timed_gets_the_nearest_rates() -> None:
    rates = MachineRates(
        {"(others)": CostLine(1.0, 0, 0), "(products)": CostLine(2.0, 0, 0), "mm fp32": CostLine(3.0, 0, 0)}
    )
    thin = _operation("mm", flops=1, shape=ProductSize(1, 4, 64, 64))
    assert [rates.line(op).each_s for op in (_operation(), _operation("bmm", flops=1), thin)] == [1.0, 2.0, 3.0]
