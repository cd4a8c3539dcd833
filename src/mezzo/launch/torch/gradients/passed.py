"""The arguments of a script's backward passes: outputs, inputs and gradients, each one tensor or several in any form that torch accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def reusable(values: Any) -> Any:
    """Return ``values``, as a list if they are an iterator or a view, such as ``model.parameters()`` and ``weights.values()``."""
    to_copy = isinstance(values, Iterable) and not isinstance(values, (Tensor, list, tuple, Mapping))
    return list(values) if to_copy else values


def listed(values: Any) -> list[Any]:
    """Return a result of ``reusable`` as a list: of a mapping, its values."""
    if isinstance(values, Mapping):
        return list(values.values())
    return list(values) if isinstance(values, (list, tuple)) else [values]


def given_gradients(outputs: Sequence[Tensor], given: Any) -> list[Any]:
    """Return the gradient that was passed for each output, None for outputs without one."""
    return [None] * len(outputs) if given is None else listed(given)


def weighted(loss: Tensor, gradient: Any) -> Tensor:
    """Return a loss times the gradient that its backward pass starts from, such as the -1 of a WGAN's critic."""
    if not isinstance(gradient, Tensor) or gradient.numel() != 1:
        return loss
    return loss.detach() * gradient.detach()
