"""Register Python kernels over torch's own at autocast's dispatch keys.

A kernel stays for the life of the process. It consults the open cast table first. If no table is open, or the table has no rule, it
does what torch would have done: call torch's kernel or, if torch has none, continue below autocast. Nothing in this file
casts, so casts by torch's own kernels are attributed to the script's line, as without our kernels.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

Operator: TypeAlias = Any
"""A ``torch._ops.OpOverload``."""


class CastRules(Protocol):
    """A cast table, as kernels use it."""

    device_type: str
    keeps_kernels: bool

    def rule(self, op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the rule for a call of ``op`` in the current state; None if it has none."""

    def dispatch(self, op: Operator, rule: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``op`` under ``rule``; autocast is off."""


_LOCK = threading.Lock()
_REGISTERED: dict[str, set[Operator]] = {}
_LIBRARIES: list[torch.library.Library] = []  # a library's kernels are removed when it is garbage-collected


def register(
    device_type: str, ops: Iterable[Operator], open_table: Callable[[], CastRules | None], *, include_native: bool
) -> None:
    """Register kernels for ``ops`` and, with ``include_native``, for every operation that torch casts on the device.

    ``open_table`` returns the cast table of the open region.
    """
    key = f"Autocast{device_type.upper()}"
    with _LOCK:
        registered = _REGISTERED.setdefault(device_type, set())
        native_ops = {find_op(name) for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
        needed = ({*ops, *native_ops} if include_native else {*ops}) - registered - {None}
        if not needed:
            return
        if not _LIBRARIES:
            trace_as_eager()
        library = torch.library.Library("aten", "IMPL")  # kept below
        _LIBRARIES.append(library)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for op in needed:
                native = torch.library.get_kernel(op, key) if op in native_ops else None
                library.impl(op, _kernel(op, key, device_type, open_table, native), key, with_keyset=True)
        registered |= needed


def find_op(name: str) -> Operator:
    """Return the operation named ``name`` in the op lists; None if this torch lacks it."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None)


_ATEN: Any = torch.ops.aten
_ARITHMETIC = frozenset(
    (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.div.Tensor_mode, _ATEN.rsub.Tensor)
)
"""Operations that accept a number for a tensor: C++ wraps the 2 of ``x * 2``, and a Python kernel receives the plain number."""


def call_op(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``op`` with the arguments that a kernel received."""
    if len(args) > 1 and not isinstance(args[1], Tensor) and op in _ARITHMETIC:
        return op.overloadpacket(*args, **kwargs)
    return op(*args, **kwargs)


def _kernel(
    op: Operator, key: str, device_type: str, open_table: Callable[[], CastRules | None], native: Any
) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    exclude = torch._C._ExcludeDispatchKeyGuard
    takes_numbers = op in _ARITHMETIC

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        table = open_table()
        if table is not None and table.device_type != device_type:
            table = None
        rule = None if table is None else table.rule(op, args, kwargs)
        if table is not None and rule is not None:
            with exclude(autocast):
                return table.dispatch(op, rule, args, kwargs)
        if native is not None and (table is None or table.keeps_kernels):
            return native.call_boxed(keyset, *args, **kwargs)
        if takes_numbers:
            with exclude(autocast):
                return call_op(op, args, kwargs)
        # Autocast stays on for the parts of a composite operation.
        return op.redispatch(keyset & below, *args, **kwargs)

    return call


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the memory: each transform, such as ``grad`` or ``vmap``, wraps it once."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


# They are set for the whole process, once, by the first cast table that needs them:
#
# * Backward passes are traced with autocast off, as they run eagerly.
# * AOTAutograd keeps no traces on disk: their key contains autocast's dtype, but not what our kernels do with it. Inductor's
#   own cache keeps graphs with the casts in them and stays on.
# * Inductor keeps every rounding where arithmetic is emulated. Between fused operations it would drop
#   FP32 -> FP16 -> FP32 as pointless, and emulated products would multiply values that were never rounded: GPT-2's
#   gradients then differed from FP32's by a tenth of what FP16 causes, and no overflow was ever seen.
#
# Limit: native arithmetic is left to Inductor, so a chain of fused 16-bit operations is rounded once, at its end.
def trace_as_eager() -> None:
    """Trace backward passes with autocast off, and keep no traces across processes."""
    import torch._functorch.config as config

    config.backward_pass_autocast = "off"
    config.enable_autograd_cache = False


def keep_roundings() -> None:
    """Keep the roundings of an emulation in what Inductor compiles.

    Importing Inductor takes over a second, so if the script has not imported it, the setting is left in the environment
    for Inductor to read. Once imported, it no longer reads the environment.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        os.environ["TORCHINDUCTOR_EMULATE_PRECISION_CASTS"] = "1"
    else:
        config.emulate_precision_casts = True  # type: ignore[attr-defined]
