"""Fixes for infinities of a mask, run as they are printed: what the mask hides stays hidden, and all gradients are finite."""

from __future__ import annotations

import pytest
import torch

from mezzo.commands.diagnose.fixes import offers_for
from mezzo.records import DiagnoseRecord, Operand, StepPhase
from record_builders import run_record

MASKED = Operand(format="fp32", shape=[2, 3], largest=1.0, smallest=0.1, num_not_finite=2)
MASK = torch.tensor([[False, True, False], [False, False, True]])


def printed(op: str, *, phase: StepPhase = "backward", smallest: float = 0.1) -> str:
    record = DiagnoseRecord(
        run=run_record(),
        verdict="invalid_operation",
        located=True,
        op=op,
        origin="made",
        phase=phase,
        operands=[MASKED, Operand(format="fp32", shape=[2, 3], largest=1.0, smallest=smallest)],
    )
    (offer,) = offers_for(record)
    assert offer.line is not None
    return offer.line.text("torch")


def loss_and_gradients(line: str, name: str) -> list[float]:
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.5, 4.0]], requires_grad=True)
    t = torch.tensor(0.07, requires_grad=True)
    scope = {"torch": torch, "x": x, "t": t, "mask": MASK}
    exec(line, scope)
    y = scope["y"] if name == "y" else scope["x"] / t
    loss = torch.nn.functional.cross_entropy(y - y.amax(-1, keepdim=True).detach(), torch.tensor([0, 1]))
    loss.backward()
    assert t.grad is not None
    assert x.grad is not None
    return [loss.item(), t.grad.item(), *x.grad.flatten().tolist()]


@pytest.mark.parametrize("op", ["div", "mul"])
def test_a_masked_product_is_masked_after_it(op: str) -> None:
    expected = loss_and_gradients("y = torch.where(mask, torch.tensor(-torch.inf), x / t)", "y")
    assert loss_and_gradients(printed(op), "y") == pytest.approx(expected)


def test_elsewhere_a_large_number_hides_as_well() -> None:
    line = printed("sub")
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.5, 4.0]], requires_grad=True)
    scope = {"torch": torch, "x": x, "mask": MASK}
    exec(line, scope)
    shown = torch.softmax(scope["x"] - scope["x"].amax(-1, keepdim=True), -1)
    shown[:, 0].sum().backward()
    assert shown[MASK].tolist() == [0, 0]
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_probability_of_0_times_its_logarithm_is_0() -> None:
    """The entropy of masked logits, and its gradient, are those of ``torch.distributions``."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.5, 4.0]]).masked_fill(MASK, -torch.inf)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logs = ours.log_softmax(-1)
    scope = {"logs": logs, "p": logs.exp()}
    exec(printed("mul", phase="forward", smallest=0.0), scope)
    entropy = -scope["y"].sum(-1)
    entropy.sum().backward()
    expected = torch.distributions.Categorical(logits=theirs).entropy()
    expected.sum().backward()
    assert entropy.tolist() == pytest.approx(expected.tolist())
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad[~MASK].tolist() == pytest.approx(theirs.grad[~MASK].tolist())
    assert ours.grad.isfinite().all()
