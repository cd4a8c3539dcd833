"""The device's own matrix units: TF32 for FP32 products, FP8 for linear layers by torchao's float8 training.

torchao computes the three products of a linear layer with 8-bit operands; weights, gradients and saved activations are
unchanged. It has its own class for such layers. A layer is converted in place, by changing its class and settings: it
remains the same object for the model, its hooks and the optimizer, with the same parameters and names, so state dicts
do not change.

The number of rows (samples times positions) must be a multiple of 16, because the gradient of the weight sums
over them. An odd batch is padded with zero rows, which change no largest magnitude and no sum.

Outside the session's region a layer computes as it did before, like every other operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.engine.casts import conversion
from mezzo.errors import UnsupportedFormatError
from mezzo.formats import FP64, MX_BLOCK
from mezzo.policy import Policy
from mezzo.policyfields import recipe_of

_MULTIPLE = 16


def float8_config(policy: Policy) -> Any:
    """Return torchao's settings for the policy's recipe.

    Raises:
        UnsupportedFormatError: torchao cannot be imported.
    """
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise UnsupportedFormatError(
            f"policy {policy!s} computes linear layers in FP8 with torchao, which cannot be imported ({error})",
            hint="pip install 'torchao>=0.18'; or set arithmetic=emulated for FP8's numerics without its speed, or use policy bf16",
        ) from None
    return Float8LinearConfig.from_recipe_name(policy.fp8_recipe)


class MxLinear(Protocol):
    """A linear layer that torchao computes in MXFP8."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, with_hp: bool) -> Tensor:
        """Return the result in the format of ``x``; ``with_hp`` computes the weight's gradient in that format as well."""


def mxfp8_linear(policy: Policy) -> MxLinear:
    """Return torchao's MXFP8 layer with the policy's rule of scales.

    Raises:
        UnsupportedFormatError: torchao cannot be imported, or has no such layer.
    """
    try:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    except ImportError as error:
        raise UnsupportedFormatError(
            f"policy {policy!s} computes linear layers in MXFP8 with torchao, which cannot be imported ({error})",
            hint="pip install 'torchao>=0.18'; or set arithmetic=emulated for MXFP8's numerics without its speed, or use policy bf16",
        ) from None
    recipe = recipe_of(policy)
    assert recipe is not None
    assert recipe.values.scaling is not None
    mode = ScaleCalculationMode(recipe.values.scaling.rule)
    e4m3, (product, by_rows, by_columns) = recipe.values.dtype, MX_KERNELS
    kernels, casts = (
        KernelPreference(product),
        (MXFP8Dim0CastKernelChoice(by_rows), MXFP8Dim1CastKernelChoice(by_columns)),
    )

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, with_hp: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        missing = -len(rows) % MX_BLOCK  # the gradient of the weight sums over rows, in blocks
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        wide: Tensor = mx_mm.apply(
            padded, weight.to(x.dtype), e4m3, e4m3, e4m3, MX_BLOCK, kernels, *casts, mode, with_hp
        )
        y = wide[: len(rows)].reshape(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias.to(y.dtype)

    return linear


MX_KERNELS = ("auto", "triton", "cuda")
"""torchao's names of the GPU's kernels: of the product, and of casts along rows and columns."""


def use_float8(layer: nn.Linear, config: Any, policy: Policy, *, converted: bool) -> None:
    """Change ``layer`` to torchao's class and settings, with a forward that uses them only in the session's region.

    Args:
        layer: the layer.
        config: torchao's settings.
        policy: the policy.
        converted: whether the layer has such a forward already.
    """
    from torchao.float8 import convert_to_float8_training

    twin = convert_to_float8_training(layer, config=config)
    layer.__class__ = type(twin)
    vars(layer).update({name: value for name, value in vars(twin).items() if name not in _OF_ANY_MODULE})
    if not converted:
        conversion.wrap(layer, in_float8, layer, policy.storage.dtype)


_OF_ANY_MODULE = {*vars(nn.Module()), "forward"}


def lowers(layer: nn.Linear, low: torch.dtype, input: Tensor) -> bool:
    """Return whether a layer computes in fewer bits now: in a region, or with weights that were cast, but not in FP64."""
    region = torch.is_autocast_enabled(input.device.type) or layer.weight.dtype is low  # a cast model has no region
    return region and input.dtype is not FP64.dtype and input.numel() > 0


def in_float8(call: Any, layer: nn.Linear, low: torch.dtype, input: Tensor) -> Tensor:
    """Run a layer of torchao's class, ``call``, in the session's region; elsewhere as a plain one."""
    kind = input.device.type
    if not lowers(layer, low, input):
        return F.linear(input, layer.weight, layer.bias)
    with torch.autocast(kind, enabled=False):  # torchao's layer would check the GPU's autocast and cast again
        x = input.to(low)
        missing = -(x.numel() // x.shape[-1]) % _MULTIPLE
        if missing == 0:
            y: Tensor = call(x)
            return y
        rows = x.reshape(-1, x.shape[-1])
        padded: Tensor = call(F.pad(rows, (0, 0, 0, missing)))
        return padded[: len(rows)].reshape(*x.shape[:-1], -1)


# torch has older switches (``set_float32_matmul_precision``, ``allow_tf32``) and newer ones (``fp32_precision``). If only a newer one is
# set, torch raises when an older one is read, as Lightning and torch's own compiler do. Setting the older ones keeps both readable. No
# switch queries the CUDA driver.
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
