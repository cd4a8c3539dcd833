"""What the recorder answers without torch is what torch would answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.measure.predict import recorder
from mezzo.measure.predict.tape import TrainingTape
from mezzo.measure.predict.training import record_training

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
}


def tape(optimizer: Any, dtype: torch.dtype) -> TrainingTape:
    def build() -> nn.Module:
        # a bias, a product and a convolution whose weight is stored in another order
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).to(dtype)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    return record_training(
        build,
        lambda n: {"x": torch.empty(n, 3, 8, 8, dtype=dtype)},
        lambda model, inputs: (model(inputs["x"]).float().mean(), None),
        batch=2,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lists_of_an_optimizer_leave_the_same_tape(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tape(OPTIMIZERS[name], dtype)
    monkeypatch.setattr(recorder, "_list_results", lambda *_: NotImplemented)
    assert tape(OPTIMIZERS[name], dtype) == quick


@pytest.mark.parametrize(
    "lists",
    [
        lambda a: torch._foreach_add(a, [torch.ones(2, 3, 4), torch.ones(3)]),  # grows
        lambda a: torch._foreach_add(a, [t.double() for t in a]),  # becomes wider
        lambda a: torch._foreach_mul(a, torch.tensor(2.0)),
        lambda a: torch._foreach_norm(a),
        lambda a: torch._foreach_add([t.long() for t in a], 0.5),  # becomes floating-point
        lambda a: torch._foreach_add(a, a, alpha=2),
    ],
)
def test_lists_have_the_shapes_and_formats_that_torch_gives_them(lists: Any) -> None:
    def layout(found: Any) -> list[Any]:
        return [(t.shape, t.stride(), t.dtype) for t in found]

    expected = layout(lists([torch.ones(3, 4), torch.ones(3)]))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), recorder.Recorder(batch=1):
        assert layout(lists([torch.ones(3, 4), torch.ones(3)])) == expected


def test_a_list_in_place_still_refuses_what_torch_refuses() -> None:
    with torch._subclasses.FakeTensorMode(), recorder.Recorder(batch=1), pytest.raises(RuntimeError):
        torch._foreach_add_([torch.ones(3)], [torch.ones(4)])
