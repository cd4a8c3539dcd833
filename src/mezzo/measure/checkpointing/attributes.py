"""State that modules keep in plain attributes, besides parameters and buffers: find it, compare it and restore it.

A forward pass that changes such state cannot run twice for one step: a counter would count twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_TORCH_ATTRIBUTES = frozenset([*vars(nn.Module()), "forward", "_compiled_call_impl"])
"""Attributes that torch and checkpointing itself add to every module."""
_SIMPLE = (int, float, complex, str, bytes, tuple, frozenset)
_CONTAINERS = (list, dict, set)


class Attributes:
    """The plain attributes of all modules of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them: tensors and generators with their content; lists, dicts and sets shallowly."""
        self._model = model
        self._before = {
            name: {key: _SavedValue(value) for key, value in _plain_attributes(module).items()}
            for name, module in model.named_modules()
        }

    def changed(self) -> list[tuple[str, str]]:
        """Return the attributes that differ from their copies, each with its module's name."""
        found = []
        for name, module in self._model.named_modules():
            before, now = self._before.get(name, {}), _plain_attributes(module)
            for key in dict.fromkeys([*before, *now]):
                same = key in before and key in now and before[key].equals(now[key])
                if not same and not _is_reparametrised(module, key):
                    found.append((name, key))
        return found

    def restore(self, names: Iterable[tuple[str, str]]) -> None:
        """Restore the values of these attributes; delete those that did not exist."""
        for name, key in names:
            module = self._model.get_submodule(name)
            before = self._before.get(name, {}).get(key)
            if before is None:
                vars(module).pop(key, None)
            else:
                vars(module)[key] = before.restore()


class _SavedValue:
    """The value of an attribute, and a copy to restore it from."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._copy: Any = None
        if isinstance(value, Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, torch.Generator):
            self._copy = value.get_state()
        elif isinstance(value, _CONTAINERS):
            self._copy = copy.copy(value)

    def equals(self, now: Any) -> bool:
        """Return whether the attribute's value ``now`` is what it was."""
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
        return not isinstance(now, _CONTAINERS) or _same_items(now, self._copy)

    def restore(self) -> Any:
        """Return the value, restored in place."""
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


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _TORCH_ATTRIBUTES}


def _same_items(now: Any, before: Any) -> bool:
    one, other = list(now), list(before)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two simple values are equal; tuples may contain values whose comparison is no bool."""
    try:
        return bool(one == other)
    except Exception:
        return False


def _same_numbers(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    fake = isinstance(now, FakeTensor) or isinstance(before, FakeTensor)
    return fake or torch.equal(now.nan_to_num(), before.nan_to_num())


def _is_reparametrised(module: nn.Module, key: str) -> bool:
    """Return whether a hook computes the attribute from parameters in every pass, such as that of ``weight_norm``."""
    return f"{key}_orig" in module._parameters or f"{key}_g" in module._parameters
