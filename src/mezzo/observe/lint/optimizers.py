"""Check what a script keeps from step to step: an optimizer's state, learning rates, averages of weights, running statistics.

Only formats and the numbers of the parameter groups are read.

A fused optimizer skips by itself: these flags are read once, at the end, as ``schedules`` does.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.engine.optimizers.one_pass import OnePass
from mezzo.formats import FP16, FP32, Format, format_of
from mezzo.observe.lint.gradients import MAX_FLAGS, Gradients, GradientState
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import format_name

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
        reported = set[str]()
        for found in _moments(optimizer):
            lost = _lost(found)
            if lost:
                reported.add(found.key)
                with_decay = f" with a decay of {found.decay:g}" if found.decay < 1 else ""
                detail = f"{name} keeps second moments in {found.format.name.upper()};{with_decay} {lost}"
                self._log.add("A622", detail, parameters=found.parameters)
            eps = found.group.get("eps")
            # A fused kernel computes in FP32.
            if isinstance(eps, float) and eps and not found.group.get("fused") and _vanishes(eps, found.format):
                detail = f"the eps of {name}, {eps:g}, is added to {found.format.name.upper()} values, and rounds to 0 in that format"
                self._log.add("A620", detail, parameters=found.parameters)
        self._check_narrow(optimizer, reported)
        if isinstance(optimizer, torch.optim.Adafactor):
            self._check_default_eps(optimizer)

    def _check_default_eps(self, optimizer: torch.optim.Adafactor) -> None:
        """Check for an eps of None beside 16-bit weights: torch then takes the machine epsilon of their format."""
        for group in optimizer.param_groups:
            narrow = [p for p in group["params"] if p.dtype in HALF and p in optimizer.state]
            form = format_of(narrow[0].dtype) if narrow and group["eps"][0] is None else None
            if form is not None:
                detail = f"eps=(None, ...) means {form.eps:.2g} for weights in {form.name.upper()}, and {FP32.eps:.2g} for FP32 ones"
                self._log.add("A635", detail, parameters=narrow)

    def _check_narrow(self, optimizer: Optimizer, reported: Container[str]) -> None:
        """Check for 16-bit state beside FP32 weights, and for 16-bit counts of steps; ``reported`` are names that A622 has."""
        if isinstance(
            optimizer, OnePass
        ):  # their moments are narrow where that was asked for, and rounded stochastically
            return
        narrow: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for p in trained_leaves(optimizer):
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.dtype in HALF and key not in reported:
                    counts = key == "step" and value.numel() == 1
                    if counts or (p.dtype == FP32.dtype and value.shape == p.shape and p.numel() > 1):
                        narrow.setdefault((key, value.dtype), []).append(p)
        if narrow:
            listed = ", ".join(f"{key} in {format_name(dtype).upper()}" for key, dtype in narrow)
            parameters = list({id(p): p for found in narrow.values() for p in found}.values())
            weights = f"{len(parameters)} weight{'s' if len(parameters) > 1 else ''}"
            first = self._log.names().parameter(parameters[0])
            name = self._log.names().parameter(parameters[0])
            first = f"the first is {name}, {format_name(parameters[0].dtype).upper()}"
            detail = f"{type(optimizer).__name__} keeps {listed}, for {weights}; {first}"
            self._log.add("A627", detail, parameters=parameters)


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
        made, skipped, flag = state.schedule(running_line())
        name = type(scheduler).__name__
        if skipped and not made:
            self._log.add("A610", _after_skip(name))
        elif flag is not None and made == 1 and len(self._flagged) < MAX_FLAGS:
            self._flagged.append((flag, name, running_line(), step))

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


_STATISTIC = re.compile(r"(^|_)(running|moving|ema|avg|average|mean|var|std|momentum)(_|$)")
"""Names of statistics: a buffer that changes may also be a cache, a queue or a seed."""


class Averages:
    """The moves of averages of weights, in ``AveragedModel`` or by hand."""

    def __init__(self, gradients: Gradients, log: MisuseLog) -> None:
        self._gradients, self._log = gradients, log
        self._begun: WeakSet[nn.Module] = WeakSet()
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        """Number of steps at the last move, and how many of them were skipped."""
        self._flagged: list[tuple[Tensor, str, int]] = []
        """Moves after a step that may have been skipped: its flag, the line, the step."""
        self._num_by_hand = 0
        self._by_hand: list[tuple[str, int]] = []
        """Moves by hand after skipped updates: reported once there are several moves, since a single one may be a merge of models."""

    def model_moves(self, average: nn.Module, model: nn.Module, optimizers: Iterable[Optimizer], *, step: int) -> None:
        """Record that ``AveragedModel`` averages a model's weights; the first time, it copies them."""
        line = running_line()
        moves = self._after_skip(model.parameters(), optimizers, step=step, line=line)
        if average in self._begun and moves:
            self._report(line, step)
        self._begun.add(average)

    def moves_by_hand(self, weight: Tensor, optimizers: Iterable[Optimizer], *, step: int, line: str = "") -> None:
        """Record that the script's own code moves an average of a weight, in ``line`` or the running one."""
        self._num_by_hand += 1
        line = line or running_line()
        if self._after_skip([weight], optimizers, step=step, line=line):
            self._by_hand.append((line, step))
        if self._num_by_hand >= ENOUGH:
            moves, self._by_hand = self._by_hand, []
            for move in moves:
                self._report(*move)

    def read_flags(self) -> None:
        """Report the moves after updates that fused optimizers have skipped."""
        flagged, self._flagged = self._flagged, []
        for flag, line, step in flagged:
            if flag.item():
                self._report(line, step)

    def _after_skip(self, weights: Iterable[Tensor], optimizers: Iterable[Optimizer], *, step: int, line: str) -> bool:
        """Return whether all updates of ``weights`` since the last move were skipped, as far as the host knows."""
        ids = {id(p) for p in weights}
        made = skipped = 0
        flag = None
        for optimizer in optimizers:
            if any(id(p) in ids for p in trained_leaves(optimizer)):
                state = self._gradients.of(optimizer)
                now, before = (state.num_steps, state.num_skipped), self._seen.get(optimizer, (0, 0))
                self._seen[optimizer] = now
                skipped += now[1] - before[1]
                made += now[0] - before[0] - (now[1] - before[1])
                flag = state.last_flag
        if flag is not None and (made, skipped) == (1, 0) and len(self._flagged) < MAX_FLAGS:
            self._flagged.append((flag, line, step))
        return skipped > 0 and made == 0

    def _report(self, line: str, step: int) -> None:
        self._log.add("A619", "the average moves after an update that the GradScaler skipped", line=line, step=step)


class Statistics:
    """Running statistics in 16 bits: buffers of torch's norms, and others that have such names and change in training."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._num_inspections = 0
        self.done = False
        """Whether nothing is left to inspect."""
        self._marks: dict[tuple[nn.Module, str], tuple[int, int]] = {}

    def inspect(self, roots: Iterable[nn.Module], *, line: str) -> None:
        """Inspect all modules, which the script calls in ``line``, after an update; the second call finds the buffers that changed."""
        if self.done:
            return
        self._num_inspections += 1
        self.done = self._num_inspections == 2
        modules = [module for root in roots for module in root.modules() if module.training]
        norms = [module for module in modules if isinstance(module, _NormBase) and _is_half(module.running_mean)]
        if self._num_inspections == 1 and norms:
            mean = norms[0].running_mean
            assert mean is not None
            count = f"{len(norms)} module{'s' if len(norms) > 1 else ''}"
            detail = f"running_mean and running_var of {count} are {format_name(mean.dtype).upper()}, and training updates them"
            self._log.add("A613", detail, modules=norms, line=line)
        before, self._marks = self._marks, {}
        changed = []
        for module in modules:
            for name, buffer in () if isinstance(module, _NormBase) else module.named_buffers(recurse=False):
                if _is_half(buffer) and _STATISTIC.search(name):
                    mark = self._marks[module, name] = id(buffer), buffer._version
                    if before.get((module, name), mark) != mark:
                        changed.append((module, name, buffer))
        if changed:
            module, name, buffer = changed[0]
            detail = (
                f"{name} of {type(module).__name__} is {format_name(buffer.dtype).upper()}, and training updates it"
            )
            self._log.add("A613", detail, modules=[module for module, _, _ in changed], line=line)


def check_average(log: MisuseLog, average: nn.Module, model: nn.Module) -> None:
    """Check the format of the weights that ``torch.optim.swa_utils.AveragedModel`` averages into."""
    pairs = zip(average.parameters(), model.parameters(), strict=False)
    half = [(mean, weight) for mean, weight in pairs if _is_half(mean)]
    if half:
        detail = f"AveragedModel keeps {len(half)} averages in {format_name(half[0][0].dtype).upper()}"
        log.add("A612", detail, parameters=[weight for _, weight in half])


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF
