"""What is changed in a script's models from outside: the layout of weights and images, compilation, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import Policy
from mezzo.launch.request import ModelChanges
from mezzo.launch.torch import TorchTraining, switched


class Seeing(nn.Module):
    """A model of images that keeps the layout of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 1)
        self.was_channels_last = False

    def forward(self, images: Tensor) -> Tensor:
        self.was_channels_last = images.is_contiguous(memory_format=torch.channels_last)
        out: Tensor = self.head(self.conv(images).mean((2, 3)))
        return out


def trained(changes: ModelChanges, *, batches: tuple[int, ...] = (2, 2, 2)) -> tuple[Any, ...]:
    """Train a small model on batches of these sizes; return it, its optimizer, the training and the count."""
    with switched(None) as (run, counted):
        training = TorchTraining(run, counted)
        elements = training.change_models(changes)
        torch.manual_seed(0)
        model = Seeing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for size in batches:
            optimizer.zero_grad()
            model(torch.randn(size, 3, 8, 8, generator=generator)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.zeros(100, 3, 8, 8))  # an evaluation is no part of a step
        run.close_update()
    return model, optimizer, training, elements


def test_channels_last_changes_the_layout_of_weights_and_images_and_nothing_else() -> None:
    plain, *_ = trained(ModelChanges(counts_inputs=True))
    model, optimizer, training, elements = trained(ModelChanges(channels_last=True, counts_inputs=True))
    assert not plain.was_channels_last
    assert model.was_channels_last
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.param_groups[0]["params"][0] is model.conv.weight
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    assert [(one.what, one.value) for one in training.explanation()] == [("memory layout", "channels-last")]
    assert training.effective().unmade_changes == {}
    assert elements() == 2 * 3 * 8 * 8


@pytest.mark.parametrize(("batches", "expected"), [((4, 4, 1), 4 * 192), ((1,), 192)])
def test_what_a_step_is_given_is_the_median(batches: tuple[int, ...], expected: int) -> None:
    *_, elements = trained(ModelChanges(counts_inputs=True), batches=batches)
    assert elements() == expected


def test_a_model_without_images_is_left_alone() -> None:
    with switched(None) as (run, counted):
        TorchTraining(run, counted).change_models(ModelChanges(channels_last=True))
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        assert run.objects.changed_models is not None
        assert run.objects.changed_models.explanation() == []
        assert "channels-last" in {one.what for one in run.notes.left_alone.values()}
        assert counted.effective().unmade_changes == {"channels_last": "it has no convolution weights for images"}


def test_a_model_is_compiled_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def compile(function: Any, **kwargs: Any) -> Any:
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    model, _, training, _ = trained(ModelChanges(compiles=True))
    assert made == [model._call_impl]
    assert [(one.what, one.value) for one in training.explanation()] == [("torch.compile", "on")]


def test_a_model_in_the_scripts_own_16_bits_is_named() -> None:
    class Half(nn.Linear):
        pass

    with switched(Policy.parse("fp32")) as (_, counted):
        Half(2, 1, dtype=torch.bfloat16)(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        assert counted.effective().own_16_bits == "Half"


@pytest.mark.parametrize(("names", "compiled"), [((), [""]), (("head", "conv"), ["conv", "head"]), (("other",), [])])
def test_only_the_named_modules_are_compiled(names: tuple[str, ...], compiled: list[str]) -> None:
    with switched(None) as (run, counted):
        training = TorchTraining(run, counted)
        training.change_models(ModelChanges(compiles=True, compile_only=names))
        model = Seeing()
        calls: list[str] = []
        for path, part in model.named_modules():
            part.compile = lambda path=path: calls.append(path)  # type: ignore[method-assign]
        model(torch.zeros(2, 3, 8, 8))
    assert calls == compiled
