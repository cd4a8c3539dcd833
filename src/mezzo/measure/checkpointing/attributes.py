"""State that modules keep in plain attributes, beside parameters and buffers: found, compared and put back.

A forward pass that changes such state cannot run twice for one step: a counter would count twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = frozenset([*vars(nn.Module()), "forward", "_compiled_call_impl"])
"""Attributes that torch and checkpointing itself keep in every module."""
_SIMPLE = (int, float, complex, str, bytes, tuple, frozenset)
_HOLDS = (list, dict, set)


class Attributes:
    """The plain attributes of all modules of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them: tensors, and the lists, dicts and sets themselves, not what is in these."""
        self._model = model
        self._before = {name: dict(_kept(module)) for name, module in model.named_modules()}

    def changed(self) -> dict[tuple[str, str], None]:
        """Return the modules' names and attributes that are no longer as they were."""
        found: dict[tuple[str, str], None] = {}
        for name, module in self._model.named_modules():
            before = self._before.get(name, {})
            now = {key: value for key, value in vars(module).items() if key not in _TORCHS}
            for key in dict.fromkeys([*before, *now]):
                if key in before and key in now and before[key].holds(now[key]):
                    continue
                if not _is_reparametrised(module, key):
                    found[name, key] = None
        return found

    def put_back(self, names: dict[tuple[str, str], None]) -> None:
        """Give these attributes the values that they had; those that did not exist are deleted."""
        for name, key in names:
            module = self._model.get_submodule(name)
            before = self._before.get(name, {}).get(key)
            if before is None:
                vars(module).pop(key, None)
            else:
                vars(module)[key] = before.put_back()


class _Kept:
    """The value of an attribute, and what is needed to bring it back."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._copy: Any = None
        if isinstance(value, Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, torch.Generator):
            self._copy = value.get_state()
        elif isinstance(value, _HOLDS):
            self._copy = copy.copy(value)

    def holds(self, now: Any) -> bool:
        """Return whether the attribute ``now`` is what it was."""
        if isinstance(self.value, _SIMPLE):
            return now is self.value or (type(now) is type(self.value) and _equal(now, self.value))
        if now is not self.value:
            return False
        if isinstance(now, Tensor):
            return _same_numbers(now, self._copy)
        if isinstance(now, torch.Generator):
            return torch.equal(now.get_state(), self._copy)
        if isinstance(now, dict):
            return [*map(id, now)] == [*map(id, self._copy)] and _same_items(now.values(), self._copy.values())
        return _same_items(now, self._copy) if isinstance(now, _HOLDS) else True

    def put_back(self) -> Any:
        """Return the value as it was."""
        if isinstance(self.value, Tensor):
            with torch.no_grad():
                self.value.detach().copy_(self._copy)
        elif isinstance(self.value, torch.Generator):
            self.value.set_state(self._copy)
        elif isinstance(self.value, list):
            self.value[:] = self._copy
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self._copy)
        return self.value


def _kept(module: nn.Module) -> Iterator[tuple[str, _Kept]]:
    for key, value in vars(module).items():
        if key not in _TORCHS:
            yield key, _Kept(value)


def _same_items(now: Any, before: Any) -> bool:
    one, other = list(now), list(before)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two simple values are equal; tuples may hold what compares to no bool."""
    try:
        return bool(one == other)
    except Exception:
        return False


def _same_numbers(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return torch._subclasses.FakeTensor in (type(now), type(before)) or torch.equal(
        now.nan_to_num(), before.nan_to_num()
    )


def _is_reparametrised(module: nn.Module, key: str) -> bool:
    """Return whether a hook makes the attribute anew in every pass from parameters, as ``weight_norm`` does."""
    return f"{key}_orig" in module._parameters or f"{key}_g" in module._parameters
