"""Keep the values that tensors would have if their formats had no largest number, and 16-bit formats no smallest one.

A value that leaves a format's range becomes infinite or zero. Whether that matters shows later: softmax returns the same for -inf and for
-1e9, but ``x / norm`` differs between an infinite norm and 1e5. So wherever values are lost, their true values are kept as shadows. Every
operation that reads them runs a second time in FP32 on the true values, or in FP64 where those left FP32, and its results are rounded to
the format's precision. The two computations differ only in their range: values that agree again are dropped, and a difference that remains
in a gradient is the effect of the range. It alone decides whether a lost value matters (``measure_errors``). Gradients are compared tensor
by tensor, because a single lost gradient would not show in a norm over all of them. One that is only rounding noise (a bias before a norm)
is not judged.

Each end of the range has its own true values (``RangeEnd``). Those for the lower end have no upper limit either, because a division by a
small number is often undone by a multiplication. Only the elements that differ are kept, by their places in storages, so that views share
them. Cost: a second run of each operation that reads such elements, and 16 bytes per element.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mezzo.engine.casts.conversion import HALF
from mezzo.formats import BF16, FORMATS, FP16, FP32, FP64
from mezzo.observe.nonfinite.evidence import FaultSource, GradientErrors, WrongGradient
from mezzo.observe.replay import at_least, draws, dropout_in_fp32, outputs, recomputed
from mezzo.observe.settings import LOST_BELOW, ROUNDOFFS, SHARE_BELOW
from mezzo.observe.tensors import Storages, difference, has_floats, is_finite, largest, norm, storage

T = TypeVar("T")

_SAME = {BF16.dtype: 4 * BF16.eps}
_SAME_ELSEWHERE = 4 * FP16.eps
_LOSE_ABOVE, _LOSES_BELOW = (*HALF, FP32.dtype), FP16.dtype


class RangeEnd(enum.Enum):
    """An end of a format's range."""

    ABOVE = "above"
    BELOW = "below"

    def loses(self, dtype: torch.dtype) -> bool:
        """Return whether values of a format are tracked at this end; at the lower end only FP16, whose range is narrow enough."""
        return dtype in _LOSE_ABOVE if self is RangeEnd.ABOVE else dtype is _LOSES_BELOW

    def lost(self, narrow: Tensor, wide: Tensor) -> Tensor:
        """Return a mask of the elements in which ``narrow`` lost the value of ``wide``."""
        if self is RangeEnd.ABOVE:
            return wide.isfinite() & ~narrow.isfinite()
        return (narrow == 0) & (wide != 0) & wide.isfinite()


@dataclass
class _Piece(Generic[T]):
    """The elements of a part of a storage that differ from their true values."""

    start: int
    stop: int
    positions: Tensor
    """Their places in the storage, ascending."""
    actual: Tensor
    """The elements themselves: if they have changed since, a write that was not seen has made the true values obsolete."""
    true: Tensor
    """The true values, in FP32, or in FP64 where FP32 has none; booleans and integers as they are."""
    sources: tuple[T, ...]
    mark: int

    def between(self, start: int, stop: int) -> _Piece[T]:
        """Return the elements from ``start`` up to ``stop``."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if (start, stop) == (self.start, self.stop):
            return self
        ends = torch.tensor([start, max(start, stop)], device=self.positions.device)
        some = slice(*torch.searchsorted(self.positions, ends).tolist())
        return replace(
            self,
            start=start,
            stop=stop,
            positions=self.positions[some],
            actual=self.actual[some],
            true=self.true[some],
        )


class Shadows(Generic[T]):
    """True values for one end of the range, each with its sources.

    A tensor reads and writes only its own part of its storage: thousands of gradients may be views of one buffer.
    """

    def __init__(self, end: RangeEnd) -> None:
        self.end = end
        self._pieces: Storages[list[_Piece[T]]] = Storages()
        """Of each storage those parts that no later write has replaced; they do not overlap."""
        self._mark = 0

    def mark(self) -> None:
        """Mark everything kept so far as belonging to the step."""
        self._mark += 1

    def turn(self) -> None:
        """Begin another step: values left over from the previous step, such as running statistics, count as true in it."""
        self._pieces.change(lambda pieces: [piece for piece in pieces if piece.mark >= self._mark])

    def __bool__(self) -> bool:
        return len(self._pieces) > 0

    def read(self, tensor: Tensor) -> tuple[Tensor, tuple[T, ...]] | None:
        """Return the true values of ``tensor``, 16-bit ones in FP32, with their sources; None if its own values are true."""
        if self._pieces.get(tensor) is None or tensor.layout is not torch.strided:
            return None
        flat, start = _span(tensor)
        pieces = self._between(tensor, start, start + len(flat))
        if not pieces:
            return None
        wide = _wide(flat, *(piece.true for piece in pieces))
        for piece in pieces:
            places = piece.positions - start
            if not bool(_equal(flat[places], piece.actual).all()):
                self._replace(tensor, start, start + len(flat), [])
                return None
            wide[places] = piece.true
        true = wide.as_strided(tensor.shape, tensor.stride(), 0)
        if tensor.numel() < flat.numel() and bool(_equal(true, tensor.detach().to(true.dtype)).all()):
            return None  # the elements that differ lie outside this view
        return true, _sources(pieces)

    def write(self, tensor: Tensor, true: Tensor, sources: tuple[T, ...]) -> bool:
        """Keep the elements of ``true`` that differ from ``tensor``; return whether any do."""
        if tensor.layout is not torch.strided or storage(tensor) is None:
            return False
        flat, start = _span(tensor)
        if tensor.is_contiguous():
            whole = true.reshape(-1)
        else:
            pieces = self._between(tensor, start, start + len(flat))
            whole = _wide(flat, true, *(piece.true for piece in pieces))
            for piece in pieces:
                places = piece.positions - start
                kept = _equal(flat[places], piece.actual)
                whole[places[kept]] = piece.true[kept]
            sources = tuple(dict.fromkeys((*_sources(pieces), *sources)))
            whole.as_strided(tensor.shape, tensor.stride(), 0).copy_(true)
        found, stop = differs(flat, whole).nonzero().flatten(), start + len(flat)
        piece = _Piece(start, stop, found + start, flat[found], whole[found], sources, self._mark)
        self._replace(tensor, start, stop, [piece] if len(found) else [])
        return len(found) > 0

    def forget(self, tensor: Tensor) -> None:
        """Accept the values of ``tensor`` as true."""
        if self._pieces.get(tensor) is not None:
            self.write(tensor, _wide(tensor.detach()), ())

    def _between(self, tensor: Tensor, start: int, stop: int) -> list[_Piece[T]]:
        """Return what is kept for a part of the storage of ``tensor``."""
        found = [
            piece.between(start, stop)
            for piece in self._pieces.get(tensor) or ()
            if piece.start < stop and piece.stop > start
        ]
        return [piece for piece in found if len(piece.positions)]

    def _replace(self, tensor: Tensor, start: int, stop: int, new: list[_Piece[T]]) -> None:
        """Keep ``new`` for a part of the storage of ``tensor``, and what was kept outside it."""
        pieces = list(new)
        for piece in self._pieces.get(tensor) or ():
            if piece.stop <= start or piece.start >= stop:
                pieces.append(piece)
                continue
            outside = [piece.between(piece.start, start), piece.between(stop, piece.stop)]
            pieces += [part for part in outside if part.start < part.stop and len(part.positions)]
        if pieces:
            self._pieces.put(tensor, pieces)
        else:
            self._pieces.pop(tensor)


def _sources(pieces: Iterable[_Piece[T]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(source for piece in pieces for source in piece.sources))


def measure_errors(
    index: int, weights: Iterable[Tensor], shadows: Mapping[RangeEnd, Shadows[FaultSource]]
) -> GradientErrors:
    """Return the errors of the gradients of ``weights``; waits for the device."""
    unique = {id(p): p for p in weights}.values()
    return measure_gradients(index, [(p, p.grad.detach()) for p in unique if p.grad is not None], shadows)


def measure_gradients(
    index: int, gradients: Sequence[tuple[Tensor, Tensor]], shadows: Mapping[RangeEnd, Shadows[FaultSource]]
) -> GradientErrors:
    """Return the errors of ``gradients``, each with its parameter; waits for the device."""
    comparable = [(p, g) for p, g in gradients if g.layout is torch.strided and g.numel() and is_finite(g)]
    above, _, _ = _off(comparable, shadows[RangeEnd.ABOVE])
    below, zeros, true_norm = _off(comparable, shadows[RangeEnd.BELOW])
    size = sum(g.numel() for _, g in comparable)
    lost = [off for off in below if off.error > LOST_BELOW]
    enough = sum(off.parameter.numel() for off in lost) > SHARE_BELOW * size
    return GradientErrors(tuple(above), tuple(lost) if enough else (), len(comparable), zeros, true_norm, index)


def wrong_losses(losses: Iterable[Tensor], above: Shadows[FaultSource]) -> list[WrongGradient]:
    """Return the ``losses`` that values beyond the upper end of the range made wrong; waits for the device if there are any."""
    found: list[WrongGradient] = []
    for loss in losses:
        truth = above.read(loss) if above and loss.numel() == 1 and is_finite(loss) else None
        if truth is None:
            continue
        error, whole = difference(loss, truth[0]), norm(truth[0])
        if error > tolerance(truth[1]) * whole:
            found.append(WrongGradient(loss, error / whole if whole else math.inf, truth[1]))
    return found


def _off(
    gradients: list[tuple[Tensor, Tensor]], shadows: Shadows[FaultSource]
) -> tuple[list[WrongGradient], float, float]:
    """Return the gradients that differ from the true ones, the share of elements that became 0, and the norm of the true gradients."""
    if not shadows:
        return [], 0.0, 0.0
    found: list[tuple[WrongGradient, float]] = []
    densities, zeros, others, norms = [0.0], 0, 0, [0.0]
    for parameter, gradient in gradients:
        truth = shadows.read(gradient)
        true = gradient if truth is None else truth[0]
        whole = norm(true)
        norms.append(whole)
        densities.append(whole / math.sqrt(true.numel()))
        others += int((true != 0).sum())
        if truth is None:
            continue
        zeros += int(((gradient == 0) & (true != 0)).sum())
        error = difference(gradient, true)
        if whole > 0 and error > tolerance(truth[1]) * whole:
            found.append((WrongGradient(parameter, error / whole, truth[1]), error / math.sqrt(true.numel())))
    noise = FP16.eps * max(densities)
    kept = [off for off, density in found if density > noise or shadows.end is RangeEnd.BELOW]
    return kept, zeros / others if others else 0.0, math.hypot(*norms)


def tolerance(sources: Iterable[FaultSource]) -> float:
    """Return the largest relative error of a gradient that rounding alone explains."""
    # FP32 sums in another order than FP64: only what would be wrong in 16 bits as well is a fault.
    return max(
        (ROUNDOFFS * max(FORMATS[s.format].eps, FP16.eps) / 2 for s in sources if s.format in FORMATS), default=0.0
    )


def rounded(wide: Tensor, dtype: torch.dtype, end: RangeEnd) -> Tensor:
    """Return ``wide`` rounded to the precision of ``dtype``; a value that would be lost at ``end`` stays as it is.

    At the lower end, so does a value that would be lost at the upper one.
    """
    if not dtype.is_floating_point or dtype.itemsize >= wide.element_size():
        return wide
    narrow = wide.to(dtype).to(wide.dtype)
    for lost_end in (RangeEnd.ABOVE, end):
        narrow = torch.where(lost_end.lost(narrow, wide), wide, narrow) if lost_end.loses(dtype) else narrow
    return narrow


def differs(actual: Tensor, true: Tensor) -> Tensor:
    """Return a mask of the elements in which ``actual`` differs from ``true`` by more than a few units in the last place."""
    if not actual.is_floating_point():
        return actual != true
    found, limit = actual.to(true.dtype), _SAME.get(actual.dtype, _SAME_ELSEWHERE)
    near = (found - true).abs() <= limit * true.abs()
    return ~(_equal(found, true) | (near & true.isfinite()))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


def _span(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the part of its storage from the first to the last element of ``tensor``, in one dimension, and where it starts."""
    length = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), start, (length,), (1,)), start


def _wide(tensor: Tensor, *true: Tensor) -> Tensor:
    """Return a copy, in FP32 if the tensor has 16 bits or less, and in FP64 if any of the values it will hold is."""
    if not tensor.is_floating_point():
        return tensor.clone()
    dtype = FP64.dtype if any(t.dtype is FP64.dtype for t in true) else FP32.dtype
    return tensor.to(dtype) if tensor.element_size() < dtype.itemsize else tensor.clone()


_KEEP_MAGNITUDE = frozenset(
    {"clone", "copy_", "cat", "stack", "index", "index_select", "gather", "where", "masked_fill", "masked_fill_"}
    | {"constant_pad_nd", "repeat", "flip", "roll", "slice_backward", "select_backward", "relu", "relu_", "neg", "abs"}
    | {"threshold_backward", "clamp", "clamp_", "clamp_min", "clamp_max", "maximum", "minimum", "amax", "amin", "max"}
    | {"max_pool2d_with_indices", "sign", "embedding", "zeros_like", "new_zeros", "zero_", "fill_", "full_like"}
)
"""Operations that cannot underflow."""


@dataclass
class Recomputable:
    """An operation with its operands, so that it can be computed again."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    kept: tuple[list[Any], dict[str, Any]]
    """Its arguments as they were before."""
    read: list[tuple[Tensor, Tensor]]
    """The floating-point tensors that it reads, as they were before and as passed."""
    truths: dict[RangeEnd, tuple[dict[int, Tensor], tuple[FaultSource, ...]]]
    """For each end of the range: the true values of operands that differ from them, and the sources of the difference."""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return draws(self.func)

    def outputs(self, result: Any) -> list[Tensor]:
        """Return its results."""
        return outputs(self.func, self.args, self.kwargs, result)

    def computed(
        self, result: Any, true: dict[int, Tensor] | None = None, *, least: torch.dtype = FP32.dtype
    ) -> list[Tensor] | None:
        """Return its results in FP32, from its operands or from their ``true`` values; None if they are unknown.

        They are in FP64 if ``least`` is, or if a true value of its operands left FP32.
        """
        known = true or {}
        if any(t.dtype is FP64.dtype for t in known.values()):
            least = FP64.dtype

        def change(tensor: Tensor) -> Tensor:
            return at_least(known.get(id(tensor), tensor), least)

        if self.func.overloadpacket is torch.ops.aten.native_dropout:
            wide: list[Tensor] | None = dropout_in_fp32(*self.kept, result, change)
        else:
            wide = None if self.draws else recomputed(self.func, *self.kept, change, least=least)
        # A selection may return more or fewer elements of the true values: these cannot be matched.
        matches = wide is not None and [t.shape for t in wide] == [t.shape for t in self.outputs(result)]
        return wide if matches else None

    def keeps_magnitude(self) -> bool:
        """Return whether its results are never smaller than its operands."""
        return self.func.overloadpacket.__name__ in _KEEP_MAGNITUDE and not self.has_tiny_number()

    def has_tiny_number(self) -> bool:
        """Return whether the script passed it a number below FP16's full precision, such as an epsilon."""
        numbers = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, float))
        return any(0 < abs(x) < FP16.min_normal for x in numbers)


def largest_of(values: list[Tensor] | None, outputs: list[Tensor]) -> float | None:
    """Return the largest magnitude in ``values`` of the floating-point ``outputs``; None if any is not finite or unknown."""
    if values is None:
        return None
    of_floats = [value for value, output in zip(values, outputs, strict=True) if has_floats(output)]
    return max(map(largest, of_floats), default=0.0) if all(map(is_finite, of_floats)) else None
