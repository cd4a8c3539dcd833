"""Which precision FP32 products run in: torch's switches under fp32 and tf32, against the script's own, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mezzo import Session
from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were, runs_in_tf32, set_fp32_products
from mezzo.launch.torch import switched
from mezzo.measure.flops import OperandFormats
from mezzo.policy import Policy

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _switches_as_they_were() -> Iterator[None]:
    with fp32_products_as_they_were():
        yield


def computes_in_tf32() -> tuple[bool, bool, bool]:
    """Return it for matrix products, convolutions and recurrent layers."""
    return tuple(s.fp32_precision == "tf32" for s in (MATMUL, CUDNN.conv, CUDNN.rnn))


def assert_older_switches_can_be_read(*, tf32: bool) -> None:
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")  # Lightning reads it at every start
    assert MATMUL.allow_tf32 is tf32
    assert CUDNN.allow_tf32 is tf32
    with CUDNN.flags(enabled=True):
        pass


def _legacy() -> None:
    torch.set_float32_matmul_precision("high")


def _allow() -> None:
    MATMUL.allow_tf32 = True
    CUDNN.allow_tf32 = True


def _current() -> None:
    MATMUL.fp32_precision = "tf32"
    CUDNN.conv.fp32_precision = "tf32"
    CUDNN.rnn.fp32_precision = "tf32"


def _parents() -> None:
    CUDNN.fp32_precision = "tf32"
    torch.backends.fp32_precision = "tf32"


def _lowest() -> None:
    torch.set_float32_matmul_precision("medium")  # BF16 on CPUs that have it


def _off() -> None:
    torch.set_float32_matmul_precision("highest")
    MATMUL.allow_tf32 = False
    CUDNN.allow_tf32 = False
    CUDNN.conv.fp32_precision = "ieee"


NOTED: dict[Callable[[], None], list[str]] = {
    _legacy: ["torch.set_float32_matmul_precision('high')"],
    _allow: ["torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = True"],
    _current: [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
        "torch.backends.cudnn.rnn.fp32_precision = 'tf32'",
    ],
    _parents: ["torch.backends.cudnn.fp32_precision = 'tf32'", "torch.backends.fp32_precision = 'tf32'"],
    _lowest: ["torch.set_float32_matmul_precision('medium')"],
}


@pytest.mark.parametrize("script", NOTED)
def test_fp32_is_fp32_whatever_the_script_sets(script: Callable[[], None]) -> None:
    with switched(Policy.of("fp32")) as (run, _):
        script()
        assert computes_in_tf32() == (False, False, False)
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert_older_switches_can_be_read(tf32=False)
    noted = [r for r in run.notes.left_alone.values() if r.what == "fp32 products"]
    assert [r.value for r in noted if "flags" not in r.value][: len(NOTED[script])] == NOTED[script]
    assert {r.reason for r in noted} == {"the script asks for reduced precision, and policy fp32 overrides it"}


def test_tf32_is_tf32_whatever_the_script_sets() -> None:
    with switched(Policy.of("tf32")) as (run, _):
        _off()
        assert computes_in_tf32() == (True, True, True)
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # TF32 is CUDA's; a CPU computes in FP32
        assert_older_switches_can_be_read(tf32=True)
    assert len(run.notes.left_alone) == 4


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
def test_what_the_script_sets_as_the_policy_does_is_not_noted(policy: str) -> None:
    with switched(Policy.of(policy)) as (run, _):
        (_off if policy == "fp32" else _allow)()
    assert run.notes.left_alone == {}


@pytest.mark.parametrize("policy", [None, "bf16:op_lists=device"])
def test_other_policies_leave_the_scripts_switches_alone(policy: str | None) -> None:
    with switched(None if policy is None else Policy.of(policy)) as (run, _):
        _legacy()
        assert torch.get_float32_matmul_precision() == "high"
    assert run.notes.left_alone == {}


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
@pytest.mark.parametrize("before", [lambda: None, _legacy, _allow, _off])
def test_the_switches_are_put_back(policy: str, before: Callable[[], None]) -> None:
    before()
    state = computes_in_tf32(), torch.get_float32_matmul_precision(), CUDNN.allow_tf32
    with switched(Policy.of(policy)):
        _current()
    assert (computes_in_tf32(), torch.get_float32_matmul_precision(), CUDNN.allow_tf32) == state


def test_a_parent_switch_in_tf32_does_not_reach_fp32() -> None:
    torch.backends.fp32_precision = "tf32"
    try:
        set_fp32_products("ieee")
        assert computes_in_tf32() == (False, False, False)
    finally:
        torch.backends.fp32_precision = "none"


def test_a_session_in_tf32_leaves_the_older_switches_readable() -> None:
    model = torch.nn.Linear(2, 2)
    Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="tf32")
    assert computes_in_tf32() == (True, True, True)
    assert_older_switches_can_be_read(tf32=True)


# --- what is counted as TF32 -------------------------------------------------------------------------------------------------


def _on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


OPS = {"mm": 0, "addmm": 0, "convolution": 1, "convolution_backward": 1, "_cudnn_rnn": 2, "_cudnn_rnn_backward": 2}


@pytest.mark.parametrize("on", [0, 1, 2])
@pytest.mark.parametrize("op", OPS)
def test_each_operation_asks_its_own_switch(monkeypatch: pytest.MonkeyPatch, op: str, on: int) -> None:
    operand = _on_gpu(monkeypatch, (8, 0))
    set_fp32_products("ieee")
    (MATMUL, CUDNN.conv, CUDNN.rnn)[on].fp32_precision = "tf32"
    assert runs_in_tf32(op, operand) is (OPS[op] == on)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_before_ampere_has_no_tf32(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    set_fp32_products("tf32")
    assert not any(runs_in_tf32(op, _on_gpu(monkeypatch, capability)) for op in OPS)


def test_rocm_has_no_tf32_under_these_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    set_fp32_products("tf32")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not any(runs_in_tf32(op, _on_gpu(monkeypatch, (9, 4))) for op in OPS)


def test_torchs_default_counts_convolutions_as_tf32_and_products_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._subclasses.FakeTensorMode():
        operand = torch.empty(2, 2)
    gpu = _on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("mezzo.measure.flops._operand", lambda args: SimpleNamespace(dtype=operand.dtype, **vars(gpu)))
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True  # as torch begins
    formats = OperandFormats()
    assert [formats.of((operand,), op=op) for op in ("mm", "convolution")] == ["fp32", "tf32"]
