"""Sizes of results that depend on numbers, in a trace without numbers: the largest possible, or a refusal that says what to pass.

A condition is assumed to select all rows, and values are assumed to be all different. So memory is an upper bound and throughput a lower
bound; the record says so, and names the lines. Where nothing bounds a size (``repeat_interleave`` by a tensor, ``bincount`` without a
``minlength``), the operation is refused, except on numbers that the script wrote itself: those are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, fake_impls, fake_tensor

from mezzo.records import Note

aten: Any = torch.ops.aten
_KNOWN_NUMBERS = 4096
"""The largest tensor whose numbers stay known where a script writes them, as in ``torch.tensor([2, 3, 3])``; a batch of lengths is one."""
_WHAT_TO_PASS = {
    "repeat_interleave": "pass output_size=, the number of rows of the result, to repeat_interleave",
    "bincount": "pass minlength=, the number of bins, to bincount",
    "one_hot": "pass num_classes= to one_hot",
    "lobpcg": "pass niter=, the number of iterations, to lobpcg, or call torch.linalg.eigh",
    "a nested tensor": "pad the batch (nn.utils.rnn.pad_sequence) in a copy of the script",
}


class UnknownSize(RuntimeError):
    """An operation whose work depends on numbers and has no bound; the message says what to do."""


def unknown_size(name: str) -> UnknownSize:
    """Return the refusal of an operation by its name in ``_WHAT_TO_PASS``."""
    return UnknownSize(f"the size of {name} depends on numbers: {_WHAT_TO_PASS[name]}")


def sizes_assumed(lines: Sequence[str]) -> Note:
    """Return a record's note on sizes that depend on numbers, at ``lines``; an empty one is in a library."""
    where = ", ".join(filter(None, lines)) or "in a library"
    why = "conditions are assumed to select everything and values to differ; otherwise it takes less memory and time"
    return Note(what="sizes that numbers decide", value="the largest possible", reason=f"{why}, at {where}")


def known_numbers(tensor: Any) -> Tensor | None:
    """Return the numbers of a fake tensor that the script wrote itself; None for any other."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


@contextmanager
def largest_sizes(on_use: Callable[[], None]) -> Iterator[None]:
    """Let such operations return results of the largest size for the block; ``on_use`` is called for each."""

    def noted(sized: Callable[..., Any]) -> Callable[..., Any]:
        def implementation(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            on_use()
            return within(sized)(mode, func, *args, **kwargs)

        return implementation

    def within(sized: Callable[..., Any]) -> Callable[..., Any]:
        def implementation(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return sized(*args, **kwargs)

        return implementation

    bounded: dict[Any, Callable[..., Any]] = {
        aten.nonzero.default: _nonzero,
        aten.masked_select.default: _masked_select,
        aten._unique2.default: _unique,
        aten.unique_consecutive.default: _unique_consecutive,
        aten.unique_dim.default: _unique_dim,
        aten.bincount.default: _bincount,
        aten._ctc_loss.Tensor: _ctc_loss,
    }
    exact: dict[Any, Callable[..., Any]] = {
        aten.repeat_interleave.Tensor: _repeat_interleave,
        aten.linalg_lstsq.default: _lstsq,
        aten._nested_tensor_from_tensor_list.default: _refused("a nested tensor"),
    }
    with ExitStack() as stack:
        operators = {op: noted(sized) for op, sized in bounded.items()}
        operators |= {op: within(sized) for op, sized in exact.items()}
        stack.enter_context(patch.dict(fake_impls.op_implementations_dict, operators))
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _KNOWN_NUMBERS))
        for home in (torch, Tensor):
            for name, replaced in (("tensor_split", _tensor_split), ("split", _split)):
                stack.enter_context(patch.object(home, name, replaced(getattr(home, name), on_use)))
        stack.enter_context(patch.object(torch, "lobpcg", _lobpcg(torch.lobpcg)))
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
    return _unique_dim(values, dim)


def _unique_dim(values: Tensor, dim: int, *_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    numbers = values.new_empty(values.shape[dim], dtype=torch.int64)
    return torch.empty_like(values), numbers, torch.empty_like(numbers)


def _all_different(values: Tensor, *, return_inverse: bool, return_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    inverse = values.new_empty(values.shape if return_inverse else 0, dtype=torch.int64)
    counts = values.new_empty(values.numel() if return_counts else 0, dtype=torch.int64)
    return values.new_empty(values.numel()), inverse, counts


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if known_numbers(values) is not None:
        minlength = max(minlength, *(1 + number for number in values.tolist()))
    elif minlength == 0:
        raise unknown_size("bincount")
    if weights is None:
        return values.new_empty(minlength, dtype=torch.int64)
    return weights.new_empty(minlength, dtype=weights.dtype if weights.dtype is torch.float32 else torch.float64)


def _repeat_interleave(repeats: Tensor, output_size: int | None = None) -> Tensor:
    if output_size is None:
        if known_numbers(repeats) is None:
            raise unknown_size("repeat_interleave")
        output_size = sum(repeats.tolist())
    return repeats.new_empty(output_size, dtype=torch.int64)


def _lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the solution, residuals, rank and singular values in the sizes of ``gels``, CUDA's only driver."""
    rows, columns = a.shape[-2:]
    right = b.unsqueeze(-1) if b.dim() == a.dim() - 1 else b
    batch = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    solution = a.new_empty((*batch, columns, right.shape[-1]))
    residuals = a.new_empty((*batch, right.shape[-1]) if rows > columns else 0)
    rank, singular_values = a.new_empty(0, dtype=torch.int64), a.new_empty(0)
    return solution.squeeze(-1) if right is not b else solution, residuals, rank, singular_values


def _ctc_loss(
    scores: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample and its table, for targets as long as the padded ones, or as all that are joined."""
    longest = targets.shape[-1] if targets.dim() else 1
    table = scores.new_empty((scores.shape[1], scores.shape[0], 2 * longest + 1))
    return scores.new_empty(scores.shape[1]), table


def _refused(name: str) -> Callable[..., Any]:
    def implementation(*args: Any, **kwargs: Any) -> Any:
        raise unknown_size(name)

    return implementation


def _lobpcg(original: Callable[..., Any]) -> Callable[..., Any]:
    def lobpcg(A: Tensor, *args: Any, **settings: Any) -> Any:
        if isinstance(A, FakeTensor) and settings.get("niter") in (None, -1):
            raise unknown_size("lobpcg")
        return original(A, *args, **settings)

    return lobpcg


def _tensor_split(original: Callable[..., Any], on_use: Callable[[], None]) -> Callable[..., Any]:
    """Return ``tensor_split``, which divides evenly where a tensor without numbers says at which rows."""

    def tensor_split(tensor: Tensor, *args: Any, **named: Any) -> Any:
        given = [*args, *named.values()]
        at = next((one for one in given if isinstance(one, FakeTensor)), None)
        if at is None:
            return original(tensor, *args, **named)
        places: Any = at.tolist() if known_numbers(at) is not None else at.shape[0] + 1 if at.dim() else 1
        if known_numbers(at) is None:
            on_use()
        dim = named.get("dim", next((one for one in given if type(one) is int), 0))
        return original(tensor, places, dim)

    return tensor_split


def _split(original: Callable[..., Any], on_use: Callable[[], None]) -> Callable[..., Any]:
    """Return ``split``, which divides evenly where the sizes were read from a tensor without numbers, so that all are placeholders."""

    def split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
        sizes = split_size_or_sections
        if isinstance(sizes, (list, tuple)) and sizes and isinstance(tensor, FakeTensor):
            whole = tensor.shape[dim]
            if not any(sizes) and whole and all(type(one) is int for one in sizes):
                on_use()
                sizes = [whole * (n + 1) // len(sizes) - whole * n // len(sizes) for n in range(len(sizes))]
        return original(tensor, sizes, dim)

    return split
