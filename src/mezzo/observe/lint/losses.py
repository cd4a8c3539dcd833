"""Read from the last nodes of a loss's graph how the script scaled, divided and reduced the loss.

Only values that autograd keeps on the host are read: names of nodes, shapes, numbers that a script multiplied or divided by. This walk is
short, because few nodes near the root compute scalars; the search for FP16 gradients walks the whole graph, once or twice in a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.formats import FP16

End: TypeAlias = Literal["mean", "sum", "terms", "unknown"]

_MAX_NODES = 64
_MAX_GRAPH_NODES = 100_000
_MEAN, _SUM = 1, 2
"""The values with which torch's losses encode their ``reduction``."""
_TRANSPARENT = (
    "ToCopy",
    "Clone",
    "View",
    "UnsafeView",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Neg",
    "Expand",
    "Contiguous",
)


_MIN_SCALE = 64.0
"""A smaller factor counts as the weight of a loss."""


class Factor(NamedTuple):
    """A number that a loss was multiplied by; None if it is on a device or not a plain number."""

    value: float | None
    divides: bool

    @property
    def may_scale(self) -> bool:
        """Whether it may be a loss scale; 1 counts, because a GradScaler that is off reports that scale."""
        return self.value is None or self.value == 1.0 or self.value >= _MIN_SCALE


class TracedLoss(NamedTuple):
    """The computation of a loss, from its last operation inwards."""

    factors: tuple[Factor, ...]
    """The factors, without the GradScaler's."""
    end: End
    """What the factors apply to: a mean, a sum, a sum of several losses, or something unknown."""
    terms: tuple[TracedLoss, ...] = ()
    """The losses that were added up, if there were several."""
    squares: bool = False
    """Whether it is a mean or sum of squares, which many scripts divide by two."""

    @property
    def may_be_scaled(self) -> bool:
        """Whether the script may have multiplied it by a loss scale of its own."""
        return any(f.may_scale for f in (*self.factors, *(f for term in self.terms for f in term.factors)))

    def is_mean(self, *, undivided_by: int) -> bool:
        """Return whether it is a mean, or a weighted sum of means, that nothing divided by ``undivided_by``."""
        if self.end == "terms":
            means = all(term.end == "mean" and not term.near(undivided_by) for term in self.terms)
            return means and not self.factors and len(self.terms) != undivided_by
        return self.end == "mean" and not self.factors

    def near(self, count: int) -> list[Factor]:
        """Return the factors that are close to one over ``count``."""
        return [f for f in self.factors if f.value is not None and abs(f.value * count - 1.0) < 1e-3]

    def divided_by(self, count: int) -> int:
        """Return how often it was divided by ``count``; a factor of one half may be part of the loss itself, but a division by 2 counts."""
        return sum(1 for f in self.near(count) if f.divides or count > 2)


UNKNOWN_LOSS = TracedLoss((), "unknown")


def loss_of(root: Tensor, scalings: Collection[int]) -> TracedLoss:
    """Return how the scalar ``root`` was computed; ``scalings`` are the sequence numbers of a GradScaler's products."""
    if root.numel() != 1 or root.grad_fn is None:
        return UNKNOWN_LOSS
    factors, node = _followed(root.grad_fn, scalings)
    name = _kind(node)
    if name in ("Add", "Sub"):
        followed = [_followed(term, scalings) for term in _terms(node)]
        return TracedLoss(
            factors, "terms", tuple(TracedLoss(inner, _reduction(end, _kind(end))) for inner, end in followed)
        )
    squares = name == "MseLoss" or any(_kind(n) == "Pow" for n in _inputs(node))
    return TracedLoss(factors, _reduction(node, name), squares=squares)


def _followed(node: Any, scalings: Collection[int]) -> tuple[tuple[Factor, ...], Any]:
    """Return the factors from ``node`` inwards, and the first node that is neither a factor nor a view."""
    factors: list[Factor] = []
    for _ in range(_MAX_NODES):
        name, inputs = _kind(node), _inputs(node)
        if len(inputs) != 1 or not _is_scalar(node) or (name == "Div" and node.next_functions[0][0] is None):
            break
        if name in ("Mul", "Div"):
            if _sequence(node) not in scalings:
                factors.append(_factor(node, divides=name == "Div"))
        elif not (
            name in _TRANSPARENT or name in ("Add", "Sub") or (name in ("Mean", "Sum") and _is_scalar(inputs[0]))
        ):
            break
        node = inputs[0]
    return tuple(factors), node


def found_in(roots: Iterable[Tensor], sequences: Collection[int]) -> int | None:
    """Return the first of ``sequences`` found near the end of the graph of ``roots``; None if none is found.

    A node is newer than all nodes behind it, so nodes older than the oldest of ``sequences`` need not be followed.
    """
    oldest = min(sequences, default=0)
    waiting = [r.grad_fn for r in roots if r.grad_fn is not None] if sequences else []
    seen: set[Any] = set()
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        number = _sequence(node)
        if number in sequences:
            return number
        seen.add(node)
        waiting += [
            n for n in _inputs(node) if n not in seen and _sequence(n) >= oldest and "Accumulate" not in n.name()
        ]
    return None


def scalings_in(root: Tensor, sequences: Collection[int]) -> list[int]:
    """Return the ``sequences`` that a loss passed through, the last first; a sum of several losses ends the walk."""
    found, node = [], root.grad_fn
    for _ in range(_MAX_NODES if root.numel() == 1 else 0):
        if node is None or not _is_scalar(node):
            break
        if _sequence(node) in sequences:
            found.append(_sequence(node))
        elif _kind(node) not in ("Mul", "Div", *_TRANSPARENT):
            break
        node = next(iter(_inputs(node)), None) if len(_inputs(node)) == 1 else None
    return found


def has_fp16_gradients(roots: Iterable[Tensor]) -> bool:
    """Return whether a backward pass from ``roots`` computes FP16 gradients."""
    waiting: list[Any] = [r.grad_fn for r in roots if r.grad_fn is not None]
    seen = set(waiting)
    while waiting and len(seen) < _MAX_GRAPH_NODES:
        node = waiting.pop()
        if any(metadata.dtype == FP16.dtype for metadata in node._input_metadata):
            return True
        following = [n for n in _inputs(node) if n not in seen]
        seen.update(following)
        waiting += following
    return False


def factor_of_product(root: Tensor) -> Tensor | None:
    """Return the tensor without a gradient whose product with another, summed, is ``root``; None if ``root`` is no such product."""
    if root.numel() != 1 or root.grad_fn is None:
        return None
    _, node = _followed(root.grad_fn, ())
    if _kind(node) == "Sum" and _inputs(node):
        node = _inputs(node)[0]
    if _kind(node) not in ("Mul", "Dot") or len(_inputs(node)) != 1:
        return None
    for name in ("_saved_other", "_saved_self", "_saved_tensor"):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # freed, or changed in place since
            continue
        if isinstance(saved, Tensor) and not saved.requires_grad:
            return saved
    return None


def sequences_of(outputs: Any) -> list[int]:
    """Return the sequence numbers of the nodes that computed tensors, also in lists and tuples."""
    if isinstance(outputs, Tensor):
        return [] if outputs.grad_fn is None else [_sequence(outputs.grad_fn)]
    return [n for output in outputs for n in sequences_of(output)] if isinstance(outputs, (list, tuple)) else []


def _kind(node: Any) -> str:
    """Return a node's name without its ending: ``Mul`` for MulBackward0."""
    return str(node.name()).partition("Backward")[0]


def _inputs(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _sequence(node: Any) -> int:
    return int(node._sequence_nr())


def _factor(node: Any, *, divides: bool) -> Factor:
    try:
        saved = getattr(node, "_saved_other", None)
        saved = saved if saved is not None or divides else getattr(node, "_saved_self", None)
        readable = not isinstance(saved, Tensor) or (saved.device.type == "cpu" and saved.numel() == 1)
        with torch._C._DisableTorchDispatch():  # or an observer of operations would record this one
            value = float(saved) if readable else None  # type: ignore[arg-type]
    except (RuntimeError, TypeError):  # freed, changed in place since, packed by a hook, or not a real number
        value = None
    return Factor(1 / value if divides and value else value, divides)


def _is_scalar(node: Any) -> bool:
    """Return whether a node's result is one number."""
    return [torch.Size(metadata.shape).numel() for metadata in node._input_metadata] == [1]


def _reduction(node: Any, name: str) -> End:
    if name in ("Mean", "Sum"):
        return "mean" if name == "Mean" else "sum"
    saved = getattr(node, "_saved_reduction", None)
    return "mean" if saved == _MEAN else "sum" if saved == _SUM else "unknown"


def _terms(node: Any) -> list[Any]:
    """Return the nodes whose results are added up."""
    waiting, terms = [node], list[Any]()
    while waiting and len(terms) < _MAX_NODES:
        inner = waiting.pop()
        if _kind(inner) in ("Add", "Sub"):
            waiting += _inputs(inner)
        else:
            terms.append(inner)
    return terms
