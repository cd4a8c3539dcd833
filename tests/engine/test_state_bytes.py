"""What state dicts allocate on a GPU, counted on fake tensors: nothing beyond what the session keeps, whatever it keeps it in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import mezzo
from fake_cuda import DeviceBytes, Linear, fake_gpus, step
from mezzo.engine.snapshots import contents
from mezzo.engine.state import NoLoopChecks

SIZE, LAYERS = 64, 4
LARGEST = 4 * SIZE * SIZE
"""Bytes of the largest tensor in FP32."""

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bf16-master", "AdamW", {}),
    ("bf16-master", "AdamW", {"moments": "8bit", "amsgrad": True}),
    ("bf16-master", "SGD", {"moments": "bf16", "momentum": 0.9}),
    ("fp16-master", "AdamW", {}),
    ("fp16-master", "AdamW", {"moments": "8bit"}),
    ("bf16-pure", "AdamW", {"moments": "8bit", "rounding": "stochastic"}),
    ("bf16", "AdamW", {"moments": "bf16"}),
    ("fp32", "AdamW", {}),
]


def trained(policy: str, optimizer: str, options: dict[str, Any]) -> mezzo.Session:
    model = nn.Sequential(*[Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)])
    made = getattr(mezzo, optimizer)(model.parameters(), lr=0.1, **options)
    one = mezzo.Session(model, made, policy=policy)
    one.state.progress.updates_closed, one._watch_rounding, one.state.loop_checks = (
        1,
        False,
        NoLoopChecks(),
    )  # what only a first update does
    step(one)
    return one


def state_of(one: mezzo.Session) -> dict[str, Any]:
    one.__class__ = type(
        "Counted", (mezzo.Session,), {"skipped": 0, "updates": 1}
    )  # fake tensors have no values to read
    for scale in one.scales:
        scale.state_dict = lambda: {"scale": 1.0}  # type: ignore[method-assign]
    return one.state_dict()


def own_bytes(one: mezzo.Session) -> int:
    held = [*one.models[0].parameters(), *(t for s in one.optimizers[0].state.values() for t in s.values())]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


@pytest.mark.parametrize(("policy", "optimizer", "options"), CASES)
def test_state_dict_allocates_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch, policy: str, optimizer: str, options: dict[str, Any]
) -> None:
    with fake_gpus(monkeypatch):
        one = trained(policy, optimizer, options)
        with DeviceBytes() as counted:
            state = state_of(one)
        assert counted.peak == 0
        formats = {t.dtype for t in tree_leaves([state["models"], state["optimizers"]]) if isinstance(t, Tensor)}
        assert formats == ({torch.float32} if policy != "bf16-pure" else {torch.float32, torch.bfloat16})


@pytest.mark.parametrize(("policy", "optimizer", "options"), CASES)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_load_state_dict_allocates_at_most_the_largest_tensor_at_a_time(
    monkeypatch: pytest.MonkeyPatch, policy: str, optimizer: str, options: dict[str, Any], place: str
) -> None:
    with fake_gpus(monkeypatch):
        one = trained(policy, optimizer, options)
        state = tree_map(lambda x: x.to(place, copy=True) if isinstance(x, Tensor) else x, state_of(one))
        kept = own_bytes(one)
        monkeypatch.setattr(contents, "_refuse_not_finite", lambda *_: None)  # these tensors have no values to read
        with DeviceBytes() as counted:
            one.load_state_dict(state)
        assert own_bytes(one) == kept
        moments_and_steps = sum(
            t.untyped_storage().nbytes() for s in one.optimizers[0].state.values() for t in s.values()
        )
        assert counted.live <= moments_and_steps  # what takes the place of the state before
        assert counted.peak <= counted.live + LARGEST


def test_a_master_is_expanded_and_saved_once() -> None:
    model = nn.Linear(8, 8)
    one = mezzo.Session(model, mezzo.AdamW(model.parameters()), policy="bf16-master:arithmetic=emulated")
    state = one.state_dict()
    for number, name in enumerate(("weight", "bias")):
        saved = state["models"][0][name], state["optimizers"][0]["state"][number]["master"]
        assert saved[0].data_ptr() == saved[1].data_ptr()
        assert torch.equal(saved[0], one.masters.values(getattr(model, name)))


def test_moments_are_in_their_format_as_soon_as_they_are_loaded() -> None:
    first, second = (nn.Linear(16, 16) for _ in range(2))
    theirs = torch.optim.AdamW(first.parameters(), lr=0.1)
    first(torch.randn(4, 16)).sum().backward()
    theirs.step()
    ours = mezzo.AdamW(second.parameters(), lr=0.1, moments="8bit")
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[second.weight]["exp_avg"].dtype is torch.uint8
    again = mezzo.AdamW(first.parameters(), lr=0.1, moments="8bit")
    again.load_state_dict(ours.state_dict())
    for one, other in zip(ours.state.values(), again.state.values(), strict=True):
        assert {name: value.tolist() for name, value in one.items()} == {n: v.tolist() for n, v in other.items()}


def test_a_layout_that_changes_between_loading_and_the_first_update_moves_the_moments_along() -> None:
    def built(moments: str) -> tuple[nn.Conv2d, mezzo.AdamW]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 8, 3)
        return model, mezzo.AdamW(model.parameters(), lr=0.1, moments=moments)  # type: ignore[arg-type]

    model, optimizer = built("8bit")
    model(torch.randn(2, 4, 8, 8)).square().sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    fresh, loaded = built("8bit")
    loaded.load_state_dict(saved)
    fresh.to(memory_format=torch.channels_last)
    one = mezzo.Session(fresh, loaded, policy="bf16-master:arithmetic=emulated")
    after = one.state_dict()["optimizers"][0]["state"]
    for number, state in saved["state"].items():
        assert torch.equal(after[number]["exp_avg"], state["exp_avg"])
