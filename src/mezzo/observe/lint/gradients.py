"""The state of an optimizer's gradients: which backward passes added to them, at which scale, and what the script did to them since.

Nothing is read from a device. A change of a gradient shows in its identity and its version, two numbers that torch keeps on the host
anyway. Reading them takes 0.3 us per parameter, twice per backward pass, in the first steps only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.gradients import trained_leaves
from mezzo.observe.lint.losses import TracedLoss
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog

MAX_FLAGS = 256
"""Most flags of fused optimizers that one check keeps until the end of the run."""
_NONE = -1


@dataclass(frozen=True)
class Scaled:
    """The GradScaler that scaled a loss, and how many updates it had made by then."""

    scaler: Any
    epoch: int


class ScaledAgain(NamedTuple):
    """A second scale of one loss."""

    what: str
    scaler: Any = None
    """The other GradScaler, if there is one."""


@dataclass(frozen=True)
class BackwardPass:
    """The contribution of one backward pass."""

    scaled: Scaled | None
    """The scale of its loss; None if the loss has none, or an unknown one."""
    known: bool
    """Whether the scale is certain: a script may multiply a loss by hand."""
    loss: TracedLoss
    line: str
    place: int
    """A number that identifies the chain of the script's calls that led to it."""
    library: bool
    """Whether a library called it."""
    divides_by: int
    """The divisor that a session applies to the gradients of this pass; 1 without a session."""
    batch: int
    """First dimension of the model's last input; 0 if unknown."""
    keeps_graph: bool
    fp16: bool
    """Whether it certainly computes FP16 gradients of an unscaled loss."""
    again: ScaledAgain | None = None
    """What multiplies its loss by a scale beside the GradScaler of ``scaled``."""
    touched: int = 0
    """A number for the set of parameters that it reached."""


@dataclass
class GradientState:
    """The state of one optimizer's gradients."""

    passes: list[BackwardPass] = field(default_factory=list)
    """Backward passes since the gradients were cleared or used."""
    unscaled: bool = False
    late: bool = False
    """Whether a scaled backward pass followed after they were unscaled."""
    by_hand: bool = False
    """Whether the script changed them itself."""
    clipped: bool = False
    """Whether clipping these gradients was reported."""
    norm_read: str = ""
    """The script's line that read their norm while they were scaled."""
    limit_read: str = ""
    """The script's line that computed clamped copies while they were scaled."""
    dropped: int = 0
    """Number of backward passes whose gradients were cleared since the last step."""
    num_steps: int = 0
    num_skipped: int = 0
    """Number of these that the script's GradScaler skipped."""
    num_empty: int = 0
    """Number of steps that had only cleared gradients."""
    first_empty: tuple[int, str] = (0, "")
    made: int = 0
    skipped: int = 0
    """Steps that were made and skipped since one of the optimizer's schedulers stepped."""
    flag: Tensor | None = None
    """Above 0 if the last step was skipped by the optimizer itself, as fused ones do; None if the host knows whether it was made."""
    last_flag: Tensor | None = None
    """The same, and not forgotten when a scheduler steps."""
    early: str = ""
    """The script's line that stepped a scheduler between the last backward pass and the step."""
    by_scaler: bool = False
    """Whether the last step that used them was a GradScaler's, and they are the same since."""
    marks: list[int] = field(default_factory=list)

    @property
    def scaled(self) -> bool:
        """Whether they are certainly scaled now."""
        return not self.unscaled and not self.by_hand and any(p.scaled is not None for p in self.passes)

    def add(self, one: BackwardPass) -> None:
        """Record what a backward pass added to them."""
        self.late = self.late or (self.unscaled and one.scaled is not None)
        self.early = ""
        self.passes.append(one)

    def unscale(self) -> None:
        """Record that the script's GradScaler has divided them by its scale."""
        self.unscaled = True

    def read_norm(self, line: str) -> None:
        """Record that a line of the script read their norm, if nobody changed them before."""
        if not self.norm_read and not self.by_hand:
            self.norm_read = line

    def read_limit(self, line: str) -> None:
        """Record that a line of the script computed clamped copies of them."""
        self.limit_read = self.limit_read or line

    def judge(self, *, changed: bool) -> tuple[str, str]:
        """Return the lines that read their norm and a limit, and forget these; ``changed`` says whether the script changed them since."""
        self.by_hand = self.by_hand or (changed and bool(self.passes))
        lines = self.norm_read, self.limit_read
        self.norm_read = self.limit_read = ""
        return lines

    def clip(self) -> None:
        """Record that clipping them was reported."""
        self.clipped = True

    def step_empty(self, step: int, line: str) -> None:
        """Record that the optimizer stepped with cleared gradients only."""
        self.num_empty += 1
        if self.num_empty == 1:
            self.first_empty = step, line

    def step(self, *, skipped: bool, by_scaler: bool) -> None:
        """Record that a step used them, whether a GradScaler called it, and whether that skipped it."""
        self.num_steps += 1
        self.num_skipped += skipped
        self.skipped, self.made = self.skipped + skipped, self.made + (not skipped)
        self.dropped = 0
        self._forget()
        self.by_scaler = by_scaler

    def skip(self) -> None:
        """Record a skipped step whose gradients nobody checks any more."""
        self.skipped += 1

    def perhaps_skip(self, flag: Tensor) -> None:
        """Record that the optimizer itself skipped the last step if ``flag`` is above 0."""
        self.flag = self.last_flag = flag

    def schedule(self, line: str) -> tuple[int, int, Tensor | None]:
        """Record that a line of the script stepped a scheduler.

        Return the steps made and skipped since the last time, and the flag of the last of them.
        """
        if self.passes:
            self.early = line
        since = self.made, self.skipped, self.flag
        self.made, self.skipped, self.flag = 0, 0, None
        return since

    def clear(self) -> None:
        """Record that the gradients are None or zero."""
        self.dropped += len(self.passes)
        self._forget()

    def _forget(self) -> None:
        self.passes = []
        self.unscaled = self.late = self.by_hand = self.clipped = self.by_scaler = False
        self.norm_read = self.limit_read = self.early = ""


class Gradients:
    """The state of every optimizer's gradients."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[Optimizer, GradientState] = weakref.WeakKeyDictionary()
        self._before: dict[int, list[int]] = {}

    def of(self, optimizer: Optimizer) -> GradientState:
        """Return the state of an optimizer's gradients."""
        state = self._states.get(optimizer)
        if state is None:
            state = self._states[optimizer] = GradientState(marks=marks_of(optimizer))
        return state

    def inspect(self, optimizer: Optimizer) -> GradientState:
        """Return the state after checking whether the script changed the gradients since the last check."""
        state, now = self.of(optimizer), marks_of(optimizer)
        if now != state.marks:
            if all(mark == _NONE for mark in now):
                state.clear()
            else:
                state.by_hand = bool(state.passes)
            state.by_scaler = False
            state.marks = now
        return state

    def settle(self, optimizer: Optimizer) -> None:
        """Accept the gradients as they are: their change is accounted for."""
        self.of(optimizer).marks = marks_of(optimizer)

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Inspect all gradients before a backward pass."""
        self._before = {id(optimizer): list(self.inspect(optimizer).marks) for optimizer in optimizers}

    def touched(self, optimizers: Iterable[Optimizer]) -> list[tuple[Optimizer, int]]:
        """Return the optimizers whose gradients a backward pass changed, each with a number for the set of parameters."""
        found = []
        for optimizer in optimizers:
            state, now = self.of(optimizer), marks_of(optimizer)
            before = self._before.get(id(optimizer), state.marks)
            places = tuple(k for k, (a, b) in enumerate(zip(before, now, strict=False)) if a != b)
            if places:
                found.append((optimizer, hash(places)))
                state.by_scaler = False
            state.marks = now
        return found

    def scaled_among(
        self, parameters: Iterable[Tensor], owners: Iterable[Optimizer]
    ) -> tuple[list[Optimizer], list[Tensor]]:
        """Return the ``owners`` whose gradients are scaled, and their part of ``parameters``: another owner may have unscaled the rest."""
        checked = [(o, self.inspect(o)) for o in owners]
        unscaled = {id(p) for o, state in checked if state.unscaled for p in trained_leaves(o)}
        left = {id(p): p for p in parameters if p.grad is not None and id(p) not in unscaled}
        scaled = [o for o, state in checked if state.scaled and any(id(p) in left for p in trained_leaves(o))]
        owned = {id(p) for o in scaled for p in trained_leaves(o)}
        return scaled, [p for key, p in left.items() if key in owned]

    @staticmethod
    def owners(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that train any of ``parameters`` with a gradient."""
        with_gradient = {id(p) for p in parameters if p.grad is not None}
        return [o for o in optimizers if any(id(p) in with_gradient for p in trained_leaves(o))]


def marks_of(optimizer: Optimizer) -> list[int]:
    """Return a number for each gradient, which changes when the gradient does."""
    gradients = (p.grad for p in trained_leaves(optimizer))
    return [_NONE if g is None else (id(g) << 24) + g._version for g in gradients]


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
