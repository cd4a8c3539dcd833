"""Apex's op lists, as changes of Mezzo's portable ones.

The portable lists contain nearly all of Apex's: products run in FP16; exponentials, norms, sums and losses in FP32. A
policy moves operations that Apex lists elsewhere, and functions that ``oplists`` lacks (dunder methods, comparisons,
``cpu``) are named here. Apex did not cast what it did not know: ``einsum``, attention and whole recurrent layers run in
FP16 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mezzo import oplists
from mezzo.compat.apex.amp.function_mode import find_function, python_rules
from mezzo.engine.casts.autocast_kernels import CastRule
from mezzo.policy import Policy

POLICY = Policy.parse("fp16:fp32=gelu+var+grid_sample:widest=add+mul+div")

_FP32 = "F.softmin F.local_response_norm F.normalize F.multilabel_soft_margin_loss Tensor.__ipow__ Tensor.cpu"
"""Functions beyond the policy that run in FP32: ``cpu`` because tensors go there to be printed, saved or averaged."""

_ARITHMETIC = "add sub mul div truediv"
_WIDEST = " ".join(
    [
        *(f"Tensor.__{kind}{name}__" for name in _ARITHMETIC.split() for kind in ("", "r", "i")),
        *(f"Tensor.__{name}__" for name in ["eq", "ge", "gt", "le", "lt", "ne"]),
        *(f"{place}.{name}" for name in ["eq", "equal", "ge", "gt", "le", "lt", "ne"] for place in ("torch", "Tensor")),
    ]
)
"""Functions beyond the policy that run in the widest format of their operands; ``cat`` and ``stack`` do so in torch itself now."""

FP32_IN_PLACE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "cumprod",
    "cumsum",
    "renorm",
]
"""Operations of the FP32 list whose in-place form cannot widen an FP16 tensor: refused."""

FIRST_IN_PLACE = [
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "addbmm",
    "addcdiv",
    "addcmul",
    "atan2",
    "add",
    "sub",
    "div",
    "mul",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
]
"""Operations whose in-place form takes the format of the tensor that they change."""

BANNED = {
    "F.binary_cross_entropy": (
        "amp does not accept an FP16 input to torch.nn.functional.binary_cross_entropy or torch.nn.BCELoss: near 0 and 1 the "
        "logarithms of FP16 probabilities are infinite. Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss and "
        "leave out the sigmoid, or call amp.register_float_function(torch, 'sigmoid') before amp.initialize."
    )
}


def rules(*, emulate: bool) -> dict[Callable[..., Any], CastRule]:
    """Return the rule of every torch function in Apex's lists."""
    found = python_rules(POLICY, emulate=emulate)
    beyond: tuple[tuple[oplists.Precision, str], ...] = (("fp32", _FP32), ("widest", _WIDEST))
    for precision, names in beyond:
        found.update(dict.fromkeys(_functions(names.split()), CastRule(precision)))
    return found


def takes_first() -> set[Callable[..., Any]]:
    """Return the in-place methods that take the format of the tensor that they change."""
    return set(_functions(f"Tensor.{name}_" for name in FIRST_IN_PLACE))


def refused() -> dict[Callable[..., Any], tuple[str, bool]]:
    """Return the functions that refuse FP16, each with the message and whether only its first operand counts."""
    found: dict[Callable[..., Any], tuple[str, bool]] = {}
    for name in FP32_IN_PLACE:
        for place in ("torch", "Tensor"):
            text = (
                f"Cannot call the in-place function {name}_ on FP16 tensors: its result is FP32 and does not fit into its "
                f"operand. Call {name} without the underscore, or cast the tensor to FP32 first."
            )
            found.update(dict.fromkeys(_functions([f"{place}.{name}_"]), (text, place == "Tensor")))
    for name, text in BANNED.items():
        found.update(dict.fromkeys(_functions([name]), (text, False)))
    return found


def _functions(names: Iterable[str]) -> list[Callable[..., Any]]:
    return [function for function in map(find_function, names) if function is not None]
