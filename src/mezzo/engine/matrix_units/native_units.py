"""The device's own matrix units: TF32 for FP32 products, FP8 for linear layers by torchao's float8 training.

torchao computes the three products of a linear layer with 8-bit operands; weights, gradients and saved activations are
unchanged. It has its own class for such layers. A layer is converted in place, by changing its class and settings: it
remains the same object for the model, its hooks and the optimizer, with the same parameters and names, so state dicts
do not change.

FP8 pays only for large products, because rounding costs a pass over every operand. So these layers stay in BF16, each with
its reason in ``Session.explain``: layers whose sizes are not multiples of 16, which FP8 matrix units require; layers
smaller than those for which torchao measured a gain (on H100s); the last linear layer, whose errors reach the loss
directly; layers with their own code, whose results another class would change; and those that the policy keeps in FP32.

The number of rows (samples times positions) must also be a multiple of 16, because the gradient of the weight sums
over them. An odd batch is padded with zero rows, which change no largest magnitude and no sum.

Outside the session's region a layer computes as it did before, like every other operation.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.engine.casts import conversion
from mezzo.errors import UnsupportedFormatError
from mezzo.explain import Choice
from mezzo.formats import FP32, FP64, Recipe
from mezzo.policy import Policy
from mezzo.policyfields import recipe_of

_MULTIPLE = 16
SizeFault = Literal["not multiples", "too small"]
"""Why a linear layer's sizes keep it in 16 bits."""
_SIZES = "a size is not a multiple of 16, which FP8 matrix units require"
_LAST = "the last linear layer: its errors reach the loss undamped"
_OWN_CODE = "it has code of its own, which a layer in FP8 would not run"
_OTHER_DTYPE = "its weight is in a format that is never cast"
_IN_FP32 = "the policy keeps it in FP32"


def convert(models: Sequence[nn.Module], policy: Policy, *, emulated: bool) -> tuple[int, list[Choice]] | None:
    """Convert the linear layers of ``models`` that gain from FP8, in place.

    Return their number, and why the others are left alone; None if ``policy`` uses no FP8 units.

    Args:
        models: before their weights are cast.
        policy: the policy.
        emulated: whether the device emulates it.

    Raises:
        UnsupportedFormatError: torchao cannot be imported.
    """
    if policy.compute != "fp8" or emulated:
        return None
    reasons = [_reasons(model, policy) for model in models]
    chosen = [layer for of_model in reasons for _, layer, reason in of_model if reason is None]
    config = _config(policy) if chosen else None
    for layer in chosen:
        _convert_layer(layer, config, policy)
    return len(chosen), _left_alone(reasons)


def layer_choices(models: Sequence[nn.Module], policy: Policy, *, emulated: bool) -> list[Choice]:
    """Return which linear layers of ``models`` compute in FP8 under ``policy``, and why the others do not."""
    if policy.compute != "fp8":
        return []
    reasons = [_reasons(model, policy) for model in models]
    every = [reason for of_model in reasons for _, _, reason in of_model]
    gaining = f"{every.count(None)} of {len(every)} linear layers"
    if emulated:
        reason = f"emulation has no shapes to avoid; on a GPU with FP8 units {gaining} would compute in FP8"
        return [Choice(what="fp8 layers", value="all linear layers", reason=reason)]
    reason = f"torchao's {policy.fp8_recipe} recipe on the GPU's FP8 units"
    return [Choice(what="fp8 layers", value=gaining, reason=reason), *_left_alone(reasons)]


def _reasons(model: nn.Module, policy: Policy) -> list[tuple[str, nn.Linear, str | None]]:
    """Return every linear layer by name, with the reason why it is left alone, or None."""
    names = conversion.module_names(model) or {"the model": model}
    layers = {name: module for name, module in names.items() if isinstance(module, nn.Linear)}
    in_fp32 = {inner for kept in conversion.fp32_modules(model, policy) for inner in kept.modules()}
    last = next(reversed(layers.values()), None)
    return [
        (name, layer, _IN_FP32 if layer in in_fp32 else _LAST if layer is last else _why_not(layer, policy))
        for name, layer in layers.items()
    ]


def _why_not(layer: nn.Linear, policy: Policy) -> str | None:
    plain = type(layer) is nn.Linear and "forward" not in vars(layer) and not any(layer.children())
    if not plain and not _computes_in_fp8(layer):
        return _OWN_CODE
    if layer.weight.dtype not in (FP32.dtype, policy.storage.dtype):
        return _OTHER_DTYPE
    recipe = recipe_of(policy)
    fault = None if recipe is None else fault_of_sizes(layer.out_features, layer.in_features, recipe)
    if recipe is None or fault is None:
        return None
    return _SIZES if fault == "not multiples" else _least_sizes(recipe)


def fault_of_sizes(outputs: int, inputs: int, recipe: Recipe) -> SizeFault | None:
    """Return why a linear layer of these sizes is not computed in FP8; None if it is."""
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return "not multiples"
    return "too small" if _too_small(outputs, inputs, recipe) else None


def _too_small(outputs: int, inputs: int, recipe: Recipe) -> bool:
    return any(outputs <= most_outputs and inputs <= most_inputs for most_outputs, most_inputs in recipe.too_small)


def _least_sizes(recipe: Recipe) -> str:
    limits = [
        " and ".join(
            f"{most:g} {side}" for most, side in zip(sizes, ("outputs", "inputs"), strict=True) if math.isfinite(most)
        )
        for sizes in recipe.too_small
    ]
    return f"too small to gain: no more than {', or '.join(limits)} (torchao's measurements on H100s)"


def _left_alone(reasons: Iterable[list[tuple[str, nn.Linear, str | None]]]) -> list[Choice]:
    """Return one choice per reason; layers of one size whose names differ only in numbers are grouped."""
    by_reason: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, layer, reason in (one for of_model in reasons for one in of_model):
        if reason is not None:
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name), f"({layer.in_features} to {layer.out_features})"
            by_reason.setdefault(reason, {}).setdefault(alike, []).append(name)
    return [
        Choice(what="not in fp8", value=", ".join(_group_text(*group) for group in groups.items()), reason=reason)
        for reason, groups in by_reason.items()
    ]


def _group_text(alike: tuple[str, str], names: list[str]) -> str:
    pattern, sizes = alike
    return f"{names[0]} {sizes}" if len(names) == 1 else f"{len(names)} x {pattern} {sizes}"


def _config(policy: Policy) -> Any:
    """Return torchao's settings for the policy's recipe."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise UnsupportedFormatError(
            f"policy {policy!s} computes linear layers in FP8 with torchao, which cannot be imported ({error})",
            hint="pip install 'torchao>=0.17'; or set arithmetic=emulated for FP8's numerics without its speed, or use policy bf16",
        ) from None
    return Float8LinearConfig.from_recipe_name(policy.fp8_recipe)


def _convert_layer(layer: nn.Linear, config: Any, policy: Policy) -> None:
    """Change ``layer`` to torchao's class and settings, with a forward that uses them only in the session's region."""
    from torchao.float8 import convert_to_float8_training

    converted = _computes_in_fp8(layer)
    twin = convert_to_float8_training(layer, config=config)
    layer.__class__ = type(twin)
    vars(layer).update({name: value for name, value in vars(twin).items() if name not in _OF_ANY_MODULE})
    if not converted:
        conversion.wrap(layer, _in_fp8, layer, policy.storage.dtype)


_OF_ANY_MODULE = {*vars(nn.Module()), "forward"}


def _computes_in_fp8(layer: nn.Module) -> bool:
    forward = vars(layer).get("forward")
    while isinstance(forward, functools.partial):  # a wrapper that casts the inputs may be outside
        if forward.func is _in_fp8:
            return True
        forward = forward.args[0] if forward.args else None
    return False


def _in_fp8(call: Any, layer: nn.Linear, low: torch.dtype, input: Tensor) -> Tensor:
    kind = input.device.type
    lowers = torch.is_autocast_enabled(kind) or layer.weight.dtype is low  # a cast model has no region
    if not lowers or input.dtype is FP64.dtype or input.numel() == 0:
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
