"""Give results whose size depends on numbers their largest size, while a script is traced without numbers.

A condition is assumed to select all rows, and values are assumed to be all different. So memory is an upper bound and throughput
a lower bound; the record says so, and names the lines. Counts of whole numbers have their ``minlength``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException

aten: Any = torch.ops.aten


@contextmanager
def largest_sizes(on_use: Callable[[], None]) -> Iterator[None]:
    """Let such operations return results of the largest size for the block; ``on_use`` is called for each."""

    def noted(sized: Callable[..., Any]) -> Callable[..., Any]:
        def implementation(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            on_use()
            with mode:
                return sized(*args, **kwargs)

        return implementation

    known: dict[Any, Callable[..., Any]] = {
        aten.nonzero.default: _nonzero,
        aten.masked_select.default: _masked_select,
        aten._unique2.default: _unique,
        aten.unique_consecutive.default: _unique_consecutive,
        aten.bincount.default: _bincount,
    }
    with patch.dict(fake_impls.op_implementations_dict, {op: noted(sized) for op, sized in known.items()}):
        yield


def _nonzero(condition: Tensor) -> Tensor:
    return condition.new_empty((condition.numel(), condition.dim()), dtype=torch.int64)


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_empty(torch.broadcast_shapes(values.shape, mask.shape).numel())


def _unique(
    values: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return _all_different(values, return_inverse=return_inverse, return_counts=return_counts)


def _unique_consecutive(
    values: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is None:
        return _all_different(values, return_inverse=return_inverse, return_counts=return_counts)
    numbers = values.new_empty(values.shape[dim], dtype=torch.int64)
    return torch.empty_like(values), numbers, torch.empty_like(numbers)


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength == 0:
        raise DynamicOutputShapeException(aten.bincount.default)
    return (values if weights is None else weights).new_empty(minlength)


def _all_different(values: Tensor, *, return_inverse: bool, return_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    inverse = values.new_empty(values.shape if return_inverse else 0, dtype=torch.int64)
    counts = values.new_empty(values.numel() if return_counts else 0, dtype=torch.int64)
    return values.new_empty(values.numel()), inverse, counts
