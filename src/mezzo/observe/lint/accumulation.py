"""Check whether the loss was divided for accumulation twice, once or not at all in the backward passes of an update."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.observe.lint.gradients import BackwardPass, GradientState
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog

_SCALE_INVARIANT = (
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "AdamP",
    "Lion",
    "Adagrad",
    "RMSprop",
    "Adafactor",
    "LAMB",
    "Muon",
)


class Accumulation:
    """The accumulation windows of each optimizer."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._undivided: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Windows in a row without any division; far below 0 once a loss has been divided."""
        self._whole: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """The number of passes of the last window that was divided by it."""

    def in_session(self, backward: BackwardPass, parameters: list[Tensor]) -> None:
        """Record a backward pass of a session, whose own division is one of the factors."""
        count, near = backward.divides_by, backward.loss.near(backward.divides_by)
        if len(near) > 1 and (count > 2 or any(f.divides for f in near)) and not _averages(backward, count):
            detail = f"the script divides the loss by {count}, and mezzo.Session(accumulate={count}) averages over {count} passes"
            self._log.add("A607", detail, parameters=parameters, line=backward.line)

    def closed(self, optimizer: Optimizer, state: GradientState, *, step: int) -> None:
        """Record the backward passes of the update that step number ``step`` is about to make."""
        passes, count = state.passes, len(state.passes)
        # A script that changes gradients by hand may divide them at that point.
        if not passes or state.by_hand or passes[0].divides_by > 1:
            return
        self._check_short(optimizer, passes)
        if count < 2:
            return
        if all(_divided_twice(p, count) for p in passes):
            by_whom = ", the second time by the library that calls backward()" if passes[0].library else ""
            detail = f"{count} backward passes precede an update, and the loss is divided by {count} twice{by_whom}"
            self._log.add("A607", detail, parameters=trained_leaves(optimizer), line=passes[0].line)
        elif _not_divided(passes):
            self._undivided[optimizer] = count_in_row = self._undivided.get(optimizer, 0) + 1
            if count_in_row >= ENOUGH:
                first = step - 1 if count_in_row == ENOUGH else step
                detail = f"{count} backward passes of a mean loss precede each update, and none is divided by {count}"
                detail += _invariance_note(optimizer)
                self._log.add("A608", detail, parameters=trained_leaves(optimizer), line=passes[0].line, step=first)
        else:
            self._undivided[optimizer] = -1_000_000

    def _check_short(self, optimizer: Optimizer, passes: list[BackwardPass]) -> None:
        """Check a window with fewer passes than the ones before: the last of an epoch."""
        count, whole = len(passes), self._whole.get(optimizer, 0)
        if count > 1 and all(_divided_once(p, count) for p in passes):
            self._whole[optimizer] = count
        elif count < whole and all(_divided_once(p, whole) for p in passes):
            by_whom = " by the library that calls backward()" if passes[0].library else ""
            number = f"{count} backward pass{'es' if count > 1 else ''}"
            detail = f"an update of {number} divides each loss by {whole}{by_whom}, as the updates of {whole} passes do"
            detail += _invariance_note(optimizer)
            self._log.add("A624", detail, parameters=trained_leaves(optimizer), line=passes[0].line)


def _divided_once(backward: BackwardPass, count: int) -> bool:
    """Return whether a loss was divided once by ``count``, and not as the average of as many losses."""
    return backward.loss.divided_by(count) == 1 and not _averages(backward, count)


def _divided_twice(backward: BackwardPass, count: int) -> bool:
    """Return whether a loss was divided twice by the number of backward passes."""
    half_a_square = count == 2 and backward.loss.squares and not backward.library
    return backward.loss.divided_by(count) == 2 and not _averages(backward, count) and not half_a_square


def _averages(backward: BackwardPass, count: int) -> bool:
    """Return whether the loss is a sum of ``count`` losses, so that dividing it gives their average."""
    return backward.loss.end == "terms" and len(backward.loss.terms) == count


def _not_divided(passes: list[BackwardPass]) -> bool:
    """Return whether micro-batches were summed: passes from one line, each of a mean over a batch, that reached the same weights."""
    first = passes[0]
    alike = all((p.place, p.touched, p.library) == (first.place, first.touched, False) for p in passes)
    means = all(p.loss.is_mean(undivided_by=len(passes)) and p.batch > 1 for p in passes)
    return alike and means and all(p.known and not p.keeps_graph for p in passes)


def _invariance_note(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if name not in _SCALE_INVARIANT:
        return ""
    return f" ({name}'s update hardly depends on it; clipping, L2 penalties and logged norms do)"
