"""Keep FP32 products in the policy's precision: under ``fp32`` and ``tf32`` a script's own TF32 switches have no effect and are recorded.

Most GPU scripts turn TF32 on in their first lines. Under ``fp32`` that would make the baseline of a comparison TF32. All of torch's
switches end in a few functions of ``torch._C``, which are replaced. Reading a switch returns the real state: the policy's precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mezzo.engine.matrix_units.native_units import fp32_products_as_they_were, set_fp32_products
from mezzo.launch.patches import Patches
from mezzo.policy import Policy

NoteLeftAlone = Callable[[str, str, str], None]


def keep_fp32_products(policy: Policy, patches: Patches, note_left_alone: NoteLeftAlone) -> None:
    """Set the switches as ``policy`` (one that lowers nothing) requires, until ``patches`` are undone.

    Args:
        policy: ``fp32`` or ``tf32``.
        patches: restores torch's functions.
        note_left_alone: records an overridden switch of the script: what, its value, the reason.
    """
    switches = fp32_products_as_they_were()
    switches.__enter__()
    patches.on_undo(lambda: switches.__exit__(None, None, None))
    set_fp32_products("tf32" if policy.compute == "tf32" else "ieee")
    override = functools.partial(_override, policy, note_left_alone)
    for name, describe in _SETTERS.items():
        original = getattr(torch._C, name)
        patches.replace(torch._C, name, functools.update_wrapper(functools.partial(override, describe), original))
    # This switch alone stores its setter as a value.
    cudnn_switch = vars(type(torch.backends.cudnn))["allow_tf32"]
    patches.replace(cudnn_switch, "setter", functools.partial(override, _SETTERS["_set_cudnn_allow_tf32"]))


def _override(
    policy: Policy, note_left_alone: NoteLeftAlone, describe: Callable[..., tuple[str, bool | None]], *values: Any
) -> None:
    """Ignore a call of one of torch's setters; record it if it asks for a precision other than the policy's."""
    switch, asks_for_tf32 = describe(*values)
    if asks_for_tf32 not in (None, policy.compute == "tf32"):
        requested = "reduced precision" if asks_for_tf32 else "FP32"
        note_left_alone("fp32 products", switch, f"the script asks for {requested}, and policy {policy!s} overrides it")


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
"""By setter, a description of a call: the switch as a script writes it, and whether less than FP32 is allowed; None for neither."""
