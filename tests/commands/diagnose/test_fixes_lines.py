"""The lines that a diagnosis prints for invalid operations, run as printed where the operation fails: values and gradients are finite."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from mezzo.commands.diagnose.fixes import offers_for
from mezzo.formats import FORMATS
from mezzo.records import DiagnoseRecord, Operand, StepPhase
from record_builders import run_record


class Case(NamedTuple):
    """An operation, the pass in which it fails, and where it does."""

    op: str
    phase: StepPhase
    at: tuple[float, ...]


CASES = [
    Case("sqrt", "backward", (0.0, 4.0)),
    Case("sqrt", "forward", (-1.0, 4.0)),
    Case("rsqrt", "forward", (0.0, 4.0)),
    Case("log", "forward", (0.0, 2e-6)),
    Case("log1p", "forward", (-1.0, 4.0)),
    Case("pow", "backward", (0.0, 4.0)),
    Case("norm", "backward", (0.0, 0.0)),
    Case("exp", "forward", (100.0, 1.0)),
    Case("acos", "backward", (1.0, -1.0)),
    Case("div", "forward", (0.0, 4.0)),
]


def printed(case: Case, form: str) -> str:
    operand = Operand(format=form, shape=[2], largest=max(map(abs, case.at)), smallest=min(map(abs, case.at)))
    record = DiagnoseRecord(
        run=run_record(),
        verdict="invalid_operation",
        located=True,
        op=case.op,
        origin="made",
        phase=case.phase,
        operands=[operand],
    )
    (offer,) = offers_for(record)
    assert offer.line is not None
    return offer.line.text("torch")


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.phase}")
def test_a_printed_line_is_finite_where_the_operation_is_not(case: Case, form: str) -> None:
    dtype, line = FORMATS[form].dtype, printed(case, form)
    x = torch.tensor(case.at, dtype=dtype, requires_grad=True)
    a = torch.tensor([0.0, 1.0], dtype=dtype, requires_grad=True)
    scope = {"torch": torch, "x": x, "p": 0.5, "a": a, "b": x}
    exec(line, scope)
    y = scope["y"]
    assert isinstance(y, torch.Tensor)
    assert y.isfinite().all(), line
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all(), line
