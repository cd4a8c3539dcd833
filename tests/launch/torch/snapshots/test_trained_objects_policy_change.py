"""A run whose policy changes between two steps: what is computed in which format before and after, compiled code included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mezzo.launch.torch import switched
from mezzo.launch.torch.snapshots.trained_objects import fall_back
from mezzo.policy import Policy


def _format_of(values: torch.Tensor) -> str:
    """Return the smallest format that contains all of ``values``; BF16's values of about 1 are in FP16 as well."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if torch.equal(values.to(dtype).float(), values):
            return name
    return "fp32"


def _plain(model: nn.Module) -> Any:
    return model


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _compiled_function(model: nn.Module) -> Any:
    return torch.compile(lambda x: model(x), backend="aot_eager")


@pytest.mark.parametrize("called", [_plain, _compiled, _compiled_function])
def test_models_compute_under_the_new_policy(called: Any) -> None:
    torch.manual_seed(0)
    x, found, scales = torch.randn(64, 4), [], []
    with switched(Policy.parse("fp16")) as (run, _):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        optimizer, call = torch.optim.SGD(model.parameters(), lr=0.1), called(model)
        for step in range(6):
            if step in (2, 4):
                run.change_policy(Policy.parse("bf16" if step == 2 else "fp32"), "a test")
            out = call(x)
            found.append(_format_of(out.detach()))
            scales.append(run.precision.scale.value())
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    torch._dynamo.reset()
    assert found == ["fp16", "fp16", "bf16", "bf16", "fp32", "fp32"]
    assert scales == [65536.0, 65536.0, 1.0, 1.0, 1.0, 1.0]


def test_the_gradients_after_a_change_are_those_of_a_run_under_the_new_policy() -> None:
    """To the bit: nothing of the old scale or of the old casts may be left."""
    gradients = []
    for first in ("fp16", "bf16"):
        torch.manual_seed(0)
        x = torch.randn(64, 4)
        with switched(Policy.parse(first)) as (run, _):
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for step in range(150):  # into the steady state
                if step == 145 and first == "fp16":
                    run.change_policy(Policy.parse("bf16"), "a test")
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        gradients.append([p.grad for p in model.parameters()])
    for mine, expected in zip(*gradients, strict=True):
        assert torch.equal(mine, expected)


def test_what_would_keep_the_old_policy_is_named() -> None:
    with switched(Policy.parse("fp16")) as (run, _):
        model = nn.Linear(4, 1)
        model(torch.randn(2, 4))
        with torch.autocast("cpu", dtype=torch.float16):
            kept = fall_back(run, "skip storm").note
        assert (kept.value, kept.reason) == (
            "unchanged",
            "the loop runs in an autocast region that the script opened around it",
        )
        assert fall_back(run, "skip storm").note.value == "bf16, before fp16"
    with switched(None) as (run, _):
        assert fall_back(run, "skip storm").note.reason == "the precision is the script's own"


def test_the_record_has_the_formats_of_the_first_steps_and_that_they_were_emulated() -> None:
    found = []
    for falls in (False, True):
        with switched(Policy.parse("fp16:arithmetic=emulated")) as (run, counted):
            torch.manual_seed(0)
            model = nn.Linear(4, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(8):
                if step == 6 and falls:
                    run.change_policy(Policy.parse("fp32"), "a test")
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
        found.append(counted.effective())
    assert found[0] == found[1]
    assert found[1].emulated
