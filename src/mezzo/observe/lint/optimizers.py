"""Check optimizers and the schedules of their learning rates: state in 16 bits once, after the first update; steps at skipped updates.

Only formats and the numbers of the parameter groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.engine.casts.half import HALF
from mezzo.formats import FP16, Format, format_of
from mezzo.observe.lint.gradients import MAX_FLAGS, Gradients, GradientState
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog
from mezzo.observe.source_lines import running_line

_MOMENTS = (
    *(("exp_avg_sq", "betas"), ("v", "betas"), ("square_avg", "alpha"), ("square_avg", "rho")),
    *(("exp_inf", "betas"), ("sum", "lr_decay")),
)
"""The second moments of Adam's family, also written by hand, RMSprop, Adadelta, Adamax and Adagrad: their name in the state, and a name in
the group, which is their decay's except for Adagrad's sum."""


class _Moments(NamedTuple):
    """The second moments of a group of parameters that are kept in one 16-bit format."""

    parameters: list[Tensor]
    key: str
    decay: float
    """1 for a sum."""
    format: Format
    group: dict[str, Any]


class OptimizerStates:
    """The states of all optimizers."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._inspected: WeakSet[Optimizer] = WeakSet()

    def inspect(self, optimizer: Optimizer) -> None:
        """Inspect an optimizer after its first update."""
        if optimizer in self._inspected or not optimizer.state:
            return
        self._inspected.add(optimizer)
        name = type(optimizer).__name__
        for found in _moments(optimizer):
            lost = _lost(found)
            if lost:
                with_decay = f" with a decay of {found.decay:g}" if found.decay < 1 else ""
                detail = f"{name} keeps second moments in {found.format.name.upper()};{with_decay} {lost}"
                self._log.add("A622", detail, parameters=found.parameters)
            eps = found.group.get("eps")
            # A fused kernel computes in FP32.
            if isinstance(eps, float) and eps and not found.group.get("fused") and _vanishes(eps, found.format):
                detail = f"the eps of {name}, {eps:g}, is added to {found.format.name.upper()} values, and rounds to 0 in that format"
                self._log.add("A620", detail, parameters=found.parameters)


def _moments(optimizer: Optimizer) -> Iterator[_Moments]:
    for group in optimizer.param_groups:
        for key, field in _MOMENTS:
            decay = group.get(field)
            decay = decay[1] if isinstance(decay, (list, tuple)) and len(decay) > 1 else decay
            decay = 1.0 if key == "sum" and decay is not None else decay
            if not isinstance(decay, float):
                continue
            moments = ((p, optimizer.state.get(p, {}).get(key)) for p in group["params"])
            narrow = [(p, m) for p, m in moments if isinstance(m, Tensor) and m.dtype in HALF]
            for dtype in dict.fromkeys(m.dtype for _, m in narrow):
                form = format_of(dtype)
                assert form is not None
                yield _Moments([p for p, m in narrow if m.dtype == dtype], key, decay, form, group)


def _lost(moments: _Moments) -> str:
    """Return what a second moment loses in its format; empty for nothing that is certain."""
    share = 1 - moments.decay
    if moments.key == "sum":
        return f"once a sum is {round(4 / moments.format.eps)} times as large as a square, adding that changes nothing"
    if share < moments.format.eps / 4:  # half a unit in the last place of the numbers just below a power of two
        return "they never fall: each step is below half a unit in the last place"
    if moments.format is FP16 and share > 0 and moments.key != "exp_inf":
        least = (moments.format.min_subnormal / 2 / share) ** 0.5
        return f"gradients below {least:.2g} leave no trace: their squares round to 0"
    return ""


def _vanishes(value: float, form: Format) -> bool:
    return not torch.tensor(value, dtype=form.dtype).item()


# --- Check whether a schedule waits for the optimizer, and for updates that the script's GradScaler skipped ---------------------

# A fused optimizer skips by itself, and only the device knows whether it did: these flags are read once, at the end, up to ``MAX_FLAGS``.


def _after_skip(scheduler: str) -> str:
    return f"{scheduler}.step() after an update that the GradScaler skipped"


class LearningRates:
    """The steps of schedulers and of their optimizers."""

    def __init__(self, gradients: Gradients, log: MisuseLog) -> None:
        self._gradients, self._log = gradients, log
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The line of a scheduler's first step if its optimizer had not stepped yet; empty once that was judged."""
        self._flagged: list[tuple[Tensor, str, str, int]] = []
        """Steps of schedulers after an update that may have been skipped: its flag, the scheduler's class, the line, the step."""
        self._early: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def scheduler_stepped(self, scheduler: Any, *, step: int) -> None:
        """Record that the script steps a scheduler during ``step``."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer):
            return
        state = self._gradients.of(optimizer)
        self._check_first(scheduler, optimizer, state)
        if state.passes:
            state.early = running_line()
        name = type(scheduler).__name__
        if state.skipped and not state.made:
            self._log.add("A610", _after_skip(name))
        elif state.flag is not None and state.made == 1 and len(self._flagged) < MAX_FLAGS:
            self._flagged.append((state.flag, name, running_line(), step))
        state.made, state.skipped, state.flag = 0, 0, None

    def read_flags(self) -> None:
        """Report the steps of schedulers after updates that fused optimizers have skipped."""
        flagged, self._flagged = self._flagged, []
        for flag, name, line, step in flagged:
            if flag.item():
                self._log.add("A610", _after_skip(name), line=line, step=step)

    def optimizer_steps(self, optimizer: Optimizer, state: GradientState, *, step: int) -> None:
        """Record that an optimizer is about to step."""
        if not state.early:
            return
        self._early[optimizer] = count = self._early.get(optimizer, 0) + 1
        if count >= ENOUGH:
            self._report(optimizer, state.early, step=step - 1 if count == ENOUGH else step)

    def _check_first(self, scheduler: Any, optimizer: Optimizer, state: GradientState) -> None:
        """Compare the lines of a scheduler's first two steps: a resumed loop advances its schedule in another line first."""
        stepped = bool(state.num_steps) or getattr(optimizer, "_opt_called", False)
        if scheduler not in self._first:
            self._first[scheduler] = "" if stepped or state.passes else running_line()
        elif self._first[scheduler]:
            first, self._first[scheduler] = self._first[scheduler], ""
            if state.num_steps and first == running_line():
                self._report(optimizer, first, step=1)

    def _report(self, optimizer: Optimizer, line: str, *, step: int) -> None:
        detail = f"the scheduler of {type(optimizer).__name__} steps before it in each iteration"
        self._log.add("A611", detail, line=line, step=step)
