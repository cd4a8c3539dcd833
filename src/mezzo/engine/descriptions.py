"""Optimizers and tensors in words, for ``repr``: a few lines for a person in a notebook or a debugger.

Only values on the host are shown. A number on a GPU stays there, and the text says how to read it: a debugger must not make a program
wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mezzo.formats import FORMATS

_NO_EFFECT = ("foreach", "capturable", "differentiable", "fused")
"""Settings of torch's optimizers that have no effect in ours."""
_SHOWN_GROUPS = 3


def host_value(tensor: Tensor) -> float | None:
    """Return the number in a tensor on the CPU; None if reading it would wait for a device, or if it has no data."""
    if tensor.device.type != "cpu":
        return None
    try:
        return float(tensor.item())
    except RuntimeError:  # a tensor without data, such as one of a traced model
        return None


def number_of(tensor: Tensor) -> str:
    """Return the number in a tensor as text, or the device that it stays on."""
    value = host_value(tensor)
    return f"on {tensor.device}" if value is None else f"{value:g}"


def tensors_text(tensors: Iterable[Tensor]) -> str:
    """Return the number of values and their formats: ``9,610 values in 4 tensors, fp32``."""
    found = list(tensors)
    names = {form.dtype: form.name for form in reversed(FORMATS.values())}  # FP32 before TF32, which shares its dtype
    kinds = dict.fromkeys(names.get(t.dtype, str(t.dtype).removeprefix("torch.")) for t in found)
    count = "1 tensor" if len(found) == 1 else f"{len(found)} tensors"
    return f"{sum(t.numel() for t in found):,} values in {count}" + "".join(f", {kind}" for kind in kinds)


def one_pass_text(optimizer: Optimizer) -> str:
    """Return an optimizer's parameters and settings: its first group's, then the differences of the others."""
    name = type(optimizer).__name__
    if not getattr(optimizer, "param_groups", None):  # a debugger shows it while its constructor runs
        return f"{name}()"
    # Not the keys of a group: schedulers add some of their own.
    keys = [key for key in optimizer.defaults if key not in _NO_EFFECT]
    first, *others = ({key: _setting(group[key]) for key in keys} for group in optimizer.param_groups)
    settings = {key: text for key, text in first.items() if text != "False"}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    lines = [f"{name}({_listed(settings)}): {tensors_text(parameters)}"]
    for number, group in enumerate(others[:_SHOWN_GROUPS], start=1):
        differing = {key: value for key, value in group.items() if value != first.get(key)}
        lines.append(f"  group {number}: {_listed(differing) or 'the same'}")
    if len(others) > _SHOWN_GROUPS:
        lines.append(f"  and {len(others) - _SHOWN_GROUPS} more groups")
    return "\n".join(lines)


def _setting(value: Any) -> str:
    return number_of(value) if isinstance(value, Tensor) else repr(value)


def _listed(settings: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def optimizer_text(optimizer: Optimizer) -> str:
    """Return the name and the learning rates of any optimizer."""
    known = "/".join(dict.fromkeys(_setting(group["lr"]) for group in optimizer.param_groups if "lr" in group))
    home = "" if type(optimizer).__module__.startswith("torch.") else f"{type(optimizer).__module__.split('.')[0]}."
    return f"{home}{type(optimizer).__name__}" + (f"(lr={known})" if known else "")
