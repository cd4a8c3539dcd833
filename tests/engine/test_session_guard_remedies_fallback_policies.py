"""The safer policy after an alarm: which, for each policy and kind, on devices with and without BF16."""

from __future__ import annotations

import pytest

from mezzo.devices import Device
from mezzo.engine import session_guard
from mezzo.engine.session_guard import safer_policy
from mezzo.policy import Policy
from mezzo.records import AlarmKind

CHOSEN: list[tuple[str, AlarmKind, str]] = [
    ("fp16", "skip storm", "bf16"),
    ("fp16", "scale at its floor", "bf16"),
    ("fp16", "gradients zero", "bf16"),
    ("fp16", "loss not finite", "bf16"),
    ("fp16", "loss spike", "fp32"),
    ("fp16", "stuck updates", "fp32"),
    ("fp16:init_scale=1024:min_scale=1.0", "skip storm", "bf16"),
    ("fp16:fp32_modules=head.*:lower=softmax", "skip storm", "bf16:lower=softmax:fp32_modules=head.*"),
    ("fp16-master:fp32_modules=norm", "skip storm", "bf16-master:fp32_modules=norm"),
    ("fp16:reduce=bf16:gather=fp32", "skip storm", "bf16:reduce=bf16:gather=fp32"),
    ("fp16:gradients=bf16", "skip storm", "bf16:gradients=bf16"),
    ("bf16", "loss not finite", "fp32"),
    ("bf16-master:reduce=bf16:world=4", "loss spike", "fp32:reduce=bf16:world=4"),
]


@pytest.mark.parametrize(("policy", "kind", "expected"), CHOSEN)
def test_the_next_safer_policy(policy: str, kind: AlarmKind, expected: str) -> None:
    found = safer_policy(Policy.parse(policy), kind, "cpu")
    assert not isinstance(found, str)
    assert str(found[0]) == expected
    assert found[1].startswith(f"{kind}: ")


KEPT = [
    ("fp32", "fp32 lowers nothing, so there is no safer policy"),
    ("tf32", "tf32 lowers nothing, so there is no safer policy"),
    ("fp8", "layers were replaced by FP8 ones when the run began, and stay in FP8"),
    ("fp16-pure", "under fp16-pure the weights themselves are in 16 bits, and remain so"),
    ("fp16:reduce=fp16", "gradients are summed over processes in FP16 (reduce=fp16), which needs the loss scale"),
    ("fp16:gather=fp16", "weights are gathered over processes in FP16 (gather=fp16), which a run cannot change"),
]


@pytest.mark.parametrize(("policy", "why"), KEPT)
def test_policies_that_stay(policy: str, why: str) -> None:
    assert safer_policy(Policy.parse(policy), "skip storm", "cpu") == why


DEVICES = [
    (Device(kind="cuda", name="T4", capability=(7, 5)), "fp32"),  # FP16 on its units, BF16 emulated
    (Device(kind="cuda", name="A100", capability=(8, 0)), "bf16"),
    (Device(kind="cpu", name="an AVX2 CPU", flags=frozenset(("avx2",))), "bf16"),  # both emulated
    (Device(kind="cpu", name="a CPU", flags=frozenset(("avx512_bf16",))), "bf16"),
    (Device(kind="mps", name="macOS 13", has_bf16=False), "fp32"),
]


@pytest.mark.parametrize(("device", "expected"), DEVICES)
def test_bf16_only_where_it_is_no_slower(device: Device, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_guard, "this_device", lambda kind: device)
    found = safer_policy(Policy.parse("fp16"), "skip storm", device.kind)
    assert not isinstance(found, str)
    assert str(found[0]) == expected
