"""torch's switches for FP32 matrix products, convolutions and recurrent layers: FP32 itself, or TF32.

torch has older switches (``set_float32_matmul_precision``, ``allow_tf32``) and newer ones (``fp32_precision``). If only a newer one is
set, torch raises when an older one is read, as Lightning and torch's own compiler do. Setting the older ones keeps both readable. No
switch queries the CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
Products = Literal["tf32", "ieee"]
_TF32_FROM = (8, 0)
"""The first compute capability with TF32 matrix units; on older GPUs the switches change nothing."""
_RECURRENT = ("_cudnn_rnn", "_thnn_fused")


def set_fp32_products(precision: Products) -> None:
    """Compute FP32 products, convolutions and recurrent layers on CUDA in TF32, or in FP32, for the whole process."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    _CUDNN.allow_tf32 = tf32
    if tf32:
        _MKLDNN.matmul.fp32_precision = "ieee"  # "high" would change products on CPUs too, and TF32 is CUDA's here
    elif "tf32" in (_CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision):  # from torch.backends.fp32_precision
        _CUDNN.fp32_precision = "ieee"


@contextmanager
def fp32_products_as_they_were() -> Iterator[None]:
    """Restore the switches at the end."""
    before = _Switches.now()
    try:
        yield
    finally:
        before.restore()


def runs_in_tf32(op: str, operand: Tensor) -> bool:
    """Return whether a product of FP32 operands runs in TF32.

    Args:
        op: aten's name of the operation, without its overload.
        operand: one of its operands, in FP32.
    """
    if not operand.is_cuda or torch.version.hip is not None:
        return False
    if "conv" in op:
        switch = _CUDNN.conv
    elif op.startswith(_RECURRENT):
        switch = _CUDNN.rnn
    else:
        switch = torch.backends.cuda.matmul
    return bool(switch.fp32_precision == "tf32") and torch.cuda.get_device_capability(operand.device) >= _TF32_FROM


@dataclass(frozen=True)
class _Switches:
    """The values of all switches; an older one is None if newer ones disagree, which makes it unreadable."""

    older: str | None
    older_cudnn: bool | None
    matmul: str
    cudnn: str
    conv: str
    rnn: str
    cpu: str

    @classmethod
    def now(cls) -> _Switches:
        return cls(
            older=_read(torch.get_float32_matmul_precision),
            older_cudnn=_read(lambda: _CUDNN.allow_tf32),
            matmul=torch.backends.cuda.matmul.fp32_precision,
            cudnn=_CUDNN.fp32_precision,
            conv=_CUDNN.conv.fp32_precision,
            rnn=_CUDNN.rnn.fp32_precision,
            cpu=_MKLDNN.matmul.fp32_precision,
        )

    def restore(self) -> None:
        if self.older is not None:
            torch.set_float32_matmul_precision(self.older)
        torch.backends.cuda.matmul.fp32_precision = self.matmul
        _MKLDNN.matmul.fp32_precision = self.cpu
        _CUDNN.fp32_precision = self.cudnn
        if self.older_cudnn is not None:
            _CUDNN.allow_tf32 = self.older_cudnn
        else:
            _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision = self.conv, self.rnn


def _read(switch: Callable[[], Any]) -> Any:
    try:
        return switch()
    except RuntimeError:
        return None
