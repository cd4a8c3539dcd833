"""Numbers that a training reads while it is traced without numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_predict import recorded, trained_tape
from mezzo.measure.predict.placeholder_numbers import numbers_read, placeholder_numbers
from mezzo.measure.predict.script import recorder as script_recorder

DATA = "data = torch.arange(24.0).reshape(4, 3, 2)"
INDEXED: dict[str, tuple[int, ...]] = {
    "data[i]": (3, 2),
    "data[i, 1:]": (2, 2),
    "data[:, i]": (4, 2),
    "data[i][None]": (1, 3, 2),
    "data[i : i + 2]": (2, 3, 2),
    "data[i + 1]": (3, 2),
    "next(data[j] for j in torch.randperm(4))": (3, 2),
    "data[torch.tensor([i, i])]": (2, 3, 2),
    "torch.full((2,), i)": (2,),
    "torch.zeros(3).index_fill(0, i[None], i)": (3,),
    "torch.stack([data[j] for j in torch.randperm(4)[:2]])": (2, 3, 2),
    "nn.functional.one_hot(i, 5)": (5,),
    "torch.bincount(i[None], minlength=6)": (6,),
}


@pytest.mark.parametrize("written", INDEXED)
def test_an_index_that_is_a_tensor_selects_what_any_would(written: str, tmp_path: Path) -> None:
    text = f"""
import torch
from torch import nn
{DATA}
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    i = torch.randint(4, ())
    assert ({written}).shape == {INDEXED[written]}
    data[i] = 1.0
    model(data).mean().backward()
    optimizer.step()
"""
    made = recorded(tmp_path, text)
    assert set(made.read_at) <= {"train.py:9", "train.py:10"}
    assert "train.py:10" in made.read_at


def test_comparisons_of_whole_tensors_are_false() -> None:
    with FakeTensorMode(), placeholder_numbers(lambda: None):
        ones = torch.ones(3)
        assert not torch.equal(ones, ones)
        assert not torch.allclose(ones, ones)
        assert (ones[0].item(), ones.long()[0].item(), (ones > 0)[0].item()) == (1.0, 0, False)


def test_tensors_with_numbers_keep_them() -> None:
    with placeholder_numbers(lambda: None, some_are_real=True):
        assert (torch.tensor(3.5).item(), int(torch.tensor(4)), bool(torch.tensor(1))) == (3.5, 4, True)
        assert torch.equal(torch.ones(2), torch.ones(2))


class Dropping(nn.Module):
    """Skips its layer where a random number is below its rate, as the decoders of OPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.0 else self.layer(x)


def test_a_model_by_name_may_ask_for_a_number_too() -> None:
    tape = trained_tape(Dropping, 4)
    assert [op.name for op in tape.operations if op.flops] == ["addmm", "mm"]
    (line,) = tape.read_at
    assert line.startswith("test_placeholder_numbers.py:")
    assert numbers_read("model", [line]).reason.endswith(f"read at {line}")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("torch.isfinite(p.grad).all()", ""),
        ("p.grad.isfinite().all()", ""),
        ("torch.all(torch.isfinite(p.grad)).item()", ""),
        ("not (torch.isnan(p.grad).any() or torch.isinf(p.grad).any())", ""),
        ("p.grad.sum() > 0", "8 backward passes without an update"),
    ],
)
def test_gradients_are_finite_and_a_script_that_never_updates_is_ended(
    asked: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_recorder, "_MOST_BACKWARD", 8)
    text = f"""
import torch
p = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(p.parameters(), lr=0.1)
while True:
    p(torch.randn(3, 2)).mean().backward()
    if {asked.replace("p.grad", "p.weight.grad")}:
        optimizer.step()
    optimizer.zero_grad()
"""
    if error:
        with pytest.raises(RuntimeError, match=error):
            recorded(tmp_path, text)
    else:
        assert recorded(tmp_path, text).num_steps == 2
