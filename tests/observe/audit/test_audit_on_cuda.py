"""What CUDA's autocast dispatches, judged: which functions are found range-sensitive. Fake tensors take the place of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_audit import traced_operations
from mezzo.observe.audit.findings import AuditedSteps, findings
from oracles.cuda_dispatch import cuda_autocast

Function = Callable[[Tensor], Tensor]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake storages have no address; that of their description takes its place."""
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)


def labels(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], dtype=torch.long, device=x.device)


# CUDA's autocast computes all of them in FP32, of 16-bit operands: by a cast, by a dtype argument, or inside the kernel.
IN_FP32: dict[str, Function] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax with a dtype": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x, -1), labels(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, labels(x)),
    "cross_entropy as a module": lambda x: torch.nn.CrossEntropyLoss()(x, labels(x)),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, labels(x), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, torch.empty(x.shape, device=x.device)),
    "sum": lambda x: x.sum(),
    "sum over a dimension": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "norm": lambda x: x.norm(),
    "norm over a dimension": lambda x: x.norm(dim=-1),
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, (16,)),
    "mse_loss": lambda x: F.mse_loss(x, torch.empty(x.shape, device=x.device)),
    "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
}
# Here the script requests a 16-bit result.
IN_16_BITS: dict[str, Function] = {
    "softmax": lambda x: F.softmax(x, -1, dtype=x.dtype),
    "log_softmax": lambda x: F.log_softmax(x, -1, dtype=x.dtype),
    "sum": lambda x: x.sum(dtype=x.dtype),
    "sum over a dimension": lambda x: x.sum(-1, dtype=x.dtype),
    "prod": lambda x: x.prod(dtype=x.dtype),
    "cumsum": lambda x: x.cumsum(0, dtype=x.dtype),
    "cumprod": lambda x: x.cumprod(0, dtype=x.dtype),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dtype=x.dtype),
}

WIDE_WITHOUT_AUTOCAST = ("log_softmax with a dtype", "cross_entropy of probabilities", "mse_loss")
"""By their dtype argument, or by FP32 targets."""


def found(function: Function, low: torch.dtype, *, autocast: bool = True) -> list[str]:
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 16, dtype=low, device="cuda:0")
        region = cuda_autocast(low) if autocast else torch.no_grad
        with region():
            seen = traced_operations(lambda: function(x), device_type="cuda")
    assert any(one.op != "device" for one in seen)
    watched = AuditedSteps(operations=seen, wide=[], trips=[], products=[], device_type="cuda")
    return [one.code for one in findings(watched) if one.code == "A402"]


@pytest.mark.parametrize(
    ("name", "low"),
    [*((name, torch.float16) for name in IN_FP32), ("softmax", BF16), ("sum", BF16), ("mse_loss", BF16)],
)
def test_what_computes_in_fp32_is_no_finding(name: str, low: torch.dtype) -> None:
    assert found(IN_FP32[name], low) == []


@pytest.mark.parametrize(("name", "low"), [*((name, torch.float16) for name in IN_16_BITS), ("softmax", BF16)])
def test_a_16_bit_result_is_a_finding(name: str, low: torch.dtype) -> None:
    assert found(IN_16_BITS[name], low) == ["A402"]


@pytest.mark.parametrize("name", sorted(IN_FP32))
def test_without_autocast_all_of_them_are_findings(name: str) -> None:
    expected = [] if name in WIDE_WITHOUT_AUTOCAST else ["A402"]
    assert found(IN_FP32[name], torch.float16, autocast=False) == expected
