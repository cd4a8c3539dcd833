"""The arguments of a script's backward passes: outputs, inputs and gradients, each one tensor or several in any form that torch accepts.

And the leaves behind the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mezzo.engine.gradients import ACCUMULATES


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


def leaves_of(outputs: Iterable[Tensor], *, max_nodes: float = math.inf) -> list[Tensor]:
    """Return the leaves that a backward pass from ``outputs`` reaches; none if its graph has more than ``max_nodes`` nodes."""
    listed_outputs = list(outputs)
    leaves = [t for t in listed_outputs if t.grad_fn is None and t.requires_grad]
    waiting = [t.grad_fn for t in listed_outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if type(node) is ACCUMULATES:
            leaves.append(node.variable)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
        if len(seen) > max_nodes:
            return []
    return leaves
