"""Keep FP32 products in the policy's precision: under ``fp32`` and ``tf32`` a script's own TF32 switches do nothing, and are recorded.

Most GPU scripts turn TF32 on at their top. Under ``fp32`` that would make the baseline of a comparison TF32. All of torch's
switches end in a few functions of ``torch._C``; these are replaced. Reading a switch tells the truth: the policy's precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mezzo.engine.fp32products import fp32_products_as_they_were, set_fp32_products
from mezzo.launch.patches import Patches
from mezzo.policy import Policy

Leave = Callable[[str, str, str], None]
_OWN = "fp32 products"


def keep_fp32_products(policy: Policy, patches: Patches, leave: Leave) -> None:
    """Set the switches as ``policy`` (one that lowers nothing) asks, until ``patches`` are undone.

    Args:
        policy: ``fp32`` or ``tf32``.
        patches: what undoes it.
        leave: records a switch of the script's that was overridden: what, its value, the reason.
    """
    switches = fp32_products_as_they_were()
    switches.__enter__()
    patches.on_undo(lambda: switches.__exit__(None, None, None))
    set_fp32_products("tf32" if policy.compute == "tf32" else "ieee")
    overridden = _Overridden(policy, leave)
    for name, called in _SETTERS.items():
        stand_in = functools.partial(overridden, called)
        original = getattr(torch._C, name)
        patches.replace(torch._C, name, functools.update_wrapper(stand_in, original))
    # The one switch that keeps its setter as a value.
    cudnn_switch = vars(type(torch.backends.cudnn))["allow_tf32"]
    patches.replace(cudnn_switch, "setter", functools.partial(overridden, _SETTERS["_set_cudnn_allow_tf32"]))


class _Overridden:
    """Replacements for torch's setters."""

    def __init__(self, policy: Policy, leave: Leave) -> None:
        self._policy, self._leave = policy, leave
        self._tf32 = policy.compute == "tf32"

    def __call__(self, called: Callable[..., tuple[str, bool | None]], *values: Any) -> None:
        switch, asks_for_tf32 = called(*values)
        if asks_for_tf32 not in (None, self._tf32):
            asked = "reduced precision" if asks_for_tf32 else "FP32"
            self._leave(_OWN, switch, f"the script asks for {asked}, and policy {self._policy!s} overrides it")


def _by_precision(precision: str) -> tuple[str, bool]:
    return f"torch.set_float32_matmul_precision({precision!r})", precision != "highest"


def _allowed(owner: str, allow: bool) -> tuple[str, bool]:
    return f"{owner}.allow_tf32 = {allow}", bool(allow)


def _by_part(backend: str, part: str, precision: str) -> tuple[str, bool | None]:
    owner = _OWNERS.get((backend, part), f"torch.backends.{backend}.{part}")
    return f"{owner}.fp32_precision = {precision!r}", None if precision == "none" else precision != "ieee"


_OWNERS = {
    ("generic", "all"): "torch.backends",
    ("cuda", "all"): "torch.backends.cudnn",
    ("cuda", "matmul"): "torch.backends.cuda.matmul",
    ("cuda", "conv"): "torch.backends.cudnn.conv",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn",
}
_SETTERS: dict[str, Callable[..., tuple[str, bool | None]]] = {
    "_set_float32_matmul_precision": _by_precision,
    "_set_cublas_allow_tf32": functools.partial(_allowed, "torch.backends.cuda.matmul"),
    "_set_cudnn_allow_tf32": functools.partial(_allowed, "torch.backends.cudnn"),
    "_set_fp32_precision_setter": _by_part,
}
"""What a call of a setter asks for: the switch as a script writes it, and whether for less than FP32; None for neither."""
