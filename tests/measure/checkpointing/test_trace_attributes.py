"""State in plain attributes: every kind of change is found and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.measure.checkpointing.trace import Attributes


class Holder(nn.Module):
    """One attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.number, self.text, self.pair = 1, "a", (1, 2)
        self.items: list[int] = [1]
        self.named = {"a": 1}
        self.tensor = torch.ones(2)
        self.generator = torch.Generator().manual_seed(0)


def assign(name: str, value: Any) -> Callable[[Holder], None]:
    return lambda module: setattr(module, name, value)


CHANGES: dict[str, tuple[Callable[[Holder], object], str]] = {
    "a number": (assign("number", 2), "number"),
    "a text": (assign("text", "b"), "text"),
    "a tuple": (assign("pair", (1, 3)), "pair"),
    "a list in place": (lambda module: module.items.append(2), "items"),
    "another list": (assign("items", [1]), "items"),
    "a dict in place": (lambda module: module.named.update(a=2), "named"),
    "a tensor in place": (lambda module: module.tensor.add_(1), "tensor"),
    "another tensor": (assign("tensor", torch.ones(2)), "tensor"),
    "a generator": (lambda module: torch.rand((), generator=module.generator), "generator"),
    "a new attribute": (assign("fresh", 1), "fresh"),
    "a lost attribute": (lambda module: delattr(module, "text"), "text"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_found_and_restored(change: Callable[[Holder], object], name: str) -> None:
    model = nn.Sequential(Holder())
    before = Attributes(model)
    assert before.changed() == []
    change(model[0])  # type: ignore[arg-type]
    changed = before.changed()
    assert changed == [("0", name)]
    before.restore(changed)
    assert before.changed() == []


@pytest.mark.parametrize("change", [assign("number", 1), assign("pair", (1, 2)), lambda m: m.layer.weight.data.add_(1)])
def test_what_is_the_same_and_what_torch_keeps_is_no_change(change: Callable[[Holder], object]) -> None:
    model = Holder()
    before = Attributes(model)
    change(model)
    model.eval()
    assert before.changed() == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_what_a_hook_computes_from_parameters_is_no_change(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = norm(nn.Linear(2, 2))
    before = Attributes(model)
    model(torch.ones(1, 2))
    assert before.changed() == []


class Counts(nn.Module):
    """Counts its calls, and makes a constant once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0
        self.constant: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.constant = torch.ones(4) if self.constant is None else self.constant
        out: torch.Tensor = torch.tanh(self.layer(x)) * self.calls + self.constant
        return out


class Caches(Counts):
    """Makes a constant once, and counts nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.calls = 0
        return out


def test_a_counter_keeps_its_module_out_of_a_plan_and_a_constant_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts(), Caches(), Caches())
    plan = mezzo.checkpoint(model, torch.randn(8, 4), plan="full")
    assert [*plan.regions] == ["2", "3"]
    assert plan.refused["1"] == "it changes its attribute 'calls' in each pass"
    assert model[1].calls == 0
